"""From command-line arguments to a `Config` and the arguments that belong to Beam; every other flag is an error.

Our own flags are read and checked without Beam, whose import takes seconds: `--help` and most mistakes are answered at
once. A dash in a flag is read as an underscore: `--image-size 224` is `--image_size 224`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import re
from collections.abc import Collection, Sequence
from typing import Any

from beam_pipeline.config import REMOVED, Config, Flags, wrong
from beam_pipeline.errors import UsageError

_USAGE = "imageshards write --input DIR --output ROOT --name NAME [FLAG ...] [BEAM OPTION ...]"
_EPILOG = """\
Any option of Beam works too: --runner, --project, --region, --temp_location, --direct_num_workers, ...
Without --runner the job runs in this process. deploy/dataflow.sh fills in what Dataflow wants.
The same command again resumes a job that failed. Exit codes: 0 published, 1 the job failed, 2 bad usage.

  imageshards write --input photos --output datasets --name photos --splits train=0.9,validation=0.1
  imageshards write --input gs://bucket/photos --output gs://bucket/datasets --name photos

python -m beam_pipeline is the same command.
"""
# A flag as like one of ours as this is a typo of it: the likest of Beam's has 0.76 (tests/cli/test_arguments.py).
_SURELY_OURS = 0.8
_OURS = {f"--{field.name}": field for field in dataclasses.fields(Flags)}


def parse(arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """Split the command line.

    Args:
        arguments: without the program's name.

    Returns:
        Our configuration, and the arguments for Beam's `PipelineOptions`.

    Raises:
        UsageError: a bad value, or a flag that neither we nor Beam know, with the nearest one that exists.
    """
    arguments = _with_underscores(arguments, _OURS)
    try:
        known, rest = _our_parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise _bad_value(str(error.argument_name), arguments) from None
    for number, argument in enumerate(rest):
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in REMOVED:
            raise UsageError(f"--{name} is gone: leave it out, {REMOVED[name][1]}")
        is_ours = argument.startswith("--") and _nearest(argument, _OURS, _SURELY_OURS)
        # Beam has no flag with one dash; a word behind one of its flags may be that one's value.
        if is_ours or _is_short(argument) or (number == 0 and not argument.startswith("-")):
            raise _unknown(argument, _OURS)
    config = Config(**vars(known))
    return config, _beams(rest) if rest else []


def _with_underscores(arguments: Sequence[str], known: Collection[str]) -> list[str]:
    """The arguments, each flag as it is `known`, if only dashes for underscores keep it from that."""
    found = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = f"--{flag[2:].replace('-', '_')}"
        found.append(name + equals + value if flag.startswith("--") and name in known else argument)
    return found


def _our_parser() -> argparse.ArgumentParser:
    """Every value is text, which `Config` reads."""
    parser = argparse.ArgumentParser(
        usage=_USAGE,
        description="Turn images in class folders into TFRecord shards of equal size.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    groups: dict[str, Any] = {}
    for flag, field in _OURS.items():
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        text = field.metadata["help"]
        if field.default not in (None, "") and field.type != "bool" and not text.endswith(")"):
            text += f" ({field.default:g})" if field.type == "float" else f" ({field.default})"
        text = text.replace("%", "%%")
        if field.type == "bool":
            groups[name].add_argument(flag, action="store_true", help=text)
        else:
            groups[name].add_argument(flag, default=field.default, metavar=_metavar(field), help=text)
    return parser


def _metavar(field: dataclasses.Field[Any]) -> str:
    if choices := field.metadata["choices"]:
        return "|".join(map(str, choices))
    return field.metadata["metavar"] or {"int": "N", "float": "X"}.get(str(field.type), field.name.upper())


def _bad_value(flag: str, arguments: Sequence[str]) -> UsageError:
    """What argparse refuses of ours: a flag without its value, or a value of a flag that has none."""
    if _OURS[flag].type != "bool":
        return UsageError(f"{flag} has no value: write {flag} {_metavar(_OURS[flag])}")
    value = next(one for one in arguments if one.startswith(f"{flag}=")).partition("=")[2]
    return wrong(flag, value, "leave it out, this flag has no value")


def _beams(arguments: list[str]) -> list[str]:
    """The arguments as Beam spells them, if it knows every flag; `PipelineOptions` would only warn.

    Raises:
        UsageError: there is one that it doesn't know, or whose value it can't read.
    """
    parser, flags = beams_parser()
    arguments = _with_underscores(arguments, flags)
    try:
        unknown = parser.parse_known_args(arguments)[1]
    except argparse.ArgumentError as error:
        raise UsageError(f"{str(error).removeprefix('argument ')} (an option of Beam)") from None
    if unknown:
        raise _unknown(unknown[0], [*_OURS, *flags])
    return arguments


def beams_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """A parser of every option of Beam, and their flags."""
    from apache_beam.options.pipeline_options import PipelineOptions

    found: list[argparse.ArgumentParser] = []
    PipelineOptions([]).get_all_options(add_extra_args_fn=found.append)
    found[0].exit_on_error = False
    return found[0], re.findall(r"(?:^  |, )(--[\w-]+)", found[0].format_help(), re.MULTILINE)


def _unknown(argument: str, known: Collection[str]) -> UsageError:
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return UsageError(f"unexpected argument {flag!r}: every value belongs to a flag; see --help")
    nearest = _nearest(argument, known, 0.5)
    return UsageError(f"unknown flag {flag!r}: {f'did you mean {nearest}?' if nearest else 'see --help'}")


def _nearest(argument: str, known: Collection[str], likeness: float) -> str | None:
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    if len(name) == 1:
        return next((flag for flag in known if flag.startswith(f"--{name}")), None)
    return next(iter(difflib.get_close_matches(f"--{name}", known, n=1, cutoff=likeness)), None)


def _is_short(argument: str) -> bool:
    return argument.startswith("-") and not argument.startswith("--")
