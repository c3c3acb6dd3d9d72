"""`python -m beam_pipeline` is `imageshards write`."""

import sys

from beam_pipeline.cli.command import command

if __name__ == "__main__":
    sys.exit(command())
