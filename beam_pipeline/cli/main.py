"""The command line: arguments → `Config` and Beam's options, exit codes and one-line errors."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Collection, Sequence
from itertools import takewhile

from beam_pipeline import storage
from beam_pipeline.cli.messages import published_text
from beam_pipeline.cli.quiet import only_our_lines
from beam_pipeline.cli.run import launched
from beam_pipeline.config import FLAGS, Config
from beam_pipeline.errors import EXIT_OK, INTERRUPTED, ImageShardsError, UnforeseenError, UsageError, print_error
from beam_pipeline.text import meant, nearest, one_line, print_line

_USAGE = "imageshards write --input DIR --output ROOT --name NAME [FLAG ...] [BEAM OPTION ...]"
_EPILOG = """\
Any option of Beam works too: --runner, --project, --region, --temp_location, --direct_num_workers, ...
Without --runner the job runs in this process. --runner DataflowRunner needs --project and --region too.
The same command again resumes a job that failed. Exit codes: 0 published, 1 the job failed, 2 bad usage.

  imageshards write --input photos --output datasets --name photos --splits train=0.9,validation=0.1
  imageshards write --input gs://bucket/photos --output gs://bucket/datasets --name photos \\
      --runner DataflowRunner --project my-project --region europe-west4
"""
# Above this likeness to one of our flags, an argument is a typo of it; Beam's most similar flag has 0.76
# (tests/cli/test_main.py).
_SURELY_OURS = 0.8
_OURS = {f"--{name}": flag for name, flag in FLAGS.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:  # it was closed when the process started, and runners print there
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the life of the process
    atexit.register(gc.freeze)  # else Python ends with a garbage collection over all of Beam: 0.4 s
    try:
        config, rest = parse(arguments)
        with launched(config) as launch:
            options, prints_errors = None, True
            if rest:
                from apache_beam.options.pipeline_options import PipelineOptions

                from beam_pipeline.cli import job

                options = PipelineOptions(beam_arguments(rest))
                prints_errors = job.runs_locally(options) or job.is_dataflow(options)
            with only_our_lines(logs=not prints_errors):
                manifest = launch(options, ["imageshards", "write", *arguments])
        if manifest is not None:
            print_line(published_text(manifest))
        return EXIT_OK
    except UnforeseenError as error:
        with tempfile.NamedTemporaryFile("w", prefix="imageshards-", suffix=".log", delete=False) as file:
            file.writelines(traceback.format_exception(error))
        return print_error(ImageShardsError(f"{one_line(error)}; its traceback is in {file.name}"))
    except ImageShardsError as error:
        return print_error(error)
    except KeyboardInterrupt as error:  # with a text if a job on Dataflow runs on
        return print_error(ImageShardsError(str(error) or INTERRUPTED))


def parse(arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """Read our own flags, without Beam, whose import takes seconds: `--help` and most mistakes are answered at once.

    A dash in a flag is read as an underscore: `--image-size 224` is `--image_size 224`.

    Args:
        arguments: without the program's name.

    Returns:
        Our configuration, and the arguments that are left for Beam.

    Raises:
        UsageError: a bad value, or a misspelled flag, with the nearest one that exists.
    """
    ours, rest = _parsed(_our_parser(), _with_underscores(arguments, _OURS))
    for number, argument in enumerate(rest):
        is_flag = argument.startswith("--")
        # After one of Beam's flags it may be its value.
        if _nearest(argument, _OURS, _SURELY_OURS) if is_flag else number == 0:
            raise _unknown(rest[number:], _OURS, vars(ours))
    return Config(**vars(ours)), rest


def beam_arguments(rest: Sequence[str]) -> list[str]:
    """The arguments that `parse` left, for Beam's `PipelineOptions`.

    Raises:
        UsageError: a flag that neither we nor Beam have, with the nearest one that exists.
    """
    parser, flags = beams_parser()
    arguments = _with_underscores(rest, flags)
    for number, (argument, following) in enumerate(zip(arguments, [*arguments[1:], "--"], strict=True)):
        if argument == "--dry_run" and following.startswith("--"):  # Beam's flag needs a value
            arguments[number] = "--dry_run=True"
    if unknown := _parsed(parser, arguments)[1]:
        raise _unknown(unknown, [*_OURS, *flags], FLAGS)
    return arguments


def _parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The values of a parser's flags, and the other arguments."""
    try:
        return parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        flag = (error.argument_name or "").rpartition("/")[2]
        is_missing = error.message.startswith("expected one argument")
        raise UsageError(f"{flag}: {f'it has no value: write {flag} VALUE' if is_missing else error.message}") from None


