"""`grader serve`: web pages of the gradebook for staff and students. Only this file decides who may see which page."""

import hashlib
import secrets
import threading
import time
from pathlib import Path

from flask import Flask, abort, g, redirect, render_template, request, url_for
from flask_login import LoginManager, UserMixin, current_user, login_user, logout_user
from flask_wtf.csrf import CSRFError, CSRFProtect
from werkzeug.security import check_password_hash, generate_password_hash
from werkzeug.wrappers import Response

from ..console import InputError
from ..gradebook import GradebookError
from ..graded import Account
from ..report import page_name, points
from .shelf import Shelf

OPEN = {"login", "static", "asset"}  # pages for everybody
STUDENTS = {"home", "student", "report", "ask", "logout"}  # pages for students, about their own submission
TRIES, MINUTES = 10, 5  # most tries per login within so many minutes
_NOBODY = generate_password_hash(secrets.token_hex())  # checked for unknown logins: the reply takes equally long
_POLICY = "default-src 'none'; {}; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
_PAGES = _POLICY.format("style-src 'self'; script-src 'self'")
_REPORT = _POLICY.format("style-src 'unsafe-inline'")  # the page itself allows one style, by its hash


class User(UserMixin):
    """The logged-in user. The id contains a hash of the stored password, so a new password ends all sessions."""

    def __init__(self, account: Account):
        self.login, self.role, self.name = account.login, account.role, account.name
        self.staff = account.role == "staff"
        self.slug = page_name(account.name)
        self.id = f"{account.login}:{hashlib.sha256(account.password.encode()).hexdigest()[:16]}"


def account(login: str, role: str, name: str, password: str) -> Account:
    """Return an account with the hash of this password. Raises InputError for a malformed login or password."""
    if not login.isprintable() or not login.strip() or ":" in login:
        raise InputError(f"--add-user: expected a name that can be printed, without a colon, got {login!r}")
    if len(password) < 8:
        raise InputError("password: expected at least 8 characters")
    return Account(login, role, name, generate_password_hash(password))


def create_app(folder: Path, hints: int = 1, shelf: Shelf | None = None) -> Flask:
    """Return the web application for a folder's gradebook. hints: number that a student sees per failed exercise."""
    app = Flask(__name__)
    app.config.update(
        SECRET_KEY=secrets.token_hex(), SESSION_COOKIE_HTTPONLY=True, SESSION_COOKIE_SAMESITE="Lax",
        MAX_CONTENT_LENGTH=1 << 20, WTF_CSRF_TIME_LIMIT=None, HINTS=hints,
    )  # fmt: skip
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters["points"] = points
    app.extensions["shelf"] = shelf = shelf or Shelf(folder)
    CSRFProtect(app)
    manager = LoginManager(app)
    manager.session_protection, manager.login_view = "strong", "login"  # type: ignore[assignment]
    manager.login_message = None  # type: ignore[assignment]
    failures: list[tuple[str, float]] = []  # (login, time of the try)
    lock = threading.Lock()

    @manager.user_loader
    def load(id: str) -> User | None:
        found = shelf.now().accounts.get(id.rpartition(":")[0])
        user = User(found) if found else None
        return user if user and secrets.compare_digest(user.id.encode(), id.encode()) else None

    @app.before_request
    def gate() -> Response | None:
        page = (request.endpoint or "").removeprefix("pages.")
        if page in OPEN:
            return None
        if not current_user.is_authenticated:
            return manager.unauthorized()
        if not current_user.staff:
            if page not in STUDENTS:
                abort(403)
            if (request.view_args or {}).get("slug", current_user.slug) != current_user.slug:
                abort(404)  # 404, not 403: do not reveal whether the submission exists
        return None

    @app.route("/login", methods=["GET", "POST"])
    def login() -> str | Response | tuple[str, int]:
        if request.method == "GET":
            return render_template("login.html", wrong="")
        name, now = request.form.get("login", "")[:200], time.monotonic()
        with lock:  # count before the slow check, so that parallel tries count too
            failures[:] = [(user, when) for user, when in failures if now - when < 60 * MINUTES] + [(name, now)]
            tries = sum(user == name for user, _ in failures)
        if tries > TRIES:
            return render_template("login.html", wrong=f"too many tries; wait {MINUTES} minutes"), 429
        found = shelf.now().accounts.get(name)
        right = check_password_hash(found.password if found else _NOBODY, request.form.get("password", ""))
        if not (found and right):
            return render_template("login.html", wrong="unknown login, or wrong password"), 401
        with lock:
            failures[:] = [failure for failure in failures if failure[0] != name]
        login_user(User(found))
        return redirect(url_for("pages.home"))

    @app.post("/logout")
    def logout() -> Response:
        logout_user()
        return redirect(url_for("login"))

    @app.after_request
    def headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = _REPORT if request.endpoint == "pages.report" else _PAGES
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "same-origin"
        if request.endpoint not in ("static", "pages.asset"):
            response.headers["Cache-Control"] = "no-store"
        return response

    def error_page(error: Exception) -> tuple[str, int]:
        if "_login_user" not in g:  # the gradebook failed while the user was loaded
            g._login_user = manager.anonymous_user()
        text = str(getattr(error, "description", "")) or error_text(error)
        code = 503 if isinstance(error, GradebookError) else getattr(error, "code", 400)
        return render_template("error.html", says=text), code

    for kind in (InputError, CSRFError, 403, 404):
        app.register_error_handler(kind, error_page)
    from .views import error_text, pages

    app.register_blueprint(pages)
    return app
