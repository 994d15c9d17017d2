"""What survives a crash: atomic writes, random states, one-file checkpoints."""
