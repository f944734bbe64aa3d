"""``python -m peerbayes``."""

from peerbayes.cli import main

main()
