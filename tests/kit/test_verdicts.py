"""A verdict is found once: a session leaves what it found to the next, unless it saw only a part."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lab.course.assignment import ROOT
from lab.course.scoring import Result
from lab.harness.verdicts import Verdicts

NEEDED = "ddp.naive"  # by others


def session(folder, outcomes, judging) -> Verdicts:
    config = SimpleNamespace(option=SimpleNamespace(expect_cache=folder, seed="public"))
    runner = SimpleNamespace(executor=SimpleNamespace(source=ROOT / "reference"), verdicts={})
    results = [Result(NEEDED, "numerics", f"test_{n}", "", outcome) for n, outcome in enumerate(outcomes)]
    made = Verdicts(config, runner, results)
    made.judging = {NEEDED: judging}
    return made


@pytest.mark.parametrize(
    ("outcomes", "judging", "kept"),
    [
        (["passed", "passed"], 2, True),
        (["passed", "failed"], 2, False),
        (["passed"], 2, None),
        (["passed", "inconclusive"], 2, None),
    ],
)
def test_the_next_session_knows_a_verdict(tmp_path, outcomes, judging, kept):
    session(tmp_path, outcomes, judging).keep()
    later = session(tmp_path, [], None)
    asked = []
    later._ask = lambda id: asked.append(id) or True
    assert later.passes(NEEDED) is (kept is not False)
    assert asked == ([NEEDED] if kept is None else [])
