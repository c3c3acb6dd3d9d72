"""`python -m beam_pipeline` is `imageshards write`."""

import sys

import beam_pipeline
from beam_pipeline.errors import UsageError, tell

if __name__ == "__main__":
    try:
        beam_pipeline.require_pipeline()
    except UsageError as error:
        sys.exit(tell(error))
    from beam_pipeline.cli.main import command

    sys.exit(command())
