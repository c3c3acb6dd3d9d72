"""What the command prints when a job is done."""

from __future__ import annotations

import re
import shlex
import unicodedata
from itertools import pairwise

from msgspec import UNSET, UnsetType

from beam_pipeline.cli.progress import duration
from beam_pipeline.config import Config
from beam_pipeline.inputs.folders import split_word
from beam_pipeline.schema.job import Excluded, Plan, PlannedJob, Skipped, as_run
from beam_pipeline.schema.manifest import ALREADY_PUBLISHED, PUBLISHED, Manifest
from beam_pipeline.text import first_few, plural, size_text

_FEW = 5  # fewer records of a class in a split are too few to train or evaluate with


def plan_text(plan: Plan, excluded: Excluded | UnsetType = UNSET) -> str:
    """The plan's splits and their shards, for `--plan_only`."""
    lines = []
    for name, split in sorted(plan.splits.items()):
        mean = size_text(split.estimated_bytes / split.shards)
        lines.append(f"{name}: {plural(split.images, 'image')} in {plural(split.shards, 'shard')} of about {mean}")
    lines += _excluded(excluded) + _unmatched(excluded)
    return "\n".join([*lines, f"{plural(len(plan.classes), 'class')}; nothing was written"])


def estimate_text(planned: PlannedJob, cores: int | None, base: str) -> str:
    """The work of a planned job, for `--plan_only`.

    Args:
        planned: the plan and its sample.
        cores: that the job runs on; None if unknown.
        base: the version that unchanged images are reused from, or "".
    """
    plan, sampled = planned.plan, max(1, planned.sampled)
    reused = plan.images * planned.unchanged // sampled
    read = plan.images - plan.images * planned.unread // sampled
    cpu_s = (plan.images - reused) * planned.cpu_s
    on = f": {duration(cpu_s / cores)} on {plural(cores, 'core')} if none is idle" if cores else ""
    source_bytes = size_text(planned.source_bytes * read // plan.images)
    record_bytes = size_text(sum(split.estimated_bytes for split in plan.splits.values()))
    lines = [
        f"estimated from {plural(planned.sampled, 'sampled image')}:",
        f"{_cpu_text(cpu_s)} to convert {plural(plan.images - reused, 'image')}{on}",
        f"reads {plural(read, 'file')} ({source_bytes}), writes {plural(plan.shards, 'shard')} ({record_bytes})",
    ]
    if reused:
        of = f"{planned.unchanged:,} of the {planned.sampled:,} sampled are unchanged"
        lines.append(f"{plural(reused, 'image')} reused from {base}: {of}")
    return "\n  ".join(lines)


def published_text(manifest: Manifest) -> str:
    """A published dataset's splits, shard sizes and classes, and the images of the input that it doesn't have."""
    data, run = manifest.data, as_run(manifest.run)
    nothing = ", nothing written" if manifest.outcome == ALREADY_PUBLISHED else ""
    lines = [f"{manifest.outcome} {manifest.url}{nothing}"]
    if manifest.checked:
        lines.append(manifest.checked)
    for split, content in sorted(data["splits"].items()):
        sizes = [shard["bytes"] for shard in content["shards"]]
        shards = f"{plural(len(sizes), 'shard')} of {_sizes_text(sizes)}"
        lines.append(f"{split}: {plural(content['records'], 'record')} in {shards}")
    records, rejects = plural(manifest.records, "record"), plural(manifest.images - manifest.records, "reject")
    by_reason = ", ".join(f"{reason} {count}" for reason, count in sorted(manifest.rejects.items()))
    reasons = f" ({by_reason}; see rejects.jsonl)" if by_reason else ""
    lines.append(f"{plural(manifest.images, 'image')} listed = {records} + {rejects}{reasons}")
    lines += _excluded(run.excluded) + _skipped(run.skipped)
    if base := run.base:
        removed = "" if base.removed is UNSET else f", {base.removed:,} removed"
        lines.append(f"{base.converted:,} converted, {base.reused:,} reused from {base.version}{removed}")
    passed = data["image"].get("passed_through", {})
    if stored := sum(passed.values()):
        unchanged = f"{passed.get('whole', 0):,} byte for byte"
        lines.append(f"{plural(stored, 'image')} stored without re-encoding ({unchanged})")
    lines.append(plural(len(manifest.classes), "class"))
    if manifest.outcome == PUBLISHED:
        lines.append(f"look at it: imageshards report {shlex.quote(manifest.url)}")
    if manifest.outcome == PUBLISHED and run.cpu_s:
        read, wrote = size_text(run.source_bytes), size_text(run.shard_bytes)
        lines.append(f"{_cpu_text(run.cpu_s)} to convert; read {read}, wrote {wrote}")
    return "\n  ".join(lines)


def _cpu_text(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} CPU-hours" if seconds >= 3600 else f"{seconds:,.1f} CPU-seconds"


def _sizes_text(sizes: list[int]) -> str:
    """The mean size of shards, and the smallest's and largest's deviation from it."""
    mean = sum(sizes) / len(sizes)
    if len(sizes) == 1:
        return size_text(mean)
    low, high = ((size / mean - 1) * 100 if mean else 0.0 for size in (min(sizes), max(sizes)))
    if round(low, 1) == round(high, 1) == 0:
        return f"{size_text(mean)} each"
    return f"{size_text(mean)} ({low:+.1f} % to {high:+.1f} %)"


def _excluded(excluded: Excluded | UnsetType) -> list[str]:
    return [] if excluded is UNSET else [f"{plural(excluded.images, 'image')} excluded by {excluded.list}"]


def _unmatched(excluded: Excluded | UnsetType) -> list[str]:
    """The paths of a list that match no image."""
    if excluded is UNSET or not excluded.unmatched:
        return []
    paths, few = plural(excluded.unmatched, "path"), ", ".join(map(repr, excluded.unmatched_paths))
    return [f"{paths} of --exclude without an image, such as {few}: write paths below --input, such as cat/1.jpg"]


def _skipped(skipped: Skipped) -> list[str]:
    """The files that the listing skipped."""
    lines = []
    if suffixes := skipped.suffixes:
        most_first = sorted(suffixes.items(), key=lambda pair: (-pair[1], pair[0]))
        by_suffix = ", ".join(f"{suffix} {files:,}" for suffix, files in most_first)
        files = plural(sum(suffixes.values()), "file")
        lines.append(f"{files} skipped: not an image suffix ({by_suffix}), see --extensions")
    if outside := skipped.outside_classes:
        lines.append(f"{plural(outside, 'image')} skipped: not inside a class folder")
    for hidden, noun in ((skipped.hidden_images, "image"), (skipped.hidden_folders, "folder")):
        if hidden:
            lines.append(f"{plural(hidden, noun)} skipped: hidden, or in a system's folder")
    if skipped.links:
        lines.append(f"{plural(skipped.links, 'image')} skipped: a symbolic link or a sparse file in an archive")
    return lines


def warnings(config: Config, manifest: Manifest) -> list[str]:
    """What a user should look at, although the dataset is published."""
    splits, classes = manifest.data["splits"], manifest.classes
    counts = {split: content["class_counts"] for split, content in splits.items()}
    empty = [number for number in range(len(classes)) if not any(count[number] for count in counts.values())]
    lines = []
    if manifest.etags_differ:
        what = "images were touched, copied or moved since this version was published"
        lines.append(f"{what}: their etags or mtimes differ from run.json; --repair compares their contents")
    if config.layout != "manifest" and not config.folders_are_classes and all(map(split_word, classes)):
        are = f"the only {'class is' if len(classes) == 1 else 'classes are'} {first_few([*map(repr, classes)])}"
        lines.append(f"{are}, a name of splits: if the labels are in a table, give it by --layout manifest")
    run = as_run(manifest.run)
    lines += _unmatched(run.excluded)
    bits = run.bits_used
    if low := bits.get(12):
        images = f"{low:,} of {plural(sum(bits.values()), 'image')} of 16 bits"
        fix = "scale files of 10 or 12 bits to 16 first"
        lines.append(f"{images} without a value above 4095, stored nearly black: {fix}")
    if manifest.moved_ids:
        lines.append(manifest.moved_ids)
    lines += _class_names(classes, is_sorted=config.labels is None)
    if empty:
        named = first_few([repr(classes[number]) for number in empty])
        lines.append(f"no records of {plural(len(empty), 'class')}: {named}")
    may_stratify = config.splits and not config.stratify and not isinstance(config.split_by, re.Pattern)
    for split, count in counts.items() if len(counts) > 1 else ():
        few = [number for number, records in enumerate(count) if records < _FEW and number not in empty]
        if few:
            named = first_few([f"{classes[number]!r} {count[number]}" for number in few])
            fix = "; --stratify gives each class its share" if may_stratify else ""
            lines.append(f"fewer than {_FEW} records of {plural(len(few), 'class')} in split {split!r}: {named}{fix}")
    lines += [f"split {split!r} got no images" for split in config.known_splits if split not in splits]
    for split, content in splits.items():
        wanted = config.num_shards.get(split) if isinstance(config.num_shards, dict) else config.num_shards
        shards = len(content["shards"])
        if wanted and wanted > shards:  # it has an image for each
            only = f"has only {plural(shards, 'image')}: wrote {plural(shards, 'shard')}"
            lines.append(f"--num_shards {wanted}: split {split!r} {only}")
    if config.compression == "gzip":
        lines.append("gzip shards have no index and no TFDS metadata: read them with imageshards.record_dataset")
    return lines


def _class_names(classes: list[str], is_sorted: bool) -> list[str]:
    """What may be wrong with the names of classes, and with the order that these give."""
    lines, alike = [], dict[str, list[str]]()
    for name in classes:  # Dog and dog; 1, 01 and 1.0
        key = re.sub(r"^0+(?=\d)|(?<=\d)\.0+$", "", unicodedata.normalize("NFKC", name).casefold())
        alike.setdefault(key, []).append(repr(name))
    if several := [" and ".join(names) for names in alike.values() if len(names) > 1]:
        lines.append(f"classes {first_few(several)} differ only in how a name is written: merge them if they are one")
    numbers = [name for name in classes if re.fullmatch("[0-9]+", name)]
    if is_sorted and (late := [before for before, name in pairwise(numbers) if int(name) < int(before)]):
        what = f"classes are numbers, sorted as text: {late[0]!r} is class {classes.index(late[0])}"
        lines.append(f"{what}; --labels_file sets their order")
    return lines
