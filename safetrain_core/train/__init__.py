"""The loop: the trainer, the CSV log, and what a signal asks of them."""
