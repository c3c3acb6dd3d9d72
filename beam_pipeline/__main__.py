"""`python -m beam_pipeline`."""

import sys

from beam_pipeline.launch import main

if __name__ == "__main__":
    sys.exit(main())
