"""Checks a dataset: files, indexes, hashes, metadata, every record, every image. `dataset.verify` does it all."""
