"""From command-line arguments to a `Config` and the arguments that belong to Beam; every other flag is an error.

Our own flags are read and checked without Beam, whose import takes seconds: `--help` and most mistakes are answered at
once.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from beam_pipeline.errors import UsageError
from beam_pipeline.flag_values import wrong
from beam_pipeline.flags import REMOVED, Flags
from beam_pipeline.options import Config

_USAGE = "imageshards write --input DIR --output ROOT --name NAME [FLAG ...] [BEAM OPTION ...]"
_EPILOG = """\
Any option of Beam works too: --runner, --project, --region, --temp_location, --direct_num_workers, ...
Without --runner the job runs in this process. deploy/dataflow.sh fills in what Dataflow wants.
The same command again resumes a job that failed. Exit codes: 0 published, 1 the job failed, 2 bad usage.

  imageshards write --input photos --output datasets --name photos --splits train=0.9,validation=0.1
  imageshards write --input gs://bucket/photos --output gs://bucket/datasets --name photos

python -m beam_pipeline is the same command.
"""
# A flag as like one of ours as this is a slip of it: the likest of Beam's has 0.76 (tests/test_command_line.py).
_SURELY_OURS = 0.8


class _Parser(argparse.ArgumentParser):
    """Ours: every value is text, which `Config` reads."""

    def parse_known(self, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Values of our flags by name, and what else there is."""
        try:
            values, rest = self.parse_known_args(arguments)
        except argparse.ArgumentError as error:
            flag = str(error.argument_name)
            action = self._option_string_actions[flag]
            if action.nargs != 0:
                raise UsageError(f"{flag} has no value: write {flag} {action.metavar}") from None
            value = next(one for one in arguments if one.startswith(f"{flag}=")).partition("=")[2]
            raise wrong(flag, value, "leave it out, this flag has no value") from None
        return vars(values), rest


def parse(arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """Split the command line.

    Args:
        arguments: without the program's name.

    Returns:
        Our configuration, and the arguments for Beam's `PipelineOptions`.

    Raises:
        UsageError: a bad value, or a flag that neither we nor Beam know, with the nearest one that exists.
    """
    parser = _our_parser()
    values, rest = parser.parse_known(arguments)
    ours = list(parser._option_string_actions)
    for argument in rest:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        if argument.startswith("--") and name in REMOVED:
            raise UsageError(f"--{name} is gone: leave it out, {REMOVED[name][1]}")
        if argument.startswith("--") and _nearest(argument, ours, _SURELY_OURS):
            raise _unknown(argument, ours)
    if rest and not rest[0].startswith("-"):
        raise _unknown(rest[0], ours)
    config = Config(**values)
    if rest:
        _check_beams(rest, ours)
    return config, rest


def _our_parser() -> _Parser:
    parser = _Parser(
        usage=_USAGE,
        description="Turn images in class folders into TFRecord shards of equal size.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    groups: dict[str, Any] = {}
    for field in dataclasses.fields(Flags):
        name = field.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        _add_flag(groups[name], field)
    return parser


def _add_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    choices, text = field.metadata["choices"], field.metadata["help"]
    if field.default not in (None, "") and field.type != "bool" and not text.endswith(")"):
        text += f" ({field.default:g})" if field.type == "float" else f" ({field.default})"
    text = text.replace("%", "%%")
    if field.type == "bool":
        group.add_argument(f"--{field.name}", action="store_true", help=text)
        return
    named = {"int": "N", "float": "X"}.get(str(field.type), field.name.upper())
    metavar = "|".join(map(str, choices)) if choices else field.metadata["metavar"] or named
    group.add_argument(f"--{field.name}", default=field.default, metavar=metavar, help=text)


def _check_beams(arguments: list[str], ours: list[str]) -> None:
    """Whether Beam knows every flag that we don't; `PipelineOptions` would only warn.

    Raises:
        UsageError: it knows one not either, or can't read a value.
    """
    parser = beam_parser()
    unknown = parser.parse_known_args(arguments)[1]
    if unknown:
        raise _unknown(unknown[0], [*ours, *parser._option_string_actions])


def beam_parser() -> argparse.ArgumentParser:
    """A parser of every option of Beam."""
    from apache_beam.options.pipeline_options import PipelineOptions, _BeamArgumentParser

    class BeamParser(_BeamArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"{message.removeprefix('argument ')} (an option of Beam)")

    parser = BeamParser(allow_abbrev=False, add_help=False)
    for options in PipelineOptions.__subclasses__():
        if options.__module__.startswith("apache_beam."):
            options._add_argparse_args(parser)
    return parser


def _unknown(argument: str, known: Sequence[str]) -> UsageError:
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return UsageError(f"unexpected argument {flag!r}: every value belongs to a flag; see --help")
    nearest = _nearest(argument, known, 0.5)
    return UsageError(f"unknown flag {flag!r}: {f'did you mean {nearest}?' if nearest else 'see --help'}")


def _nearest(argument: str, known: Sequence[str], likeness: float) -> str | None:
    return next(iter(difflib.get_close_matches(argument.partition("=")[0], known, n=1, cutoff=likeness)), None)
