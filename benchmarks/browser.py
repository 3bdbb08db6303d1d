"""Headless Chromium of this machine, driven by Playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def missing() -> str:
    """Name the package that must be installed before a page can be opened; "" if none."""
    if _chromium() is None:
        return "no Chromium on this machine: apt-get install chromium"
    return "" if find_spec("playwright") else "Playwright is not installed: pip install -e .[browser]"


@contextmanager
def started() -> Iterator[Browser]:
    """A running browser, without pages."""
    from playwright.sync_api import sync_playwright

    path, options = _chromium(), ["--no-sandbox"]
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=options) as browser:
        yield browser


def _chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)
