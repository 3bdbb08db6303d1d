"""Instruments that are moved are found out: attacks earn when their cross-check is off, and do not when it is on.

Honest code raises no flag: the reference here, all variants in `grader hostile` and the soak.
"""

from __future__ import annotations

import fcntl
import json
import tomllib

import pytest

from grader import cs336, evidence, mutants
from grader.graded import Flag
from grader.judge import SandboxRoom, run_tests
from grader.sandbox import Sandbox, available
from lab import forbidden, turns
from lab.assignment import ROOT, default
from lab.runner import Observed, Room, Runner
from lab.scoring import REASONS
from lab.unwritten import untouched
from lab.world import witness
from lab.world.ledger import Row, rows_that_differ
from lab.world.witness import Account

from . import probes_evidence as probes

ATTACKS = {
    a["name"]: a for a in tomllib.loads((ROOT / "grader" / "hostile" / "instruments.toml").read_text())["attack"]
}


# ---- names in the source ----

SDPA = "torch.nn.functional.scaled_dot_product_attention"
NAMED = {
    "as it is written": "import torch\ntorch.nn.functional.scaled_dot_product_attention(1)",
    "imported": "from torch.nn.functional import scaled_dot_product_attention as y",
    "renamed": "import torch.nn.functional as G; f = G.scaled_dot_product_attention",
    "an instrument": "from lab.world.group import ledger",
}
HONEST = {
    "another's attribute": "class A:\n    scaled_dot_product_attention = 1\nA.scaled_dot_product_attention",
    "text": "print('torch.nn.functional.scaled_dot_product_attention')",
    "a part of the name": "import torch\nprecision = 'float16'\ngetattr(torch, precision)",
    "settings": "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_forbidden_name_is_found_in_the_source(tmp_path, name):
    (tmp_path / "solution.py").write_text(NAMED[name])
    assert forbidden.find(tmp_path, "solution.py", [SDPA]), f"not found:\n{NAMED[name]}"


@pytest.mark.parametrize("name", HONEST)
def test_what_only_looks_like_it_is_let_be(tmp_path, name):
    (tmp_path / "solution.py").write_text(HONEST[name])
    assert not forbidden.find(tmp_path, "solution.py", [SDPA])


IMPORTS = {
    "relative": "from .other import f",
    "absolute": "from impl.ddp.other import f",
    "whole": "import impl.ddp.other as o",
    "all of it": "from .other import *",
    "by attribute": "import impl\nimpl.ddp.other.f",
    "by folder": "from . import other",
    "by the folder above": "from .. import ddp\nddp.other.f",
}


@pytest.mark.parametrize("name", IMPORTS)
@pytest.mark.parametrize("hidden", ["ddp/other.py", "ddp/other/__init__.py"])
def test_what_a_solution_imports_of_its_own_is_read(tmp_path, name, hidden):
    for file, text in {"ddp/naive.py": IMPORTS[name], hidden: NAMED["imported"]}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert [f.partition(":")[0] for f in forbidden.find(tmp_path, "ddp/naive.py", [SDPA])] == [hidden]


@pytest.mark.parametrize("hidden", ["__init__.py", "ddp/__init__.py"])
def test_packages_on_the_way_are_loaded_and_so_read(tmp_path, hidden):
    (tmp_path / "ddp").mkdir()
    (tmp_path / "ddp" / "naive.py").write_text("")
    (tmp_path / hidden).write_text(NAMED["imported"])
    assert forbidden.find(tmp_path, "ddp/naive.py", [SDPA])


UNREADABLE = {"minus signs": "x = " + "-" * 20_000 + "1", "many MB": "#" * (5 << 20), "a sum": "x = 1" + "+1" * 50_000}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_itself(tmp_path, name):
    """Python may run it, so nothing found in it is no answer; and no parser's error ends whoever asks."""
    file = tmp_path / "solution.py"
    file.write_text(UNREADABLE[name])
    with pytest.raises(forbidden.Unreadable, match=r"solution\.py: .*; (shorten it|take them apart)"):
        forbidden.find(tmp_path, "solution.py", [SDPA])
    assert untouched(file) == ""
    assert cs336.edition(file.read_bytes()) == "cs336-2025"
    assert cs336.borrowed(tmp_path)


# ---- what was told ----


def told(*lines: list) -> Account:
    """An account of these lines."""
    return Account(b"".join(b"%d.5 %s\n" % (n, json.dumps(x).encode()) for n, x in enumerate(lines)))


METER = dict(zip(witness.MEMORY, [1 << 20, 1 << 18, 0, 0], strict=True))
MADE = [["made", 0, 1 << 20, 1 << 18], ["made", 0, -(1 << 20), 0]]
METERED = [*MADE, ["memory", 0, *METER.values()]]
TIMED = [["begin"], ["took", 1, 0.5], ["begin"], ["took", 1, 0.75]]
FORGED = {
    "a peak is another": (told(*METERED), {**METER, "peak_bytes": 4}),
    "a storage was not counted": (told(*MADE, ["memory", 0, 4, 1 << 18, 0, 0]), {}),
    "an access is gone": (told(["launched", 0, 1, 3, 77], ["watched", 0, 1, 2, 78]), {}),
    "times are others": (told(*TIMED), ([0.5, 0.75], [0.1, 0.1])),
    "lists in lists": (Account(b"1.0 " + b"[" * 10**5), {}),
    "nonsense": (Account(b'1.0 ["wait","a","b"]\nx'), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_an_answer_that_is_not_what_was_told_is_none(name):
    account, value = FORGED[name]
    assert account.disagrees(value)


def test_an_answer_that_agrees_is_one():
    assert told(*METERED, ["launched", 0, 1, 3, 77], ["watched", 0, 1, 3, 77]).disagrees([METER]) == ""
    assert told(*TIMED).disagrees(([0.5, 0.75], [1, 2], [0.1])) == ""


# ---- what is seen from outside ----


ROW = Row(0, "all_reduce", 400, 100, "float32", [0, 1], "backward", 0, 1.25)


@pytest.mark.parametrize("change", [{"bytes": 4}, {"op": "broadcast"}, {"number": 1}, {"group": [0]}, {"peer": 1}])
def test_a_row_that_the_switch_did_not_carry_is_forged(change):
    plain = ROW.plain()
    assert rows_that_differ({"steps": [(plain, 1.0)]}, [ROW]) == ""
    assert "is none that was carried" in rows_that_differ({"steps": [({**plain, **change}, 1.0)]}, [ROW])


def observed(*accounts: Account, seconds: float = 9.0, **readings: int) -> Observed:
    return Observed("ddp.naive", "tests.ddp.probes:sent", list(accounts), 1000, seconds, readings)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("", observed(told(*METERED), memory_bytes=24 * MIB)),
        ("memory and its meter disagree", observed(told(*METERED), memory_bytes=60 * MIB)),
        ("", observed(told(), memory_bytes=600 * MIB)),
        ("", observed(told(["begin"], ["took", 0, 0.9]))),
        ("clocks disagree", observed(told(["begin"], ["took", 0, 0.2]))),
        ("clocks disagree", observed(told(["begin"], ["took", 0, 0.9]), seconds=0.5)),
    ],
)
def test_where_inside_and_outside_part_is_a_flag(kind, seen):
    assert [f.kind for f in evidence.of_probe(seen)] == ([kind] if kind else [])


@pytest.fixture(scope="module")
def box():
    """A runner in a sandbox, and the flags that its probes have raised."""
    if why := available()["bubblewrap"]:
        pytest.skip(f"no sandbox: {why}")
    flags: list[Flag] = []
    with Sandbox("bubblewrap", ROOT / "reference", ROOT) as sandbox:
        runner = Runner(SandboxRoom(sandbox, ROOT / "reference"))
        runner.observe = evidence.observer(flags)
        yield runner, flags
        runner.close()


@pytest.mark.parametrize("metered", [True, False])
def test_what_goes_past_the_meter_is_in_the_box(box, metered):
    runner, flags = box
    flags.clear()
    runner.run(probes.hoard, 1, True)
    runner.run(probes.hoard, 120, metered)
    if any("memory cgroup" in note for note in runner.room.box.notes):
        pytest.skip("no memory cgroup could be set here")
    assert [f.kind for f in flags] == ([] if metered else ["memory and its meter disagree"])


# ---- attacks ----

OVERLAPPED = "tests/ddp/test_overlapped.py"
ATTACKED = {
    "tiles-not-counted":
        "tests/flash_attention/test_triton_forward.py::test_tiles_above_the_diagonal_are_never_read[square-interpret]",
}  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """bench.judge(attack, test): the result of one test on what the attack hands in, in the student's room."""
    folder, runner = tmp_path_factory.mktemp("attacks"), Runner(Room(ROOT / "reference"))

    def judge(name: str, test: str):
        a = ATTACKS[name]
        edits = tuple((e["file"], e["old"], e["new"]) for e in a["edit"])
        if not (folder / name).exists():
            mutants.apply(mutants.Edited(name, a["exercise"], a["why"], "assertion", edits), folder)
        runner.room = Room(folder / name)
        runner.forget()
        runner.verdicts = dict.fromkeys(default().exercises, True)
        (result,) = run_tests(runner, [a["exercise"]], "a seed", folder / "expected", only=[test])
        return result

    runner.judge = judge
    yield runner
    runner.close()


@pytest.mark.parametrize("name", ATTACKED)
def test_an_attack_earns_without_its_cross_check_and_not_with_it(bench, monkeypatch, name):
    with monkeypatch.context() as off:
        off.setattr(Account, "disagrees", lambda account, value: "")
        without = bench.judge(name, ATTACKED[name])
    assert without.outcome == "passed", f"it was to work: {without.message}"
    checked = bench.judge(name, ATTACKED[name])
    assert (checked.outcome, checked.reason) == ("failed", "forged"), checked.message
    assert "forged" in REASONS


# ---- turns ----


def test_two_who_time_something_wait_for_each_other():
    lock = turns.FOLDER / f"shardlings-{turns._places()[0]}.lock"
    with turns.alone(), lock.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_who_holds_a_core_for_ever_is_waited_for_once(monkeypatch, tmp_path):
    monkeypatch.setattr(turns, "FOLDER", tmp_path)
    monkeypatch.setattr(turns, "WAIT_S", 0.2)
    monkeypatch.setattr(turns, "_lost", set())
    with (tmp_path / f"shardlings-{turns._places()[0]}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.warns(UserWarning, match="core-"), turns.alone():
            assert turns._lost == {turns._places()[0]}
        monkeypatch.setattr(turns, "WAIT_S", 1e6)
        with pytest.warns(UserWarning, match="core-"), turns.alone():
            pass
