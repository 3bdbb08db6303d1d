"""Pages as programs: what a reader types, in the page's order, and what the page says it prints.

In a fenced block marked `console`, lines that begin with `$ ` are commands (`> ` goes on with one) and those below are
what it prints: `...` stands for anything, alone on a line for any lines, `<number>` for a number; spaces and the breaks
of a table's frame do not matter. A block marked `sh` is commands alone. `needs=nsys` after the mark says what the
commands take that is not everywhere. A block of any other mark with a path after it is a file: written, or added to the
end of what is there.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from lab.course.assignment import ROOT

_NUMBER = r"[-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?"
_LEFT_OUT = (".git", ".venv", "__pycache__", ".cache", "out", "build", ".*_cache", "*.egg-info")


@dataclass(frozen=True)
class File:
    path: str
    text: str


@dataclass(frozen=True)
class Command:
    text: str
    prints: str  # "" where the page does not say
    needs: str  # "" where it runs anywhere
    line: int  # of its block


def steps(page: Path) -> list[File | Command]:
    """Files and commands of a page, from top to bottom."""
    found: list[File | Command] = []
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type != "fence" or token.info.startswith("{"):  # a directive of the site's
            continue
        language, _, argument = token.info.strip().partition(" ")
        line = (token.map or [0])[0] + 1
        needs = argument.removeprefix("needs=") if argument.startswith("needs=") else ""
        if language == "sh":
            found += [Command(text, "", needs, line) for text in _lines(token.content)]
        elif language == "console":
            for entry in re.split(r"(?m)^\$ ", token.content)[1:]:
                command, *rest = re.sub(r"\\\n> ", "", entry).split("\n", 1)
                found.append(Command(command, "".join(rest).strip("\n"), needs, line))
        elif argument and not needs:
            found.append(File(argument, token.content))
    return found


def _lines(block: str) -> list[str]:
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    return [bare for line in lines if (bare := re.sub(r"(?:^|\s+)#\s.*", "", line).strip())]


def mark_of_each_block(page: Path) -> list[tuple[int, str, str]]:
    """(line, info string, first line) of all fenced blocks."""
    tokens = [t for t in MarkdownIt().parse(page.read_text(encoding="utf-8")) if t.type == "fence"]
    return [((t.map or [0])[0] + 1, t.info.strip(), t.content.partition("\n")[0]) for t in tokens]


def copy_kit(folder: Path) -> Path:
    """The kit's files without what is made from them, and a `.venv` that is ready: a fresh clone after `make env`."""
    kit = folder / "kit"
    shutil.copytree(ROOT, kit, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (kit / ".venv" / "bin").mkdir(parents=True)
    (kit / ".venv" / "bin" / "activate").touch()
    for name in ("lab", "grader"):  # those that are installed may be another tree's
        script = kit / ".venv" / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {name} "$@"\n')
        script.chmod(0o755)
    (kit / ".venv" / ".ready").touch()
    return kit


def write(kit: Path, file: File) -> None:
    path = kit / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(f"{old}\n{file.text}" if old else file.text, encoding="utf-8")


def run(kit: Path, command: Command, timeout_s: float = 600) -> str:
    """What is wrong with it in a copy of the kit: how it ended, or where it prints other than the page says; or ""."""
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
        "PATH": f"{kit / '.venv' / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(kit), "COLUMNS": "120", "NO_COLOR": "1",
    }  # fmt: skip
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(
        ["bash", "-c", command.text], cwd=kit, env=environment, timeout=timeout_s, check=False, **pipes
    )
    if not command.prints:
        return f"{command.text}: ended with {done.returncode}:\n{done.stdout[-2000:]}" if done.returncode else ""
    if matches(command.prints, done.stdout):
        return ""
    return f"{command.text}: expected\n{command.prints}\n\ngot\n{done.stdout[-4000:]}"


def matches(expected: str, got: str) -> bool:
    """Whether `got` is what a page means by `expected`."""
    pattern = ""
    for line in expected.splitlines():
        if line.strip() == "...":
            pattern += r"(?:.*\n)*?"
            continue
        parts = re.split(r"(\.\.\.|<number>|\s+)", line.strip())
        pattern += r"\s*" + "".join(map(_pattern, parts)) + r"[^\S\n]*\n\s*"
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in got.splitlines()).strip() + "\n") is not None


def _pattern(part: str) -> str:
    return {"...": ".*", "<number>": _NUMBER}.get(part) or (r"[^\S\n]+" if part.isspace() else re.escape(part))
