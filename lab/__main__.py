"""`python -m lab`."""

from .cli import main

main()
