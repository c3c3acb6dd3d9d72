"""Makes TFRecord files of any origin a dataset: run index and manifest, no record copied. `dataset.index` does it."""
