"""From command-line arguments to a `Config` and the arguments that belong to Beam; every other flag is an error."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from apache_beam.options.pipeline_options import PipelineOptions, _BeamArgumentParser

from beam_pipeline.errors import UsageError
from beam_pipeline.options import Config

_EPILOG = """\
Any Beam option works too: --runner, --project, --region, --temp_location, --direct_num_workers, …
Without --runner the job runs in this process. Exit codes: 0 published, 1 the job failed, 2 bad usage.

  python -m beam_pipeline --input photos --output datasets --name photos --splits train=0.9,validation=0.1
  python -m beam_pipeline --input gs://bucket/photos --output gs://bucket/datasets --name photos
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see --help")


class _BeamParser(_BeamArgumentParser):  # type: ignore[misc]
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


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
    values, rest = parser.parse_known_args(arguments)
    beam_parser = _BeamParser(allow_abbrev=False, add_help=False)
    for options in _beam_option_classes():
        options._add_argparse_args(beam_parser)
    unknown = beam_parser.parse_known_args(rest)[1]
    if unknown:
        known = [flag for one in (parser, beam_parser) for action in one._actions for flag in action.option_strings]
        raise _unknown(unknown[0], known)
    return Config(**vars(values)), rest


def _our_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m beam_pipeline",
        description="Turn images in class folders into size-balanced TFRecord shards.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for field in dataclasses.fields(Config):
        if "help" in field.metadata:
            _add_flag(parser, field)
    return parser


def _add_flag(parser: argparse.ArgumentParser, field: dataclasses.Field[Any]) -> None:
    shown = "" if field.default in (None, "", False, 0) or "(" in field.metadata["help"] else f" ({field.default})"
    text = (field.metadata["help"] + shown).replace("%", "%%")
    if field.type == "bool":
        parser.add_argument(f"--{field.name}", action="store_true", help=text)
        return
    choices = field.metadata["choices"]
    parser.add_argument(
        f"--{field.name}",
        default=field.default,
        type={"int": int, "float": float}.get(str(field.type), str),
        metavar="|".join(map(str, choices)) if choices else field.metadata["metavar"] or field.name.upper(),
        help=text,
    )


def _beam_option_classes() -> list[type[PipelineOptions]]:
    return [one for one in PipelineOptions.__subclasses__() if one.__module__.startswith("apache_beam.")]


def _unknown(argument: str, known: list[str]) -> UsageError:
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return UsageError(f"unexpected argument {flag!r}: every value belongs to a flag; see --help")
    nearest = difflib.get_close_matches(flag, known, n=1, cutoff=0.5)
    return UsageError(f"unknown flag {flag!r}: {f'did you mean {nearest[0]}?' if nearest else 'see --help'}")
