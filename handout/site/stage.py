"""Writes the sources for Sphinx: the chapters, the notebooks, and a page for each file that they link to.

The student's edition shows only the `interface` of student/. The solutions' edition shows reference/ instead.
"""

import json
import os
import re
import shutil
from pathlib import Path, PurePosixPath

from lab.course.assignment import ROOT, default

from .interface import interface

EDITIONS = ("student", "solutions")
INSTRUCTORS = "instructors.md"  # in the solutions' edition only
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_CODE = re.compile(r"(```.*?^```|`[^`\n]*`)", re.DOTALL | re.MULTILINE)
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash"}


def stage(folder: Path, edition: str, profile: str = "full") -> None:
    """Replace the content of `folder` with the sources of an edition.

    Chapters contain only the exercises of the profile.
    """
    kept = set(default().of_profile(profile).exercises)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "notebooks").mkdir(parents=True)
    pages = {p.name: p.read_text(encoding="utf-8") for p in sorted((ROOT / "handout").glob("*.md"))}
    if edition == "student":
        pages.pop(INSTRUCTORS, None)
    linked: set[str] = set()
    for name, text in pages.items():
        text = _relinked(without_exercises(text, kept), "handout", edition, linked, kept)
        _write(folder / _page(name), text + _contents(name, pages))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        _write(folder / "notebooks" / path.name, _notebook(path, edition, linked, kept))
    for picture in sorted((ROOT / "handout" / "images").glob("*.[sp][vn]g")):
        shutil.copyfile(picture, _parent(folder / "images" / picture.name))
    for file in sorted(linked):
        _write(folder / "code" / f"{file}.md", _code_page(file, edition))


def code_of(file: str, edition: str) -> str:
    """The text that an edition shows for a file such as "ddp/naive.py"; a comment if the file cannot be read."""
    if edition == "solutions":
        return (ROOT / "reference" / file).read_text(encoding="utf-8")
    try:
        return interface((ROOT / "student" / file).read_text(encoding="utf-8"))
    except SyntaxError as error:
        return f"# student/{file}, line {error.lineno}: not Python as it stands ({error.msg}); mend it, build again"
    except (OSError, UnicodeDecodeError, ValueError) as error:
        return f"# student/{file}: cannot be read ({getattr(error, 'strerror', None) or error})"


def anchor(id: str) -> str:
    """The anchor of an exercise's code in its chapter."""
    return f"interface-{id.replace('.', '-').replace('_', '-')}"


def without_exercises(chapter: str, kept: set[str]) -> str:
    """Return the chapter without the sections of exercises that are not in `kept`."""
    sections = re.split(r"(?m)^(?=## )", chapter)
    headings = [re.match(r"## Exercise `(\S+)`", section) for section in sections]
    return "".join(s for s, match in zip(sections, headings, strict=True) if match is None or match[1] in kept)


def heading(id: str) -> str:
    """The link to an exercise's section, as GitHub and MyST name it."""
    return f"{default().exercise(id).stage}.md#exercise-{id.replace('.', '')}"


def _page(name: str) -> str:
    return "index.md" if name == "README.md" else name


def _relinked(text: str, folder: str, edition: str, linked: set[str], kept: set[str]) -> str:
    """Return `text`, a page of `folder`, with links into the site. Adds files that need a page to `linked`."""
    parts = _CODE.split(text)
    for i in range(0, len(parts), 2):  # odd parts are code
        parts[i] = _LINK.sub(lambda m: _target(m[1], folder, edition, linked, kept), parts[i])
    joined = "".join(parts)
    return re.sub(r"(?<!!)\[([^\[\]]+)\]\(\)", r"\1", joined)  # links without a target become text


def _target(link: str, folder: str, edition: str, linked: set[str], kept: set[str]) -> str:
    """The target in the site of a link in a page of `folder`; "" if it has no page."""
    if link.startswith(("http", "#", "mailto:")):
        return link
    path, hash, fragment = link.partition("#")
    file = os.path.normpath(f"{folder}/{path}").replace(os.sep, "/")
    prefix = "../" if folder == "notebooks" else ""
    top, _, rest = file.partition("/")
    exercise = next((e for e in default().exercises.values() if top == "student" and e.file == rest), None)
    left_out = {heading(id) for id in default().exercises if id not in kept}
    if (exercise and exercise.id not in kept) or f"{PurePosixPath(path).name}#{fragment}" in left_out:
        return ""
    if exercise:
        return f"{prefix}{exercise.stage}.md#{anchor(exercise.id)}" if prefix else f"#{anchor(exercise.id)}"
    if top == "handout" and "/" not in rest and rest.endswith(".md"):
        known = (ROOT / file).is_file() and (edition, rest) != ("student", INSTRUCTORS)
        return f"{prefix}{_page(rest)}{hash}{fragment}" if known else ""
    if top == "handout" and rest.startswith("images/"):
        return f"{prefix}{rest}"
    if top == "notebooks" and rest.endswith(".ipynb"):
        return rest if prefix else file
    if (ROOT / file).is_file() and PurePosixPath(file).suffix != ".md":
        linked.add(file)
        return f"{prefix}code/{file}.md"
    return ""


def _contents(name: str, pages: dict[str, str]) -> str:
    """The tables of contents that Sphinx needs, for the first page; "" for other pages."""
    if name != "README.md":
        return ""
    chapters = [s.name for s in default().stages if f"{s.name}.md" in pages]
    books = [f"notebooks/{p.stem}" for p in sorted((ROOT / "notebooks").glob("*.ipynb"))]
    extras = [
        n for n in ("planning", "published", "conventions", "cluster", "glossary", "instructors") if f"{n}.md" in pages
    ]
    trees = {"Chapters": chapters, "Notebooks": books, "Beside them": extras}
    head = "\n```{toctree}\n:hidden:\n:caption:"
    return "".join(f"{head} {title}\n\n{chr(10).join(names)}\n```\n" for title, names in trees.items())


def _notebook(path: Path, edition: str, linked: set[str], kept: set[str]) -> str:
    book = json.loads(path.read_text(encoding="utf-8"))
    for cell in book["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = _relinked("".join(cell["source"]), "notebooks", edition, linked, kept)
    return json.dumps(book, ensure_ascii=False)


def _code_page(file: str, edition: str) -> str:
    """A page with one file's text; for a file of student/, the text of `code_of`."""
    top, _, rest = file.partition("/")
    shown = top == "student" and rest.endswith(".py")
    text = code_of(rest, edition) if shown else (ROOT / file).read_text(encoding="utf-8")
    title = f"reference/{rest}" if shown and edition == "solutions" else file
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`{3,}", text)), 3)
    language = _LANGUAGES.get(PurePosixPath(file).suffix, "none")
    return f"---\norphan: true\nnosearch: true\n---\n# `{title}`\n\n{fence}{language}\n{text}\n{fence}\n"


def _write(path: Path, text: str) -> None:
    _parent(path).write_text(text, encoding="utf-8")


def _parent(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
