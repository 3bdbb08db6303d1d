"""Reads commands, their expected output and files from a Markdown page, and runs the commands in page order.

In a fenced block marked `console`, lines that begin with `$ ` are commands (`> ` continues a command), and the lines
below are the expected output. There `...` matches anything, alone on a line any number of lines, and `<number>` a
number; spaces and line breaks of a table's frame do not matter. A block marked `sh` contains only commands.
`needs=nsys` after the mark names a program that is not available everywhere. A block with another mark and a path is a
file: it is written, or appended to an existing file.
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
    prints: str  # expected output; "" if the page does not show it
    needs: str  # a program or right that it needs, or ""
    line: int  # the line of its block


def steps(page: Path) -> list[File | Command]:
    """Return the files and commands of a page, from top to bottom."""
    found: list[File | Command] = []
    for token in MarkdownIt().parse(page.read_text(encoding="utf-8")):
        if token.type != "fence" or token.info.startswith("{"):  # "{" starts a directive of the site
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
    """Return (line, info string, first line) of each fenced block."""
    tokens = [t for t in MarkdownIt().parse(page.read_text(encoding="utf-8")) if t.type == "fence"]
    return [((t.map or [0])[0] + 1, t.info.strip(), t.content.partition("\n")[0]) for t in tokens]


def copy_kit(folder: Path) -> Path:
    """Copy the kit without generated files and with a ready `.venv`, as after `make env`. Return its folder."""
    kit = folder / "kit"
    shutil.copytree(ROOT, kit, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (kit / ".venv" / "bin").mkdir(parents=True)
    (kit / ".venv" / "bin" / "activate").touch()
    for name in ("lab", "grader"):  # the installed commands may belong to another tree
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
    """Run a command in a copy of the kit. Return its failure or unexpected output as a text, or ""."""
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
    """Whether the output `got` matches the pattern `expected` of a page."""
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
