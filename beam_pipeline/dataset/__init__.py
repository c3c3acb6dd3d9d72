"""A version on disk: its shards, its state while a job runs, publishing, comparing and repairing it."""
