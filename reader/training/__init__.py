"""`imageshards train`: trains an image classifier on a TPU, GPUs or the CPU."""
