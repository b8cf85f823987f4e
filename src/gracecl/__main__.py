"""`python -m gracecl` is the command `gracecl`."""

import sys

from gracecl.cli import main

sys.exit(main())
