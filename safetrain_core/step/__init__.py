"""One safe optimizer step: the guard over gradients, and the AMP step around it."""
