"""`grader parts`: everything that belongs to an exercise, for whoever deletes it."""

from __future__ import annotations

from grader import parts
from lab.course.assignment import default


def test_an_exercise_names_its_files_and_all_that_mentions_it():
    found = dict(parts.of(default().exercise("flash_attention.weighted_sum_forward")))
    whole = {file for file, what in found.items() if what == "the whole file"}
    assert {"reference/flash_attention/weighted_sum_forward.py", "student/flash_attention/weighted_sum_forward.py",
            "tests/flash_attention/test_weighted_sum_forward.py"} <= whole  # fmt: skip
    for file in ("assignment.toml", "handout/flash_attention.md", "lab/explanations/flash_attention.md"):
        assert found[file].startswith("line"), f"{file}: {found[file]}"
    assert found["grader/mutants/flash_attention.toml"].startswith("tables at line")
    assert "tests/flash_attention/probes_kernels.py" not in whole, "other exercises use it"
