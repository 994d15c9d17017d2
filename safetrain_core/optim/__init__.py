"""What moves the weights: learning-rate schedules."""
