"""Trains a recipe: `accelerate launch toolkit/run.py recipe=NAME key=value …`.

Also runs under torchrun, under srun, as plain `python toolkit/run.py` and as `python -m toolkit.run`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

# As a script, this file's folder comes first on the path and its modules would shadow others of the same name.
_HERE = str(Path(__file__).resolve().parent)
sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.getcwd()) != _HERE]
if str(Path(_HERE).parent) not in sys.path:
    sys.path.insert(0, str(Path(_HERE).parent))

try:
    from toolkit.train.main import main
    from toolkit.train.process import leave
except KeyboardInterrupt:
    print("stopped by Ctrl-C: nothing was begun", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)

if __name__ == "__main__":
    leave(main)
