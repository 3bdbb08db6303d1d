"""Commands for staff: web pages, accounts, and students' requests for another grading."""

import getpass
import secrets
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .console import InputError, Out, check_known, err, latest, say
from .csv_io import Sheet, csv_text, read_text
from .report import one_line


def serve(
    out_folder: Out = Path("out"),
    host: Annotated[str, typer.Option(help="Address to listen on; put TLS in front for other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8350,
    hints: Annotated[int, typer.Option(min=0, max=3, help="How many hints a student's report shows.")] = 1,
    add_user: Annotated[
        str | None, typer.Option(help="Add or change this login, then exit; asks for a password.")
    ] = None,
    add_users: Annotated[
        Path | None,
        typer.Option(help="Add or move a student for each row of a CSV with columns login and submission: people.csv."),
    ] = None,
    role: Annotated[str, typer.Option(help="With --add-user: staff or student.")] = "student",
    submission: Annotated[str, typer.Option(help="With --add-user: what the student sees; default: the login.")] = "",
) -> None:
    """Serve web pages with log-in: class, marking, requests, decisions. Students see only their own submission."""
    from . import serve as pages
    from .serve.shelf import Shelf

    with latest(out_folder, write=bool({add_user, add_users} - {None})) as (book, run, _):
        if add_users is not None:
            text = read_text(add_users, f"--add-users: expected a CSV, {add_users}")
            added, moved, graded, wanted, accounts = [], [], book.graded(run.id), {}, book.accounts()
            for line, row in Sheet(text, "--add-users: ", ("login", "submission")):
                check_known([row["submission"]], graded, f"--add-users: line {line}")
                wanted[row["login"]] = row["submission"]
            for login, name in wanted.items():
                if (existing := accounts.get(login)) is None:
                    added.append((login, secrets.token_urlsafe(9), name))
                elif existing.role == "student" and existing.name != name:  # handed in again, under another number
                    moved.append(replace(existing, name=name))
            book.admit([*moved, *(pages.account(login, "student", name, password) for login, password, name in added)])
            say(f"{len(added)} students added, {len(moved)} moved to another submission; all others stay", err)
            print(csv_text([("login", "password", "submission"), *added]), end="")
            return
        if add_user is not None:
            if role not in ("staff", "student"):
                raise InputError(f"--role: expected staff or student, got {role!r}")
            name = (submission or add_user) if role == "student" else ""
            if role == "student":
                check_known([name], book.graded(run.id), "--submission")
            new_password = getpass.getpass("password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
            book.admit([pages.account(add_user, role, name, new_password)])
            say(f"{add_user}: {role}{f', sees {name}' if name else ''}")
            return
    import logging

    import waitress

    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # do not warn about short queues
    shelf = Shelf(out_folder)
    shelf.now()
    app = pages.create_app(out_folder, hints, shelf)
    writer = threading.Thread(target=shelf.export_loop)
    writer.start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # end like Ctrl-C, after writing the exports
    if host not in ("127.0.0.1", "localhost", "::1"):
        say("passwords cross the network unencrypted: put a server with TLS in front of this one", err)
    say(f"http://{host}:{port}  (Ctrl-C ends it)")
    try:
        waitress.serve(app, host=host, port=port, threads=8, max_request_body_size=1 << 20, _quiet=True)
    except OSError as error:
        raise InputError(f"--port: expected a free one, got {port}: {error.strerror}") from None
    finally:
        shelf.end()
        writer.join()


def requests(
    name: Annotated[str | None, typer.Argument(help="A submission; default: all.")] = None,
    exercise: Annotated[str, typer.Option(help="The thread about this exercise; default: the whole submission.")] = "",
    answer: Annotated[str | None, typer.Option(help="Add this to the thread; the student reads it.")] = None,
    close: Annotated[bool, typer.Option("--close", help="With --answer: close the thread.")] = False,
    out_folder: Out = Path("out"),
) -> None:
    """List requests to be graded again, with their messages; answer one."""
    with latest(out_folder, write=answer is not None) as (book, run, ids):
        if name is not None:
            check_known([name], book.graded(run.id), "NAME")
        if answer is not None:
            if name is None:
                raise InputError("--answer: expected NAME before it")
            check_known([exercise] if exercise else [], ids, "--exercise")
            if not answer.strip():
                raise InputError("--answer: expected a few words, got nothing")
            before = book.threads().get((name, exercise))
            if not before:
                say(f"{name} had no request about {exercise or 'the whole submission'}: this starts one", err)
            elif before[-1].state == "closed" and not close:
                say("this request was closed, and is open again; --close closes it", err)
            book.say(name, exercise, answer, getpass.getuser(), "staff", "closed" if close else "open")
        threads = {key: messages for key, messages in book.threads().items() if name in (None, key[0])}
        if not threads:
            say("no requests yet")
        for (submission, topic), messages in threads.items():
            say(f"{messages[-1].state}: {submission}: {topic or 'the whole submission'}")
            for m in messages:
                say(f"  {m.at} {m.by} ({m.role}): {one_line(m.text, 300)}")
