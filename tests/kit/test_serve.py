"""`grader serve`: students see only their own pages, posts are checked, and nobody overwrites another's changes."""

import csv
import functools
import itertools
import re
import threading
from pathlib import Path
from urllib.parse import quote

import pytest
from typer.testing import CliRunner

from grader import serve, written
from grader.cli import app as commands
from grader.console import InputError
from grader.gradebook import Flag, Gradebook, Graded
from grader.graded import Account, Answer, Mark
from grader.policy import EVERYONE
from grader.report import page_name
from grader.serve import shelf as shelves
from lab.course import questions

from .classroom import invoke, latest, raises_one_line, reading, recorded, result

EVIL = "<script>alert(1)</script>"
QUESTION = "ddp.timeline"
CRITERIA = [c.name for c in questions.default().questions[QUESTION].criteria]
WORD = "a long word"


def submission(name: str, text: str = "Because it overlaps.") -> Graded:
    failed, flags = result(outcome="failed", test=EVIL, message=EVIL), [Flag("forbidden call", EVIL)]
    return Graded(name, results=[failed], answers=[Answer(QUESTION, text, "prose")], flags=flags)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return filled(tmp_path)


def filled(tmp_path: Path) -> Path:
    recorded(tmp_path, submission("ada", EVIL), submission("bob"), submission("ünal"), submission(EVIL), profile="core")
    admit(tmp_path, *accounts())
    return tmp_path


@functools.cache
def accounts() -> list[Account]:
    """Accounts, made once, since hashing a password is slow on purpose."""
    staff = [serve.account(login, "staff", "", WORD) for login in ("tess", "zoë")]
    return [*staff, *(serve.account(name, "student", name, WORD) for name in ("ada", "bob"))]


def admit(out: Path, *new: Account) -> None:
    with Gradebook(out / "gradebook.sqlite") as book:
        book.admit([*new])


@pytest.fixture
def app(out: Path):
    return serve.create_app(out)


class Client:
    """One person's browser. It sends the token of the page."""

    def __init__(self, app, login: str = "", password: str = WORD):
        self.client = app.test_client()
        if login:
            self.login = self.post("/login", "/login", login=login, password=password)

    def get(self, path: str):
        return self.client.get(path)

    def page(self, path: str) -> str:
        found = self.get(path)
        assert found.status_code == 200, found.text
        return found.text

    def post(self, page: str, path: str, **form: object):
        """Fill in the hidden fields of `page` and post to `path`."""
        form = {"csrf_token": hidden(self.page(page), "csrf_token"), **form}
        return self.client.post(path, data=form)

    def mark(self, slug: str, points: str, page: str | None = None, **fields: str):
        path = f"/mark/{QUESTION}/{slug}"
        page = page or self.page(path)
        return self.client.post(path, data={
            "csrf_token": hidden(page, "csrf_token"), "version": hidden(page, "version"),
            f"points {CRITERIA[0]}": points, **fields,
        })  # fmt: skip


def hidden(page: str, name: str) -> str:
    return re.findall(rf'name="{name}" value="([^"]*)"', page)[0]


def decide(person: Client, page: str, **form: object):
    version = hidden(page, "version")
    return person.post("/student/ada", "/student/ada/decide", **{"version": version, "why": "ill", **form})


def addresses(app) -> list[tuple[str, str]]:
    """(method, path) of all routes, filled in for bob's page."""
    values = {"slug": "bob", "number": "1", "question": QUESTION, "file": "style.css", "filename": "serve.css"}
    return [
        (method, re.sub(r"<(?:\w+:)?(\w+)>", lambda m: values[m[1]], rule.rule))
        for rule in app.url_map.iter_rules()
        for method in sorted(rule.methods & {"GET", "POST"})
    ]


# ---- access rights ----


def test_anonymous_requests_redirect_to_login(app):
    app.config["WTF_CSRF_ENABLED"] = False  # so that only the access check answers
    for method, path in addresses(app):
        response = app.test_client().open(path, method=method)
        if path == "/login" or "css" in path:
            continue
        assert (response.status_code, response.location[:6]) == (302, "/login"), f"{method} {path}: {response.status}"


