"""Builds Gradescope's autograder: an archive of setup.sh, run_autograder, and the parts of the kit that grading needs.

It contains no reference solution. The only secret in it is the seed, in `settings.json`.
"""

import json
from pathlib import Path

from grader.batch import new_seed
from grader.release import files_below, read, write_zip
from lab.course.assignment import ROOT

from .harness import failed

HERE = Path(__file__).parent
SCRIPTS = ("setup.sh", "run_autograder")
_ROOT_FILES = ("LICENSE", "Makefile", "README.md", "constraints.txt")
_MAKERS = ("mutants", "variants", "hostile", "release")  # folders of grader/ that only the kit's makers need


def files(profile: str) -> dict[str, bytes]:
    """Return all files of the archive by name, with a new secret seed."""
    found = read([*ROOT.glob("*.toml"), *(ROOT / name for name in _ROOT_FILES)])
    found |= read(files_below("lab"))
    found |= read(p for p in files_below("tests") if p.relative_to(ROOT).parts[1] != "kit")
    found |= read(p for p in files_below("grader") if p.relative_to(ROOT).parts[1] not in _MAKERS)
    found |= {name: (HERE / name).read_bytes() for name in SCRIPTS}
    found["settings.json"] = json.dumps({"profile": profile, "seed": new_seed()}, indent=1).encode()
    found["failed.json"] = json.dumps(failed(), indent=1).encode()
    return dict(sorted(found.items()))


def archive(out: Path, profile: str) -> int:
    """Write the archive and return its number of files. Raises InputError if it cannot be written."""
    found = files(profile)
    write_zip(out, found, executable=SCRIPTS)
    return len(found)
