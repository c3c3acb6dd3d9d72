"""A version on disk: its shards, its state while a job runs, publishing, comparing and repairing it.

A shard is finished when it has a sidecar (`shard_files.py`), which `writer.py` adds after the files. `JobState.check`
says whether a job may write and delete: while the claim (`claim.py`) is its own; a repair, which has none, while the
manifest is the one that it repairs. `version.py` deletes what another plan left, `state.py` the state once a version is
published; `publish.py` deletes files that aren't part of the version.
"""
