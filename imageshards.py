"""One name for both sides: the command `imageshards`, and every public name of `beam_pipeline` and `reader`.

    import imageshards

    imageshards.write(imageshards.Config(input="photos", output="datasets", name="photos"))
    train = imageshards.train_batches("datasets/photos/1.0.0", "train", global_batch_size=64)

`import imageshards` is cheap: each name is loaded on first use, so nobody needs the packages of the other side. Nothing
defined here is ever pickled: workers unpickle `beam_pipeline`'s own modules.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import beam_pipeline
from beam_pipeline.errors import EXIT_OK, ImageShardsError, UsageError, print_error

if TYPE_CHECKING:  # for editors
    from beam_pipeline import *  # noqa: F403
    from beam_pipeline import run as write  # noqa: F401
    from reader import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name == "write":  # as the command is called
        return beam_pipeline.run
    if name in beam_pipeline.__all__ and name != "run":
        return getattr(beam_pipeline, name)
    if not name.startswith("_") and name in _reader().__all__:
        return getattr(_reader(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({ImageShardsError.__name__, "write", *beam_pipeline.__all__, *_reader().__all__} - {"run"})


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
    """The command line, of `python -m reader` too; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if given[:1] == ["write"]:
            from beam_pipeline.cli.command import command

            return command(given[1:])
        _reader()
        from reader import commands

        return commands.run(given)
    except ImageShardsError as error:
        return print_error(error)
    except BrokenPipeError:
        return EXIT_OK
    except KeyboardInterrupt:
        return print_error(ImageShardsError("interrupted"))
    except SystemExit as done:  # argparse, after --help
        return int(done.code or EXIT_OK)


if __name__ == "__main__":
    sys.exit(main())
