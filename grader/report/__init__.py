"""Writes the grader's reports: HTML pages (`html`) and files for other tools (`exports`).

Names, messages and outputs come from submissions and may be hostile. This file turns them into plain text that is safe
to store and show: no characters that control a terminal, break a database or JSON, or mislead a reader. Escaping for
HTML or CSV comes later.
"""

import hashlib
import math
import re
import sys
import unicodedata
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

TEXT_LIMIT = 20_000  # characters of a long text that are kept
_LONG = ("message", "output", "detail", "given", "comment")
# A terminal's escape sequences: CSI ("\x1b[31m"), OSC ("\x1b]0;title\x07"), and the two-character ones.
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
# Invisible characters that change how other text looks: controls, surrogates, direction marks, zero widths, tags.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)
_SAFE = re.compile(r"[a-z0-9][a-z0-9_-]{0,59}")
_HASHED = re.compile(r".*-[0-9a-f]{8}")
_DEVICES = re.compile(r"con|prn|aux|nul|com\d|lpt\d")  # file names that Windows reserves


def plain(text: str, limit: int) -> str:
    """Return at most `limit` (≥ 100) characters of text, safe to store and show; the end gives the number cut off.

    Removes terminal escapes; makes other controls, direction overrides and lone surrogates visible ("␀", or their
    code); keeps newlines and tabs. Idempotent.
    """
    head = text[: 8 * limit]  # cut megabytes before scanning them
    head = _UNSEEN.sub(_visible, _ANSI.sub("", head.replace("\r\n", "\n")))
    unread = max(0, len(text) - 8 * limit)
    if len(head) <= limit and not unread:
        return head
    start = head[: limit - 40]
    return f"{start}… ({len(head) - len(start) + unread} more characters)"


def fit(row: Any, exact: Collection[str] = ()) -> Any:
    """Return the row (submission, result, flag, answer or mark) with safe texts and finite numbers.

    exact: fields that stay unchanged.
    """
    changed: dict[str, str | float] = {}
    for name, value in vars(row).items():
        if isinstance(value, str) and name not in exact:
            changed[name] = plain(value, TEXT_LIMIT if name in _LONG else 1000)
        elif isinstance(value, float) and not math.isfinite(value):
            changed[name] = 0.0
    return replace(row, **changed)


def one_line(text: str, limit: int) -> str:
    """Return plain text without line breaks, for names, cells and headings."""
    return " ".join(plain(text, limit).split())


def labels(names: Iterable[str]) -> dict[str, str]:
    """Return name → label to show. Labels are unique, so that no submission can pose as another."""
    shown: dict[str, str] = {}
    used: set[str] = set()
    for name in names:
        label = one_line(name, 120) or "(no name)"
        if label in used or label != name:
            label = f"{label} #{_digest(name)}"
        while label in used:  # another submission has exactly this name
            label += "'"
        used.add(label)
        shown[name] = label
    return shown


def points(value: float) -> str:
    """Return a number with at most two decimals: 6, 6.5, 6.67."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{points(abs(value))}"


def page_name(name: str) -> str:
    """Return the file name of a submission's page, without ".html". Different submissions get different names.

    This also holds on file systems that ignore case, so nobody can overwrite another student's page. Letters of any
    script are kept if the file system supports them.
    """
    if _SAFE.fullmatch(name) and not _HASHED.fullmatch(name) and not _DEVICES.fullmatch(name):
        return name
    other = r"[^\w]+" if sys.getfilesystemencoding() == "utf-8" else "[^a-z0-9_]+"
    slug = re.sub(other, "-", unicodedata.normalize("NFC", name.lower())).strip("-")[:48]
    return f"{slug or 'submission'}-{_digest(name)}"


def _digest(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the Unicode picture of a control character: ␀, ␛ …
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
