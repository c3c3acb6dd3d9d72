"""The verbs of `python -m reader`: what they print, and their exit codes."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from beam_pipeline.errors import EXIT_FAILED, EXIT_OK, ImageShardsError, UsageError, one_line
from reader.hashing import dataset_hash
from reader.info import DatasetInfo, load_info
from reader.verify import verify

_SHOWN_FAULTS = 50


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        verbs, parsers = _parser()
        parsed, unknown = verbs.parse_known_args(given)
        if unknown:
            raise _unknown(unknown[0], parsers[parsed.verb])
        run: Callable[[argparse.Namespace], int] = parsed.run
        return run(parsed)
    except ImageShardsError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return EXIT_OK
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return EXIT_FAILED


def _parser() -> tuple[_Parser, dict[str, _Parser]]:
    parser = _Parser(prog="python -m reader", description="Look at, check and train on a dataset.", allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="info|verify|train", parser_class=_Parser)
    parsers = {}
    for verb, run, text in (
        ("info", _info, "what a dataset holds; --hash reads every byte"),
        ("verify", _verify, "read and check everything; exit code 1 on any fault"),
        ("train", _train, "train an image classifier on it"),
    ):
        one = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        one.add_argument("dataset", metavar="DATASET", help="folder or URL of a version, such as datasets/photos/1.0.0")
        one.set_defaults(run=run)
        parsers[verb] = one
    parsers["info"].add_argument("--hash", action="store_true", help="one SHA-256 for all files but run.json")
    for verb in ("info", "verify"):
        parsers[verb].add_argument("--json", action="store_true", help="for programs")
    _add_train_flags(parsers["train"])
    return parser, parsers


def _unknown(argument: str, parser: argparse.ArgumentParser) -> UsageError:
    flag = argument.partition("=")[0]
    known = [name for action in parser._actions for name in action.option_strings]
    nearest = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
    return UsageError(f"unknown flag {flag!r}: {f'did you mean {nearest[0]}?' if nearest else 'see --help'}")


def _info(flags: argparse.Namespace) -> int:
    if flags.hash:
        load_info(flags.dataset)  # a folder without a dataset has no hash
        digest = dataset_hash(flags.dataset)
        print(json.dumps({"hash": digest}) if flags.json else digest)
        return EXIT_OK
    info = load_info(flags.dataset)
    print(json.dumps(dict(info.manifest), sort_keys=True, ensure_ascii=True) if flags.json else _info_text(info))
    return EXIT_OK


def _info_text(info: DatasetInfo) -> str:
    image = info.image
    sizes = {size for size in (image.min_size, image.max_size) if size}
    lines = [
        f"{info.name} {info.version} at {info.url}",
        f"  {info.manifest['records']:,} records of {info.manifest['images']:,} images, {info.num_classes} classes",
        f"  {image.format}, {image.channels} channels, "
        f"{' to '.join(f'{height}x{width}' for height, width in sorted(sizes)) or 'no image'} (height x width)",
    ]
    for split in info.splits.values():
        sizes_mb = [shard.bytes / 1e6 for shard in split.shards]
        shards = f"{len(sizes_mb)} shard{'s' * (len(sizes_mb) > 1)}"
        lines.append(
            f"  {split.name}: {split.records:,} records in {shards} of {min(sizes_mb):.1f} to {max(sizes_mb):.1f} MB"
        )
    for number, label in enumerate(info.classes[:20]):
        counts = ", ".join(f"{split.name} {split.class_counts[number]:,}" for split in info.splits.values())
        lines.append(f"  class {number} {label!r}: {counts}")
    if info.num_classes > 20:
        lines.append(f"  … and {info.num_classes - 20} more classes")
    if image.mean:
        mean, std = (" ".join(f"{value:.4f}" for value in values) for values in (image.mean, image.std))
        lines.append(f"  mean {mean}, std {std} (of [0, 1], from {info.manifest['image']['sampled_images']} images)")
    rejects: dict[str, Any] = info.manifest["rejects"]["by_reason"]
    if rejects:
        lines.append(f"  rejected: {', '.join(f'{reason} {count}' for reason, count in sorted(rejects.items()))}")
    return "\n".join(lines)


def _verify(flags: argparse.Namespace) -> int:
    info = load_info(flags.dataset)
    faults = verify(info)
    if flags.json:
        fields = ("file", "record", "offset", "what")
        print(json.dumps({"faults": [{name: getattr(fault, name) for name in fields} for fault in faults]}))
    elif faults:
        print("\n".join(str(fault) for fault in faults[:_SHOWN_FAULTS]))
        print(f"{len(faults)} faults in {info.url}; run the job again with --repair")
    else:
        shards = sum(len(split.shards) for split in info.splits.values())
        print(f"{info.url} is whole: {info.manifest['records']:,} records in {shards} shards, every image decodes")
    return EXIT_FAILED if faults else EXIT_OK


def _add_train_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=("small_cnn", "mobilenet_v2"), default="small_cnn", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=5, metavar="N", help="(%(default)s)")
    parser.add_argument("--out", required=True, metavar="DIR", help="for metrics.jsonl and model.keras")
    parser.add_argument(
        "--batch_size", type=int, default=64, metavar="N", help="global, over all devices (%(default)s)"
    )
    parser.add_argument(
        "--image_size", type=int, metavar="N", help="side in pixels that the model sees (the stored size)"
    )
    parser.add_argument("--learning_rate", type=float, default=3e-3, metavar="R", help="(%(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of order, augmentation and weights (%(default)s)"
    )
    parser.add_argument("--weights", default="none", metavar="none|imagenet|PATH", help="to begin with (%(default)s)")


def _train(flags: argparse.Namespace) -> int:
    import reader.train.quiet  # noqa: F401
    from reader.train.fit import TrainOptions, train  # TensorFlow, 4 s: only for this verb

    options = {name: value for name, value in vars(flags).items() if name not in ("verb", "run", "dataset")}
    print(train(load_info(flags.dataset), TrainOptions(**options)))
    return EXIT_OK
