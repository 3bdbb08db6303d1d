"""`python -m lab`."""

from .commands.cli import main

main()
