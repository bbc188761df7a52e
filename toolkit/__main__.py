"""`python -m toolkit` is the console script `toolkit`."""

from __future__ import annotations

import sys

from toolkit.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
