"""Opens a page in headless Chromium and says when it was there: the DevTools protocol over a pipe, no library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def chromium() -> str | None:
    """The browser of this machine, None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """with Browser() as browser: seconds, picture = browser.open(page)"""

    def __enter__(self) -> Browser:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # the browser's children end last
        ours, its_out = os.pipe()
        its_in, to_it = os.pipe()
        # Chromium reads from 3 and writes to 4; by name, since dash knows no descriptor above 9.
        script = f'exec 3</dev/fd/{its_in} 4>/dev/fd/{its_out}; exec "$@"'
        command = [
            str(chromium()), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--remote-debugging-pipe", f"--user-data-dir={self._profile.name}", "--window-size=1400,1000",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", *command], pass_fds=(its_in, its_out), stderr=subprocess.DEVNULL
        )
        os.close(its_in)
        os.close(its_out)
        self._read, self._write, self._last = os.fdopen(ours, "rb"), os.fdopen(to_it, "wb", buffering=0), 0
        self._inbox = b""
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._read.close()
        self._write.close()
        self._profile.cleanup()

    def open(self, page: Path) -> tuple[float, bytes]:
        """(seconds from asking for the page to its first frame after it was loaded, a PNG of what is seen)."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable", session)
        start = time.perf_counter()
        self.ask("Page.navigate", session, url=page.resolve().as_uri())
        self._until("Page.loadEventFired")
        frame = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.ask("Runtime.evaluate", session, expression=frame, awaitPromise=True)
        spent = time.perf_counter() - start
        picture = base64.b64decode(self.ask("Page.captureScreenshot", session)["data"])
        self.ask("Target.closeTarget", targetId=target)
        return spent, picture

    def ask(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params, **({"sessionId": session} if session else {})}
        self._write.write(json.dumps(message).encode() + b"\0")
        answer = next(m for m in self._messages() if m.get("id") == self._last)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _until(self, event: str) -> None:
        next(m for m in self._messages() if m.get("method") == event)

    def _messages(self) -> Any:
        while True:
            while b"\0" not in self._inbox:
                block = os.read(self._read.fileno(), 1 << 20)
                if not block:
                    raise RuntimeError("the browser ended")
                self._inbox += block
            message, _, self._inbox = self._inbox.partition(b"\0")
            yield json.loads(message)
