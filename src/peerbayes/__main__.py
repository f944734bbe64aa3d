"""``python -m peerbayes``."""

import os
import sys

# `python -m` searches the working folder first, which may be somebody's run folder with a numpy.py in it. Here it is
# searched last, and for allowed imports alone.
_working = None
if not sys.flags.safe_path and sys.path and os.path.realpath(sys.path[0]) == os.path.realpath(os.curdir):
    _working = sys.path.pop(0)

from peerbayes.cli import main  # noqa: E402
from peerbayes.importing import search_last  # noqa: E402

if _working is not None:
    search_last(_working)
main()
