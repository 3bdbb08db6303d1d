"""Fixtures for the tests of the site: a browser, and a reader with a page of its own."""

import pytest

from benchmarks import browser

from .reader import Reader


@pytest.fixture(scope="session")
def chromium():
    if why := browser.missing_package():
        pytest.skip(why)
    with browser.running_browser() as chromium:
        yield chromium


@pytest.fixture
def reader(chromium):
    """A Reader with a window of 1,400 pixels."""
    with chromium.new_page() as page:
        reader = Reader(page)
        reader.set_window(1400)
        yield reader
