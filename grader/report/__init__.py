"""What comes out of the grader for people: HTML pages (`html`) and other tools' formats (`exports`).

Names, messages and outputs come from submissions and are hostile. This file makes them fit to store and to
show: plain text holds nothing that a terminal, a database, JSON or a reader's eye would obey. Escaping for
HTML or CSV comes after.
"""

from __future__ import annotations

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
# Everything unseen that changes how the rest looks: controls, surrogates, direction marks, zero widths, tags.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\ufffe\uffff\U000e0000-\U000e007f]"
)
_SAFE = re.compile(r"[a-z0-9][a-z0-9_-]{0,59}")
_HASHED = re.compile(r".*-[0-9a-f]{8}")
_DEVICES = re.compile(r"con|prn|aux|nul|com\d|lpt\d")  # names that Windows keeps for itself


def plain(text: str, limit: int) -> str:
    """At most `limit` (≥ 100) characters of text, safe to store, print and show; its end counts what was cut.

    Terminal escapes go; other controls, direction overrides and lone surrogates become visible ("␀", or their
    code). Newlines and tabs stay. Applying it twice changes nothing more.
    """
    head = text[: 8 * limit]  # megabytes are cut before they are looked at
    head = _UNSEEN.sub(_visible, _ANSI.sub("", head.replace("\r\n", "\n")))
    unread = max(0, len(text) - 8 * limit)
    if len(head) <= limit and not unread:
        return head
    kept = head[: limit - 40]
    return f"{kept}… ({len(head) - len(kept) + unread} more characters)"


def fit(row: Any, exact: Collection[str] = ()) -> Any:
    """A submission, result, flag, answer or mark, with texts that are safe to show, and numbers that are finite.

    exact: fields that stay as they are.
    """
    changed: dict[str, str | float] = {}
    for name, value in vars(row).items():
        if isinstance(value, str) and name not in exact:
            changed[name] = plain(value, TEXT_LIMIT if name in _LONG else 1000)
        elif isinstance(value, float) and not math.isfinite(value):
            changed[name] = 0.0
    return replace(row, **changed)


def one_line(text: str, limit: int) -> str:
    """Plain text without line breaks, for names, cells and headings."""
    return " ".join(plain(text, limit).split())


def labels(names: Iterable[str]) -> dict[str, str]:
    """name → how it is shown; no two names are shown alike, so no submission can pass for another."""
    shown: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        label = one_line(name, 120) or "(no name)"
        if label in taken or label != name:
            label = f"{label} #{_digest(name)}"
        while label in taken:  # somebody's folder is called just like that
            label += "'"
        taken.add(label)
        shown[name] = label
    return shown


def points(value: float) -> str:
    """Two decimals at most: 6, 6.5, 6.67."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def signed(value: float) -> str:
    return f"{'+' if value >= 0 else '−'}{points(abs(value))}"


def page_name(name: str) -> str:
    """The file name, less ".html", of a submission's page: names that differ get files that differ.

    That holds where file systems ignore case, too; nobody can choose a name to overwrite another's page. Letters of
    any script stay, where the file system has them.
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
