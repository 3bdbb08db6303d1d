"""Grade attacks on one exercise each, in the sandbox, as an instructor would: `python grader/hostile/strangers/grade.py [NAME…]`.

Each folder here holds meta.toml and the files that differ from the reference. Each grading adds a line to RESULTS.md.
It names the commit of main that the graded tree is made from.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from grader import batch  # noqa: E402
from grader.sandbox import choose  # noqa: E402
from grader.submissions import Submission  # noqa: E402
from lab.assignment import default  # noqa: E402
from lab.scoring import score, totals  # noqa: E402

HERE = Path(__file__).resolve().parent
HEADER = "| name | kind | exercise | earned | honest | flags | comment |\n|---|---|---|---|---|---|---|\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--results", type=Path, default=Path("RESULTS.md"))
    parser.add_argument("--verbose", action="store_true", help="print what each failed test says")
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.parent.name for path in HERE.glob("*/meta.toml"))
    if not arguments.results.exists():
        arguments.results.write_text(HEADER, encoding="utf-8")
    for name in names:
        line = graded(name, arguments.verbose)
        print(line, flush=True)
        with arguments.results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def graded(name: str, verbose: bool) -> str:
    """A row of the table."""
    folder = HERE / name
    meta = tomllib.loads((folder / "meta.toml").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as temporary:
        built = Path(temporary) / "submission"
        shutil.copytree(ROOT / "reference", built, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(folder, built, dirs_exist_ok=True, ignore=shutil.ignore_patterns("meta.toml", "__pycache__"))
        ids, start = (meta["exercise"],), time.monotonic()
        settings = batch.Settings(batch.new_seed(), ids, choose(None), str(Path(temporary) / "cache"), limit_s=300.0)
        result = batch.grade_one(Submission(name, built), settings)
    scores = score(default(), result.results, ids, passes=lambda id: True)
    earned, possible, _ = totals(scores)
    share = earned / possible if possible else 0.0
    failed = [r for r in result.results if r.outcome != "passed"]
    if verbose:
        for r in failed:
            print(f"  {r.outcome} {r.kind} {r.id}: {r.reason}: {r.message[:500]}")
        for flag in result.flags:
            print(f"  flag {flag.kind}: {flag.detail[:300]}")
    flags = ", ".join(sorted({f.kind for f in result.flags})) or "none"
    ask = ["git", "merge-base", "HEAD", "main"]
    tree = subprocess.run(ask, cwd=ROOT, capture_output=True, text=True).stdout[:7]
    undecided = sum(s.inconclusive for s in scores)
    first = f"{failed[0].id.rpartition('::')[2]}: {failed[0].message[:110]}" if failed else "all tests pass"
    how = f"{time.monotonic() - start:.0f} s, {undecided:g} points undecided, main {tree}"
    comment = " ".join(f"{len(failed)} failed; {first} ({how})".split()).replace("|", "/")
    return (
        f"| {name} | {meta['kind']} | {meta['exercise']} | {share:.2f} | {meta['honest']:.2f} | {flags} | {comment} |"
    )


if __name__ == "__main__":
    main()
