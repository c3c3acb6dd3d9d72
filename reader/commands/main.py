"""The commands of `python -m reader` and their exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from beam_pipeline.errors import EXIT_OK, CorruptRecordError, ImageShardsError, UsageError, say, tell
from reader.commands import verbs
from reader.commands.flags import suggestion
from reader.words import explained

COMMANDS = {command.name: command for command in verbs.COMMANDS}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except ImageShardsError as error:
        return tell(error)
    except ModuleNotFoundError as error:
        said = explained(error)
        if said is error:
            raise
        return tell(UsageError(said))
    except BrokenPipeError:
        return EXIT_OK
    except KeyboardInterrupt:
        return tell(ImageShardsError("interrupted"))


def _run(given: list[str]) -> int:
    if not given:
        raise UsageError(f"no command given: choose one of {', '.join(COMMANDS)}; see --help")
    name, *rest = given
    if name in ("-h", "--help"):
        print(_help())
        return EXIT_OK
    if name.startswith("-"):
        raise UsageError(f"{name!r} is no command: python -m reader COMMAND … {name}")
    if name not in COMMANDS:
        raise UsageError(f"unknown command {name!r}: {suggestion(name, COMMANDS)}")
    command = COMMANDS[name]
    if "-h" in rest or "--help" in rest:
        print(command.parser().format_help(), end="")
        return EXIT_OK
    values = command.parse(rest)
    try:
        result = command.run(values)
    except CorruptRecordError as error:
        if "dataset" not in values:  # `index`, which reads no dataset yet
            raise
        raise ImageShardsError(f"{error}; python -m reader verify {values['dataset']} finds every fault") from None
    say(json.dumps(result.document) if values["json"] else result.text)
    return result.exit_code


def _help() -> str:
    lines = ["usage: python -m reader COMMAND …", ""]
    lines += ["Look at, check, copy, measure and train on a dataset that beam_pipeline published.", ""]
    lines += [f"  {name:8}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "Each command has its own --help."])
