"""`python -m beam_pipeline`."""

import sys

import beam_pipeline
from beam_pipeline.errors import UsageError

if __name__ == "__main__":
    try:
        beam_pipeline.require_pipeline()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    from beam_pipeline.cli.main import main

    sys.exit(main())
