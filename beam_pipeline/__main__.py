"""`python -m beam_pipeline`."""

import sys

from beam_pipeline import extras
from beam_pipeline.errors import UsageError

if __name__ == "__main__":
    try:
        extras.require()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    from beam_pipeline.launch import main

    sys.exit(main())
