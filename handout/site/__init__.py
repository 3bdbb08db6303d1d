"""Builds handout/ and notebooks/ into a site that needs no network: `make handout`, `make handout EDITION=solutions`.

What must be true: an exercise's card says what assignment.toml and the tests say, for it is made from them; the
student's edition shows of student/ what a stub shows, however much of it is solved, and opens no file of reference/;
every link leads somewhere in the site or says where out of it; nothing is fetched from elsewhere.
"""

import shutil


def chromium() -> str | None:
    """The path of this machine's Chromium or Chrome; None if it has none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
