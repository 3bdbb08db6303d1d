"""Builds handout/ and notebooks/ into a site that needs no network: `make handout`, `make handout EDITION=solutions`.

Must hold: exercise cards are generated from assignment.toml and the tests. The student's edition shows student/ as
stubs, even where it is solved, and opens no file of reference/. Every link leads to a page of the site or to a full
address. Pages fetch nothing from a network.
"""

import shutil


def chromium() -> str | None:
    """Return the path of this machine's Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
