"""``python -m peerbayes``."""

import os
import sys

# `python -m` searches the working folder first, which may be somebody's run folder with a numpy.py in it. The command
# searches it last, and for allowed imports alone.
if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(os.curdir):
    del sys.path[0]

from peerbayes.cli import main

main()
