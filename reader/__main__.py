"""`python -m reader`."""

import sys

from reader.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
