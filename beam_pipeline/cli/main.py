"""The command line: `Config`, exit codes, and one line for whatever goes wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apache_beam.options.pipeline_options import PipelineOptions


import atexit
import gc
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

from beam_pipeline.cli.arguments import parse
from beam_pipeline.cli.messages import (
    published_text,
    say,
    warnings,
)
from beam_pipeline.cli.run import run
from beam_pipeline.errors import (
    EXIT_FAILED,
    EXIT_OK,
    ImageShardsError,
    UnforeseenError,
    one_line,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:  # closed when the process began; runners print there
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    atexit.register(gc.freeze)  # else Python looks for garbage among all of Beam once more, for 0.4 s
    level = logging.root.level
    try:
        config, beam_arguments = parse(given)
        options = None
        if beam_arguments:
            from apache_beam.options.pipeline_options import PipelineOptions

            options = PipelineOptions(beam_arguments)
        if options is None or _is_local(options):
            logging.root.setLevel(logging.CRITICAL)  # a local runner's tracebacks would bury our one line
        from beam_pipeline.images.formats import hide_warnings

        hide_warnings()
        manifest = run(config, options, ["python", "-m", "beam_pipeline", *given])
        if manifest is not None:
            for warning in warnings(config, manifest):
                say(f"warning: {warning}", sys.stderr)
            say(published_text(manifest))
        return EXIT_OK
    except UnforeseenError as error:
        say(f"error: {one_line(error)}; its traceback is in {_kept_traceback(error)}", sys.stderr)
        return error.exit_code
    except ImageShardsError as error:
        say(f"error: {one_line(error)}", sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        say("error: interrupted; the same command resumes", sys.stderr)
        return EXIT_FAILED
    finally:
        logging.root.setLevel(level)


def _is_local(options: PipelineOptions) -> bool:
    from beam_pipeline.cli.job import is_local

    return is_local(options)


def _kept_traceback(error: BaseException) -> str:
    """Write what Python would print of an error to a file that stays; returns its path."""
    with tempfile.NamedTemporaryFile("w", prefix="imageshards-", suffix=".log", delete=False) as file:
        file.writelines(traceback.format_exception(error))
    return file.name
