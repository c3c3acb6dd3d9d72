"""Which shard each image goes to, decided before one is written."""
