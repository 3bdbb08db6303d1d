"""`python -m lab.train`."""

from .loop import main

main()
