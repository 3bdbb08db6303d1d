"""Prose is marked in a browser, keyboard first."""

from __future__ import annotations

import threading

import pytest
from werkzeug.serving import make_server

from benchmarks.browser import Browser, chromium
from grader import serve

from .classroom import latest
from .test_serve import CRITERIA, QUESTION, WORD, filled


def test_prose_is_marked_by_keyboard_in_a_browser(tmp_path):
    if chromium() is None:
        pytest.skip("no Chromium on this machine: apt-get install chromium")
    out = filled(tmp_path)
    server = make_server("127.0.0.1", 0, serve.create_app(out), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        with Browser() as browser:
            target = browser.ask("Target.createTarget", url=f"{base}/login")["targetId"]
            session = browser.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            browser.ask("Page.enable", session)

            def js(expression: str) -> object:
                asked = browser.ask("Runtime.evaluate", session, expression=expression, returnByValue=True)
                return asked["result"].get("value")

            def until(expression: str) -> None:
                for _ in range(200):
                    if js(f"!!({expression})"):
                        return
                    threading.Event().wait(0.05)
                raise AssertionError(f"{expression} never came true at {js('location.href')}")

            def press(*keys: str) -> None:
                for key in keys:
                    text = "\r" if key == "Enter" else key if len(key) == 1 else ""
                    for kind in ("keyDown", "keyUp"):
                        more = {"text": text} if kind == "keyDown" and text else {}
                        browser.ask("Input.dispatchKeyEvent", session, type=kind, key=key, **more)

            until("document.forms.length == 1 && document.readyState == 'complete'")
            js(f"f = document.forms[0]; f.login.value = 'tess'; f.password.value = '{WORD}'; f.submit()")
            until("document.querySelector('table.class')")
            js(f"location = '{base}/mark/{QUESTION}/ada'")
            until("document.querySelector('fieldset.here') && document.readyState == 'complete'")
            press("1", "c", "o", "k", "Escape", "j", "0", ".", "Enter")
            until("location.pathname.endsWith('/bob')")
    finally:
        server.shutdown()
    given = [(m.criterion, m.points, m.comment, m.by) for m in latest(out)["ada"].marks]
    assert given == [(CRITERIA[0], 1, "ok", "tess"), (CRITERIA[1], 0.5, "", "tess")]