def test_students_can_open_only_their_own_pages(app):
    app.config["WTF_CSRF_ENABLED"] = False
    ada = app.test_client()
    ada.post("/login", data={"login": "ada", "password": WORD})
    allowed = {"/", "/login", "/logout", "/asset/style.css", "/static/serve.css"}
    for method, path in addresses(app):
        if path not in allowed:
            code = ada.open(path, method=method, data={"text": "x"}).status_code
            assert code in (403, 404), f"ada may {method} {path}: {code}"
    assert ada.get("/").location == "/student/ada"
    page = ada.get("/student/ada").text
    assert "forbidden call" not in page, "flags are for staff"
    assert "Withdraw" not in page
    assert "bob" not in page
    assert "forbidden call" not in ada.get("/student/ada/report").text
    assert ada.post("/student/ada/decide", data={"kind": "adjust", "value": 5, "why": "x"}).status_code == 403


def test_staff_open_every_page(app):
    tess = Client(app, "tess")
    for method, path in addresses(app):
        if method == "GET":
            assert tess.get(path).status_code == 200, path
    assert f'href="/student/{quote(page_name("ünal"))}"' in tess.page("/")
    assert "ünal" in tess.page(f"/student/{page_name('ünal')}")


def test_login_rejects_wrong_passwords_and_locks_after_ten(app):
    for _, password in zip(range(serve.TRIES), itertools.cycle(["", "a long wore", "A long word"]), strict=False):
        assert Client(app, "tess", password).login.status_code == 401
    assert Client(app, "tess").login.status_code == 429
    assert Client(app, "nobody").login.status_code == 401


def test_password_change_ends_sessions_and_stores_no_plaintext(app, out):
    tess = Client(app, "tess")
    assert tess.get("/").status_code == 200
    admit(out, serve.account("tess", "staff", "", "another word"))
    assert tess.get("/").status_code == 302
    assert Client(app, "tess").login.status_code == 401
    assert Client(app, "tess", "another word").get("/").status_code == 200
    assert WORD.encode() not in (out / "gradebook.sqlite").read_bytes()
    cookie = Client(app, "zoë").login.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie


def test_posts_without_csrf_token_are_rejected(app, out):
    tess = Client(app, "tess")
    for method, path in addresses(app):
        if method == "POST":
            assert tess.client.post(path, data={"why": "x"}).status_code == 400, path
    with reading(out) as book:
        assert (book.decisions(), book.threads()) == ([], {})


def test_serve_pages_escape_text_from_submissions(app):
    tess = Client(app, "tess")
    tess.post("/student/ada", "/student/ada/ask", text=EVIL)
    paths = ["/", "/requests", "/student/ada", f"/mark/{QUESTION}/ada", f"/student/{page_name(EVIL)}"]
    for path in [*paths, "/student/ada/report"]:
        page = tess.get(path)
        assert "<script>alert" not in page.text, path
        assert "script-src 'self'" in page.headers["Content-Security-Policy"] or path.endswith("report")
        assert "unsafe" not in page.headers["Content-Security-Policy"] or path.endswith("report")
        assert "&lt;script&gt;alert" in page.text, path


# ---- the pages act like the commands ----


