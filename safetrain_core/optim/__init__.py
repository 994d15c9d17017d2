"""What moves the weights: optimizers by name, learning-rate schedules."""
