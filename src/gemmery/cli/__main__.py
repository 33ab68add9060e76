"""`python -m gemmery.cli` is the `gemmery` command."""

from . import main

main()
