"""`python -m toolkit` is the console script `toolkit`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Runs one command, see `cli.main`. Ctrl-C ends it in a line also while that is imported, which takes a second."""
    try:
        from toolkit.cli.main import main as command
    except KeyboardInterrupt:
        print("stopped by Ctrl-C: nothing was begun", file=sys.stderr)
        return 128 + signal.SIGINT
    return command()


if __name__ == "__main__":
    sys.exit(main())
