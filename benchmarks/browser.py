"""Headless Chromium of this machine, driven by Playwright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

from handout.site import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def missing_package() -> str:
    """Return the package that must be installed before a page can be opened, or ""."""
    if chromium() is None:
        return "no Chromium on this machine: apt-get install chromium"
    return "" if find_spec("playwright") else "Playwright is not installed: pip install -e .[browser]"


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Yield a running browser without pages."""
    from playwright.sync_api import sync_playwright

    path, options = chromium(), ["--no-sandbox"]
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=options) as browser:
        yield browser