def _with_underscores(arguments: Sequence[str], flags: Collection[str]) -> list[str]:
    """The arguments with underscores for dashes in names of `flags`."""
    spelled = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = f"--{flag[2:].replace('-', '_')}"
        spelled.append(name + equals + value if flag.startswith("--") and name in flags else argument)
    return spelled


_FIRST_TITLE = "the flags that matter most"
_FIRST = (
    *("input", "output", "name", "version", "layout", "manifest", "labels_file", "splits", "stratify", "exclude"),
    *("image_size", "resize_mode", "max_reject_fraction", "plan_only", "repair"),
)


def _our_parser() -> argparse.ArgumentParser:
    """Every value stays text, which `Config` parses."""
    parser = argparse.ArgumentParser(
        usage=_USAGE,
        description="Turn images in class folders into TFRecord shards of equal size.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,  # `Config` has the defaults
        allow_abbrev=False,
        exit_on_error=False,
    )
    first = {f"--{name}": FLAGS[name] for name in _FIRST}
    titles = [_FIRST_TITLE, *dict.fromkeys(f"more: {flag.group}" for flag in _OURS.values())]
    groups = {title: parser.add_argument_group(title) for title in titles}
    for name, flag in {**first, **_OURS}.items():
        group = groups[_FIRST_TITLE if name in first else f"more: {flag.group}"]
        text = flag.help.replace("%", "%%")
        if flag.default is False:
            group.add_argument(name, help=text, nargs="?", const=True, metavar="true|false")
            continue
        if flag.default not in (None, "") and not text.endswith(")"):
            default = f"{flag.default:g}" if isinstance(flag.default, float) else flag.default
            text += f" (default: {default})"
        metavar = "|".join(map(str, flag.values)) if isinstance(flag.values, tuple) else flag.metavar
        group.add_argument(name, help=text, metavar=metavar)
    return parser


def beams_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """A parser of all of Beam's options, and their flags: `PipelineOptions` only warns of unknown ones."""
    from apache_beam.options.pipeline_options import PipelineOptions

    parsers: list[argparse.ArgumentParser] = []
    PipelineOptions([]).get_all_options(add_extra_args_fn=parsers.append)
    parsers[0].exit_on_error = False
    # argparse has no public list of its flags.
    return parsers[0], re.findall(r"(?:^  |, )(--[\w-]+)", parsers[0].format_help(), re.MULTILINE)


def _unknown(arguments: Sequence[str], flags: Collection[str], known: Collection[str]) -> UsageError:
    """The error for the first argument, which isn't in `flags`; `known` are names of our flags that have a value."""
    flag = arguments[0].partition("=")[0]
    if not flag.startswith("-"):
        values = list(takewhile(lambda argument: not argument.startswith("-"), arguments))
        missing = [f"--{name}" for name in ("input", "output") if name not in known]
        fix = "every value belongs to a flag; see --help"
        if len(values) <= len(missing):  # as `cp SRC DST`
            pairs = zip(missing, values, strict=False)
            fix = f"did you mean {' '.join(f'{name} {shlex.quote(_hidden(value))}' for name, value in pairs)}?"
        return UsageError(f"unexpected argument {_hidden(flag)!r}: {fix}")
    name = flag.lstrip("-").replace("-", "_")
    return UsageError(f"unknown flag {flag!r}: {meant(f'--{name}', flags, 'see --help', str)}")


def _hidden(value: str) -> str:
    return "***" if storage.has_password(value) else value


def _nearest(argument: str, flags: Collection[str], likeness: float) -> str:
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    if len(name) == 1:
        return next((flag for flag in flags if flag.startswith(f"--{name}")), "")
    return nearest(f"--{name}", flags, likeness)
