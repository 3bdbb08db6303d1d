"""A reader of the site in headless Chromium: opens pages from disk, and hears what their consoles say."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from benchmarks.browser import Browser

_ERRORS = {"Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled", "Network.loadingFailed"}


class Reader(Browser):
    """with Reader() as reader: reader.turn_to(page); reader.ask_page("document.title"); reader.complaints"""

    def __enter__(self) -> Self:
        super().__enter__()
        self.complaints: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable", self._session)
        return self

    def look(self, width: int, dark: bool = False, less_motion: bool = False) -> None:
        """From now on: a window of `width` pixels, a phone's below 600; in the dark scheme or the light one."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", self._session, **size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        motion = [{"name": "prefers-reduced-motion", "value": "reduce" if less_motion else "no-preference"}]
        self.ask("Emulation.setEmulatedMedia", self._session, features=scheme + motion)

    def press(self, key: str) -> None:
        """Press a key, by its name in the DOM, and let it go."""
        code = {"Tab": 9, "Enter": 13, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for type in ("keyDown", "keyUp"):
            typed = {"type": type, "key": key, "code": key, "windowsVirtualKeyCode": code}
            self.ask("Input.dispatchKeyEvent", self._session, **typed, **(text if type == "keyDown" else {}))

    def turn_to(self, page: Path, query: str = "", wait: bool = True) -> None:
        """Open a page and wait until it is loaded, and drawn if its scripts run (`wait`)."""
        self.complaints.clear()
        self.ask("Page.navigate", self._session, url=page.resolve().as_uri() + query)
        self._until("Page.loadEventFired")
        if wait:
            self.ask_page("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def ask_page(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; promises are waited for."""
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        answer = self.ask("Runtime.evaluate", self._session, **options)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def _messages(self) -> Iterator[dict[str, Any]]:
        for message in super()._messages():
            if message.get("method") in _ERRORS:
                self._hear(message["method"], message["params"])
            yield message

    def _hear(self, method: str, said: dict[str, Any]) -> None:
        level = said.get("entry", {}).get("level") or said.get("type")
        if method in ("Runtime.exceptionThrown", "Network.loadingFailed") or level in ("error", "assert", "warning"):
            self.complaints.append(f"{method}: {said}")
