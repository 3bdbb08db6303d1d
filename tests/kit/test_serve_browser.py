"""A person marks prose in a browser, with the keyboard."""

import threading

import pytest
from werkzeug.serving import make_server

from benchmarks import browser
from grader import serve

from .classroom import latest
from .test_serve import CRITERIA, QUESTION, WORD, filled


def test_prose_is_marked_by_keyboard_in_a_browser(tmp_path):
    if why := browser.missing_package():
        pytest.skip(why)
    out = filled(tmp_path)
    server = make_server("127.0.0.1", 0, serve.create_app(out), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        with browser.running_browser() as chromium, chromium.new_page() as page:
            page.goto(f"{base}/login")
            page.fill("[name=login]", "tess")
            page.fill("[name=password]", WORD)
            page.press("[name=password]", "Enter")
            page.wait_for_selector("table.class")
            page.goto(f"{base}/mark/{QUESTION}/ada")
            page.wait_for_selector("fieldset.here")
            for key in ("1", "c", "o", "k", "Escape", "j", "0", ".", "Enter"):
                page.keyboard.press(key)
            page.wait_for_url("**/bob")
    finally:
        server.shutdown()
    marks = [(m.criterion, m.points, m.comment, m.by) for m in latest(out)["ada"].marks]
    assert marks == [(CRITERIA[0], 1, "ok", "tess"), (CRITERIA[1], 0.5, "", "tess")]
