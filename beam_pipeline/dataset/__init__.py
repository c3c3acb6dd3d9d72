"""A version on disk: its shards, its state while a job runs, publishing, comparing and repairing it.

A shard is finished when `state.py` has its sidecar, which `writer.py` adds after the file. Only the holder of the claim
(`claim.py`) may delete: `state.py` what another plan left, `publish.py` and `repair.py` what the version doesn't have.
"""
