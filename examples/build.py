"""Builds examples/submissions/ from the reference: `python -m examples.build`; `make grade` does it first.

Honest submissions look as students send them. Each hostile submission tries one trick, next to a file of honest code.
"""

import json
import shutil
import tarfile
import zipfile
from pathlib import Path

from grader import hostile as corpus
from lab.course.assignment import ROOT, default

HERE = Path(__file__).parent
BENCHMARK, TILED, NAIVE = "benchmarking/benchmark.py", "flash_attention/tiled_forward.py", "ddp/naive.py"
PROFILE = "tour"  # one timed, one numeric and one multi-rank exercise


def reference(file: str, *edits: tuple[str, str]) -> str:
    """Return a file of the reference with texts replaced. Each old text must occur exactly once."""
    text = (ROOT / "reference" / file).read_text(encoding="utf-8")
    for old, new in edits:
        assert text.count(old) == 1, f"{file}: {text.count(old)} matches of {old!r}"
        text = text.replace(old, new)
    return text


def stub(file: str) -> str:
    return (ROOT / "student" / file).read_text(encoding="utf-8")


def honest() -> dict[str, dict[str, str]]:
    """Return the honest submissions: {name: {file: text}}."""
    return {
        "half-done": {BENCHMARK: reference(BENCHMARK), TILED: stub(TILED), NAIVE: stub(NAIVE)},
        "subtly-wrong": {
            BENCHMARK: reference(BENCHMARK, ("        torch.cuda.synchronize()", "        pass")),
            TILED: reference(TILED, ("columns > rows[:, None]", "columns >= rows[:, None] + 2")),
            NAIVE: reference(NAIVE, ("                parameter.grad.div_(world)\n", "")),
        },
        "hanging": {
            BENCHMARK: reference(BENCHMARK),
            NAIVE: reference(
                NAIVE,
                (
                    "                dist.all_reduce(parameter.grad, group=self.group)",
                    "                if dist.get_rank() == 0:\n"
                    "                    dist.broadcast(parameter.grad, group_src=0, group=self.group)\n"
                    "                else:\n"
                    "                    dist.all_reduce(parameter.grad, group=self.group)",
                ),
            ),
        },
        "crashing-at-import": {
            BENCHMARK: reference(BENCHMARK),
            TILED: reference(TILED, ("import torch\nfrom", "import torch\nimport einops_of_my_own\nfrom")),
            NAIVE: reference(NAIVE),
        },
    }


def hostile() -> dict[str, dict[str, str]]:
    """Return the hostile submissions: {name: {file: text}}. Most tricks come from grader/hostile; the benchmark is honest."""
    attacks = {attack.name: attack.files for attack in corpus.read()}
    exits, forks, fills, forges = (
        "".join(attacks[name].values())  # each attack has one file
        for name in ("exits-with-code-0", "fork-bomb", "memory-bomb", "writes-into-files-of-results")
    )
    spy = (
        "import os\n\n"
        'SECRET = ("test_naive.py", "test_tiled_forward.py", "gradebook.sqlite")\n\n\n'
        "def secrets():\n"
        '    yield repr([f"{k}={v}" for k, v in os.environ.items()])\n'
        '    for folder, inside, files in os.walk("/"):\n'
        '        inside[:] = [f for f in inside if f not in ("proc", "sys", "usr", "site-packages")]\n'
        "        yield from (repr(f) for f in files if f in SECRET)\n\n\n"
        "class NaiveDDP:\n    def __init__(self, *args):\n"
        '        raise RuntimeError(" ".join(secrets())[:2000])\n'
    )
    clean = {BENCHMARK: reference(BENCHMARK)}
    return {
        "hostile-exit": {**clean, TILED: exits, NAIVE: exits},
        "hostile-conftest": {**attacks["brings-a-conftest"], **clean, NAIVE: stub(NAIVE)},
        "hostile-fork-bomb": {**clean, NAIVE: forks},
        "hostile-memory": {**clean, NAIVE: fills},
        "hostile-spy": {**clean, NAIVE: spy},
        "hostile-forged-results": {**clean, NAIVE: forges, TILED: forges},
        "hostile-library": {**clean, **attacks["gets-data-parallel-by-getattr"]},
    }  # fmt: skip


def expected() -> dict[str, dict]:
    """Return the points that each submission must earn. A hostile submission earns the points of its honest code."""
    points = {id: default().exercise(id).points for id in default().profiles[PROFILE]}
    benchmark, naive = "benchmarking.benchmark", "ddp.naive"

    def earns(*ids: str, hostile: bool = False) -> dict:
        return {"status": "graded", "hostile": hostile, "points": {i: p if i in ids else 0 for i, p in points.items()}}

    # Without timing tests, numerics are two thirds of the points. A test passes as a whole. Property needs all numerics.
    sum_for_mean = round(10 * 2 / 3 / 5, 4)  # only the test of equal starts passes
    points_earned = {benchmark: 2.0, "flash_attention.tiled_forward": round(15 * 2 / 3 / 3, 4), naive: sum_for_mean}
    table = {
        "complete": earns(*points),
        "data-parallel-only": earns(naive),
        "half-done": earns(benchmark),
        "subtly-wrong": {"status": "graded", "hostile": False, "points": points_earned},
        "hanging": {**(h := earns(benchmark)), "points": {**h["points"], naive: sum_for_mean}},
        "crashing-at-import": earns(benchmark, naive),
        "not-an-archive": {"status": "refused", "hostile": False, "points": dict.fromkeys(points, 0)},
    }
    for name in hostile():
        table[name] = earns(benchmark, hostile=True)
    return dict(sorted(table.items()))


def build(folder: Path = HERE / "submissions") -> None:
    """Replace `folder` with all submissions."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, files in {**honest(), **hostile()}.items():
        for file, text in files.items():
            path = folder / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    files = (default().exercise(id).file for id in default().profiles[PROFILE])
    names = sorted(n for file in files for n in (file, f"{file.partition('/')[0]}/__init__.py"))
    solutions = {name: (ROOT / "reference" / name).read_text(encoding="utf-8") for name in names}
    with zipfile.ZipFile(folder / "complete.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in _as_students_zip(solutions).items():
            archive.writestr(name, data)
    with tarfile.open(folder / "data-parallel-only.tar.gz", "w:gz") as archive:
        archive.add(ROOT / "reference" / NAIVE, NAIVE)
    (folder / "not-an-archive.zip").write_bytes(b"PK but nothing of the kind\n")


def _as_students_zip(files: dict[str, str]) -> dict[str, bytes]:
    """Nest the files one folder too deep, next to typical clutter of a student's disk."""
    deep = {f"assignment-main/student/{name}": text.encode() for name, text in files.items()}
    return {
        **deep,
        "assignment-main/student/ddp/__pycache__/naive.cpython-311.pyc": b"\0" * 64,
        "assignment-main/.git/HEAD": b"ref: refs/heads/main\n",
        "assignment-main/.DS_Store": b"\0\0\0\1Bud1",
        "assignment-main/scratch.ipynb": b'{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}\n',
        "assignment-main/writeup.pdf": b"%PDF-1.4\n%%EOF\n",
        "__MACOSX/assignment-main/._student": b"\0\5\26\7",
    }


if __name__ == "__main__":
    build()
    (HERE / "expected.json").write_text(json.dumps(expected(), indent=1) + "\n", encoding="utf-8")
