"""`python -m partir`."""

import sys

from partir.cli import main

sys.exit(main())
