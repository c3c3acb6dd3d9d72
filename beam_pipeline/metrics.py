"""Names of the job's Beam counters, with their units, and one helper to count.

They appear on every runner's job page; local runs also print them at the end.
"""

from __future__ import annotations

NAMESPACE = "imageshards"

IMAGES_LISTED = "images-listed"
SKIPPED_HIDDEN = "files-skipped-hidden"
SKIPPED_OTHER_SUFFIX = "files-skipped-other-suffix"
SKIPPED_OUTSIDE_CLASSES = "images-skipped-outside-classes"
CLASSES_EMPTY = "classes-without-images"
IMAGES_SAMPLED = "images-sampled"
IMAGES_REJECTED = "images-rejected"
RECORDS_WRITTEN = "records-written"
SHARDS_WRITTEN = "shards-written"
SHARDS_KEPT = "shards-kept"
SOURCE_BYTES = "source-bytes-read"
WRITTEN_BYTES = "shard-bytes-written"
SHARD_MSEC = "shard-write-msec"
