"""`python -m reader` is `imageshards`."""

import sys

from imageshards import main

if __name__ == "__main__":
    sys.exit(main())