def test_decision_is_recorded_with_author_and_can_be_withdrawn(app, out):
    tess = Client(app, "tess")
    assert decide(tess, tess.page("/student/ada"), kind="adjust", value=2, exercise="ddp.naive").status_code == 303
    assert '"by": "tess"' in invoke(out, "decisions", "--json")
    with reading(out) as book:
        (d,) = book.decisions()
    assert (d.kind, d.name, d.exercise, d.value, d.why) == ("adjust", "ada", "ddp.naive", 2, "ill")
    assert "tess" in tess.page("/decisions")
    assert tess.post("/student/ada", "/withdraw/1", why="mistaken").status_code == 303
    assert tess.post("/student/ada", "/withdraw/1", why="again").status_code == 400
    assert latest(out)["ada"].decisions == []
    with Gradebook(out / "gradebook.sqlite") as book:
        for_all = book.decide("exclude", EVERYONE, "ddp.naive", "", "our mistake", "tess")
        for_ada = book.decide("submitted", "ada", "", "2026-02-18T12:00:00-08:00", "people.csv", "tess")
    page, listing = tess.page("/student/ada"), tess.page("/decisions")
    assert "exclude ddp.naive  for everyone" in page
    assert [f"/withdraw/{n}" in page for n in (1, for_all, for_ada)] == [False, False, True]
    assert [f"/withdraw/{n}" in listing for n in (1, for_all, for_ada)] == [False, True, True]
    assert "imported from people.csv" in page
    assert tess.post("/decisions", f"/withdraw/{for_all}", why="it was right").location == "/decisions"


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"kind": "adjust", "value": "abc"}, "points or days: expected a number, got &#39;abc&#39;"),
        ({"kind": "adjust", "value": "1", "why": " "}, ">why: expected a reason"),
        ({"kind": "extend", "value": "-1"}, "expected a number of 0 to 365"),
    ],
)
def test_invalid_decision_form_is_rejected_with_reason(app, out, form, words):
    tess = Client(app, "tess")
    done = decide(tess, tess.page("/student/ada"), **form)
    assert done.status_code == 400
    assert words in done.text
    with reading(out) as book:
        assert book.decisions() == []


def test_marking_form_saves_marks_and_checks_their_range(app, out):
    tess = Client(app, "tess")
    done = tess.mark("ada", "0.5", **{f"comment {CRITERIA[0]}": "say why"})
    assert done.location == f"/mark/{QUESTION}/bob", "the next one to mark"
    done = tess.mark("ada", "7")
    assert (done.status_code, f">{CRITERIA[0]}: points: expected 0 to" in done.text) == (400, True)
    (mark,) = latest(out)["ada"].marks
    assert (mark.points, mark.comment, mark.by) == (0.5, "say why", "tess")


def test_unchanged_mark_keeps_exact_points_and_marker(app, out):
    """The form rounds points to two decimals and puts comments on one line; the stored mark must not change."""
    origin = ("A. Lovelace", "2026-01-31 23:59:59", written.text_id(EVIL))
    with Gradebook(out / "gradebook.sqlite") as book:
        book.mark([("ada", Mark(QUESTION, CRITERIA[0], 1 / 3, "one\ntwo", *origin))])
    tess = Client(app, "tess")
    tess.mark("ada", "0.33", **{f"comment {CRITERIA[0]}": "one two"})
    (mark,) = latest(out)["ada"].marks
    assert (mark.points, mark.by) == (1 / 3, "A. Lovelace")


def test_request_thread_is_shared_by_page_and_command_line(app, out):
    ada, tess = Client(app, "ada"), Client(app, "tess")
    assert invoke(out, "requests") == "no requests yet"
    ada.post("/student/ada", "/student/ada/ask", exercise="ddp.naive", text="The message is wrong.", state="closed")
    assert "open" in tess.page("/requests"), "a student closes nothing"
    output = invoke(out, "requests", "ada", "--exercise", "ddp.naive", "--answer", "It is.", "--close")
    assert "closed: ada: ddp.naive" in output
    assert "It is." in ada.page("/student/ada")
    output = invoke(out, "requests", "ada", "--exercise", "ddp.naive", "--answer", "Thanks.")
    assert "this request was closed, and is open again" in output
    output = invoke(out, "requests", "bob", "--answer", "Well done.", "--close")
    assert "bob had no request about the whole submission: this starts one" in output


def test_decision_during_grading_gets_503_and_keeps_form_input(app, out):
    tess = Client(app, "tess")
    page = tess.page("/student/ada")
    with Gradebook(out / "gradebook.sqlite"):
        assert tess.get("/").status_code == 200
        done = decide(tess, page, kind="extend", value=1)
    assert done.status_code == 503
    assert "the grader is at work; try again in a minute" in done.text
    assert str(out) not in done.text
    assert 'value="ill"' in done.text, "what was typed stays on the page"
    assert decide(tess, page, kind="extend", value=1).status_code == 303


