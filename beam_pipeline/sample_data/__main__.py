"""`python -m beam_pipeline.sample_data DIR`."""

import sys

from beam_pipeline.sample_data import main

if __name__ == "__main__":
    sys.exit(main())
