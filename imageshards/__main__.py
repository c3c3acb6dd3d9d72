"""`python -m imageshards` is the command."""

import sys

from imageshards import main

sys.exit(main())