def test_export_loop_writes_decisions_to_grades_csv(out, monkeypatch):
    monkeypatch.setattr(shelves, "EXPORT_AFTER", 0.0)
    shelf = shelves.Shelf(out)
    tess = Client(serve.create_app(out, 1, shelf), "tess")
    writer = threading.Thread(target=shelf.export_loop)
    writer.start()
    assert decide(tess, tess.page("/student/ada"), kind="adjust", value=2).status_code == 303
    shelf.end()
    writer.join(120)
    rows = csv.DictReader((out / "grades.csv").read_text(encoding="utf-8-sig").splitlines())
    assert {row["submission"]: float(row["adjusted"]) for row in rows}["ada"] == 2


# ---- two people at the same time ----


def test_second_marker_gets_conflict_page_with_first_mark(app, out):
    tess, zoe = Client(app, "tess"), Client(app, "zoë")
    path = f"/mark/{QUESTION}/ada"
    first, second = tess.page(path), zoe.page(path)
    assert tess.mark("ada", "1", first).status_code == 303
    response = zoe.mark("ada", "0", second)
    assert response.status_code == 409
    assert "1 by tess" in response.text
    field = rf'name="points {CRITERIA[0]}" type="number" min="0" max="1(\.0)?" step="any" value="0"'
    assert re.search(field, response.text), "what zoë gave stays in the form"
    assert [m.by for m in latest(out)["ada"].marks] == ["tess"]
    assert zoe.mark("ada", "0", response.text).status_code == 303


def test_concurrent_decisions_save_exactly_one(app, out):
    people = [Client(app, "tess") for _ in range(10)]
    pages = [person.page("/student/ada") for person in people]
    gate, codes = threading.Barrier(10), []

    def save(person: Client, page: str) -> None:
        form = {name: hidden(page, name) for name in ("csrf_token", "version")}
        gate.wait()
        done = person.client.post("/student/ada/decide", data={**form, "kind": "adjust", "value": 1, "why": "x"})
        codes.append(done.status_code)

    threads = [threading.Thread(target=save, args=pair) for pair in zip(people, pages, strict=True)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(codes) == [303] + [409] * 9
    with reading(out) as book:
        assert len(book.decisions()) == 1


# ---- the command ----


def test_accounts_are_added_by_the_command(out):
    base = ["serve", "--out", str(out), "--add-user"]
    done = CliRunner().invoke(commands, [*base, "cyd", "--submission", "bob"], input="a long word\n")
    assert done.exit_code == 0, done.output
    assert Client(serve.create_app(out), "cyd").get("/").location == "/student/bob"
    (out / "people.csv").write_text("submission,submitted,student,login,id\nada,,Ada,al,1\nada,,Bob,cyd,2\n")
    done = CliRunner().invoke(commands, ["serve", "--out", str(out), "--add-users", str(out / "people.csv")])
    (account,) = csv.DictReader(done.stdout.splitlines())
    assert (account["login"], account["submission"]) == ("al", "ada"), "cyd has a password"
    assert Client(serve.create_app(out), "cyd", "a long word").get("/").location == "/student/ada", "a new number"
    assert "1 students added, 1 moved to another submission" in done.stderr
    assert Client(serve.create_app(out), "al", account["password"]).get("/").location == "/student/ada"
    (out / "words.csv").write_text("words")
    with raises_one_line(InputError, "--add-users: expected columns login, submission; "):
        invoke(out, "serve", "--add-users", "{out}/words.csv")
    for arguments, typed, words in (
        ("dan --submission dan", WORD, "expected one that is graded"),
        ("dan --role boss", WORD, "expected staff or student"),
        ("dan --role staff", "short", "at least 8 characters"),
    ):
        with raises_one_line(InputError, words):
            CliRunner().invoke(commands, [*base, *arguments.split()], input=f"{typed}\n", catch_exceptions=False)
