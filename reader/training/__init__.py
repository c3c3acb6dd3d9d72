"""`imageshards train`: a training entrypoint for TPU, GPU or CPU."""
