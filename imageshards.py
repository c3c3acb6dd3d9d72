"""One name for both sides: the command `imageshards`, and every public name of `beam_pipeline` and `reader`.

    import imageshards

    imageshards.run(imageshards.Config(input="photos", output="datasets", name="photos"))
    train = imageshards.train_batches("datasets/photos/1.0.0", "train", global_batch_size=64)

`import imageshards` is cheap: each name is loaded on first use, so nobody needs the packages of the other side. Nothing
defined here is ever pickled: workers unpickle `beam_pipeline`'s own modules.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import beam_pipeline
from beam_pipeline.errors import EXIT_OK, EXIT_USAGE, UsageError, tell

if TYPE_CHECKING:  # for editors
    from beam_pipeline import *  # noqa: F403
    from reader import *  # noqa: F403

_WRITE = "Convert images in class folders into TFRecord shards of equal size."


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in beam_pipeline.__all__:
        return getattr(beam_pipeline, name)
    if not name.startswith("_") and name in _reader().__all__:
        return getattr(_reader(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*beam_pipeline.__all__, *_reader().__all__})


def _reader() -> ModuleType:
    """Our package `reader`, with none of its frameworks.

    Raises:
        UsageError: another package of that name is found in its place.
    """
    import reader

    if "load_info" not in dir(reader):
        raise UsageError(
            f"{reader.__file__ or next(iter(reader.__path__))} is another package named reader, such as PyPI's: "
            "uninstall it, then install imageshards again"
        )
    return reader


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments))
    except UsageError as error:
        return tell(error)


def _run(given: list[str]) -> int:
    name = given[0] if given else ""
    if name == "write":
        beam_pipeline.require_pipeline()
        from beam_pipeline.cli.main import command

        return command(given[1:])
    if name == "--version":
        print(f"imageshards {beam_pipeline.__version__}")
        return EXIT_OK
    _reader()
    from reader.commands.main import COMMANDS
    from reader.commands.main import main as read

    if name in COMMANDS:
        return read(given)
    summaries = {"write": _WRITE, **{command.name: command.summary for command in COMMANDS.values()}}
    if name in ("", "-h", "--help"):
        print(_help(summaries), file=sys.stdout if name else sys.stderr)
        return EXIT_OK if name else EXIT_USAGE
    nearest = difflib.get_close_matches(name, summaries, n=1)
    fix = f"did you mean {nearest[0]}?" if nearest else f"choose one of {', '.join(summaries)}"
    raise UsageError(f"unknown command {name!r}: {fix}")


def _help(summaries: dict[str, str]) -> str:
    lines = [
        "usage: imageshards COMMAND …",
        "",
        "Write, check, read and train on datasets of images in TFRecord shards.",
        "",
    ]
    lines += [f"  {name:8}{summary}" for name, summary in summaries.items()]
    return "\n".join([*lines, "", "Each command has its own --help; imageshards --version says which release this is."])


if __name__ == "__main__":
    sys.exit(main())
