"""`python -m gemmery`, the same as the command `gemmery`."""

from .cli import main

main()
