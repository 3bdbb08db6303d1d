"""Opens pages of the site in headless Chromium, and records the messages of their consoles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page


class Reader:
    """reader.open_page(page); reader.ask_page("document.title"); reader.complaints"""

    def __init__(self, page: Page):
        self.page = page
        self.complaints: list[str] = []
        page.on(
            "console", lambda message: message.type in ("error", "assert", "warning") and self._record(message.text)
        )
        page.on("pageerror", self._record)
        page.on("requestfailed", lambda request: self._record(f"{request.url}: {request.failure}"))

    def set_window(self, width: int, dark: bool = False, less_motion: bool = False) -> None:
        """Set the window's width in pixels, its colour scheme, and the wish for less motion."""
        self.page.set_viewport_size({"width": width, "height": 900})
        motion = "reduce" if less_motion else "no-preference"
        self.page.emulate_media(color_scheme="dark" if dark else "light", reduced_motion=motion)

    def open_page(self, page: Path, query: str = "") -> None:
        """Open a page, and wait until it is loaded and drawn."""
        self.complaints.clear()
        self.page.goto(page.resolve().as_uri() + query)
        self.ask_page("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def ask_page(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page. Promises are awaited."""
        return self.page.evaluate(expression)

    def _record(self, message: object) -> None:
        self.complaints.append(str(message))
