"""Instruments that are moved are found out: attacks earn when their cross-check is off, and do not when it is on.

Honest code raises no flag: the reference here, all variants in `grader hostile` and the soak.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import tomllib
import tracemalloc

import pytest
import torch._functorch.config  # noqa: F401 (what is not loaded has no settings that could be told from wiring)

from grader import cs336, evidence, mutants
from grader.graded import Flag
from grader.judge import SandboxRoom, run_tests
from grader.sandbox import Sandbox, available
from lab import aliases, forbidden, turns
from lab.assignment import ROOT, default
from lab.runner import Observed, Room, Runner
from lab.scoring import REASONS
from lab.unwritten import untouched
from lab.world import witness
from lab.world.witness import Account

from . import probes_evidence as probes

ATTACKS = {
    a["name"]: a for a in tomllib.loads((ROOT / "grader" / "hostile" / "instruments.toml").read_text())["attack"]
}


# ---- names in the source ----

SDPA = "torch.nn.functional.scaled_dot_product_attention"
ALIASES = {
    "renamed": "import torch.nn.functional as G; f = G.scaled_dot_product_attention",
    "from": "from torch.nn.functional import scaled_dot_product_attention as y",
    "star": "from torch.nn.functional import *\nscaled_dot_product_attention(1)",
    "getattr": "import torch\ngetattr(torch.nn.functional, 'scaled_dot' + '_product_attention')",
    "formatted": "import torch\na = 'dot'\ngetattr(torch.nn.functional, f'scaled_{a}_product_%s' % 'attention')",
    "backwards": "import torch\ngetattr(torch.nn.functional, 'noitnetta_tcudorp_tod_delacs'[::-1])",
    "encoded": "import torch, base64 as b\nn = b.b64decode('c2NhbGVkX2RvdF9wcm9kdWN0X2F0dGVudGlvbg==').decode()\n"
    "getattr(torch.nn.functional, n)",
    "imported": "import importlib\nimportlib.import_module('torch.nn.functional').scaled_dot_product_attention",
    "dunder": "__import__('torch').nn.functional.scaled_dot_product_attention",
    "executed": "exec(compile('from torch.nn.functional import scaled_dot_product_attention', 'x', 'exec'))",
    "evaluated": "import torch\nf = eval('torch.nn.functional')\nf.scaled_dot_product_attention",
    "in a container": "import torch\nd = {'a': [torch.nn.functional]}\nd['a'][0].scaled_dot_product_attention",
    "in a loop": "import torch\nfor m in (torch.nn.functional,):\n    m.scaled_dot_product_attention",
    "partial": "import functools, torch\np = functools.partial(getattr, torch.nn.functional)\n"
    "p('scaled_dot_product_attention')",
    "attrgetter": "import operator, torch\n"
    "operator.attrgetter('nn.functional.scaled_dot_product_attention')(torch)",
    "methodcaller": "import operator, torch\nm = operator.methodcaller('scaled_dot_product_attention', 1)\n"
    "m(torch.nn.functional)",
    "vars": "import torch\nvars(torch.nn.functional)['scaled_dot_product_attention']",
    "globals": "import torch.nn.functional as F\nglobals()['F'].scaled_dot_product_attention",
    "modules": "import sys\nsys.modules['torch.nn.functional'].scaled_dot_product_attention",
    "operator": "import torch\ntorch.ops.aten._scaled_dot_product_flash_attention_for_cpu(1)",
    "the same object": "import torch\nf = torch._C._nn.scaled_dot_product_attention",
    "argument": "import torch\ndef f(m):\n    return m.scaled_dot_product_attention\nf(torch.nn.functional)",
    "result": "import torch\ng = lambda: torch.nn.functional\ng().scaled_dot_product_attention",
    "attribute": "import torch\nclass A:\n    def f(self):\n        self.m = torch.nn.functional\n"
    "    def g(self):\n        return self.m.scaled_dot_product_attention",
    "instrument": "import sys\nsys.modules['lab.world' + '.group'].ledger.rows.clear()",
}  # fmt: skip
HONEST = {
    "another's attribute": "class A:\n    scaled_dot_product_attention = 1\nA.scaled_dot_product_attention",
    "text": "print('torch.nn.functional.scaled_dot_product_attention')",
    "a part of the name": "import torch\ngetattr(torch.nn.functional, 'softmax')(torch.ones(2), 0)",
    "imports that are not used": "import signal, mmap, subprocess, ctypes\nfrom socket import socket",
    "settings": "import torch, torch._functorch.config\ntorch._functorch.config.donated_buffer = True\n"
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "itself": "a = b = 1\na = b\nb = a\ndef f(x):\n    x = f(x)\n    return x.scaled_dot_product_attention",
}


@pytest.mark.parametrize("name", ALIASES)
def test_a_forbidden_name_is_found_through_an_alias(tmp_path, name):
    (tmp_path / "solution.py").write_text(ALIASES[name])
    assert forbidden.find(tmp_path, "solution.py", [SDPA]), f"not found:\n{ALIASES[name]}"


@pytest.mark.parametrize("name", HONEST)
def test_what_only_looks_like_it_is_let_be(tmp_path, name):
    (tmp_path / "solution.py").write_text(HONEST[name])
    assert not forbidden.find(tmp_path, "solution.py", [SDPA])
    assert not forbidden.reaches(tmp_path, "solution.py")


@pytest.mark.parametrize(
    "text",
    [
        "import sys\nsys._getframe().f_back.f_locals['seen']",
        "import gc\ngc.get_objects()",
        "import signal as s\ns.signal(s.SIGTERM, s.SIG_IGN)",
        "from subprocess import run\nrun('true')",
        "import torch\ntorch.utils._python_dispatch._disable_current_modes()",
        "import torch\ntorch.cuda.synchronize = print",
        "import torch\nsetattr(torch, 'equal', print)",
        "import torch\ntorch.cuda.synchronize.__closure__[0].cell_contents",
        "import torch, os\ngetattr(torch, os.environ['HOW'])",
        "exec(open('more').read)",
    ],
)
def test_what_reaches_past_what_it_is_given_is_worth_a_look(tmp_path, text):
    (tmp_path / "solution.py").write_text(text)
    assert forbidden.reaches(tmp_path, "solution.py"), f"nothing seen in:\n{text}"


IMPORTS = {
    "relative": "from .other import f",
    "absolute": "from impl.ddp.other import f",
    "whole": "import impl.ddp.other as o",
    "by attribute": "import impl\nimpl.ddp.other.f",
    "by folder": "from . import other",
    "by the folder above": "from .. import ddp\nddp.other.f",
    "by a name": "import importlib\nimportlib.import_module('impl.ddp.other')",
}


@pytest.mark.parametrize("name", IMPORTS)
@pytest.mark.parametrize("hidden", ["ddp/other.py", "ddp/other/__init__.py"])
def test_what_a_solution_imports_of_its_own_is_read(tmp_path, name, hidden):
    for file, text in {"ddp/naive.py": IMPORTS[name], hidden: ALIASES["from"]}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert [f.partition(":")[0] for f in forbidden.find(tmp_path, "ddp/naive.py", [SDPA])] == [hidden]


@pytest.mark.parametrize("hidden", ["__init__.py", "ddp/__init__.py"])
def test_packages_on_the_way_are_loaded_and_so_read(tmp_path, hidden):
    (tmp_path / "ddp").mkdir()
    (tmp_path / "ddp" / "naive.py").write_text("")
    (tmp_path / hidden).write_text(ALIASES["from"])
    assert forbidden.find(tmp_path, "ddp/naive.py", [SDPA])


UNREADABLE = {"minus signs": "x = " + "-" * 20_000 + "1", "many MB": "#" * (5 << 20), "a sum": "x = 1" + "+1" * 50_000}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_refused_by_itself(tmp_path, name):
    """Python may run it, so nothing found in it is no answer; and no parser's error ends whoever asks."""
    file = tmp_path / "solution.py"
    file.write_text(UNREADABLE[name])
    with pytest.raises(forbidden.Unreadable, match=r"solution\.py: .*; (shorten it|take them apart)"):
        forbidden.find(tmp_path, "solution.py", [SDPA])
    assert forbidden.reaches(tmp_path, "solution.py")
    assert untouched(file) == ""
    assert cs336.edition(file.read_bytes()) == "cs336-2025"
    assert cs336.borrowed(tmp_path)


ENDLESS = {
    "width": "'%400000000d' % 1",
    "given width": "'%*d' % (400000000, 1)",
    "nested width": "'{:{}}'.format('x', '400000000')",
    "replaced": f"'{'a' * 9000}'.replace('', '{'b' * 9000}')",
    "joined": f"'{'a' * 9000}'.join('{'b' * 9000}')",
    "zeros": "bytes(400000000).decode()",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_constant_text_is_put_together_only_as_far_as_it_is_followed(name):
    tracemalloc.start()
    aliases.Names(ast.parse(f"import torch\ngetattr(torch, {ENDLESS[name]})"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


def test_text_that_adds_up_is_told_of_and_left():
    names = aliases.Names(ast.parse("\n".join(f"getattr(torch, '%60000d' % {n})" for n in range(500))))
    assert "more names and text" in names.unread[-1][1]


def test_the_reference_names_nothing_forbidden_and_reaches_for_nothing():
    for exercise in default().exercises.values():
        assert not forbidden.find(ROOT / "reference", exercise.file, exercise.forbidden)
    assert not [*evidence.of_source(ROOT / "reference", tuple(default().exercises))]


# ---- what was told ----


def told(*lines: list, rows: list | None = None, end: bool = True) -> Account:
    """An account of these lines; its end says what a ledger with `rows` says."""
    written = [[*line[1:], -1.0] for line in lines if line[0] == "row"] if rows is None else rows
    last = [["end", len(written), witness._digest(written)]] if end else []
    return Account(b"".join(b"%d.5 %s\n" % (n, json.dumps(x).encode()) for n, x in enumerate([*lines, *last])))


ROW = ["row", 0, "all_reduce", 400, 100, "float32", [0, 1], "backward", 0, 1.25, 4096]
AS_DICT = dict(zip(witness.FACTS, [*ROW[1:], -1.0], strict=True))
METER = dict(zip(witness.MEMORY, [1 << 20, 1 << 18, 0, 0], strict=True))
MADE = [["made", 0, 1 << 20, 1 << 18], ["made", 0, -(1 << 20), 0]]
METERED = [*MADE, ["memory", 0, *METER.values()]]
TIMED = [["begin"], ["took", 1, 0.5], ["begin"], ["took", 1, 0.75]]
FORGED = {
    "a row is another": (told(ROW), [{**AS_DICT, "bytes": 4}]),
    "a row is gone at the end": (told(ROW, rows=[]), []),
    "a row was waited for": (told(ROW, ["waited", 0, 2.0], rows=[[*ROW[1:], -1.0]]), []),
    "a row comes too late": (told([*ROW[:1], 3, *ROW[2:]]), []),
    "a peak is another": (told(*METERED), {**METER, "peak_bytes": 4}),
    "a storage was not counted": (told(*MADE, ["memory", 0, 4, 1 << 18, 0, 0]), {}),
    "an access is gone": (told(["launched", 0, 1, 3, 77], ["watched", 0, 1, 2, 78]), {}),
    "times are others": (told(*TIMED), ([0.5, 0.75], [0.1, 0.1])),
    "silence": (told(ROW, end=False), {}),
    "a row that is none": (told(["row", 0, "send", "many", 1, "", 7, "", 0, 0.0, 0]), {}),
    "lists in lists": (Account(b"1.0 " + b"[" * 10**5), {}),
    "nonsense": (Account(b'1.0 ["wait","a","b"]\nx'), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_an_answer_that_is_not_what_was_told_is_none(name):
    account, value = FORGED[name]
    assert account.disagrees(value)


def test_an_answer_that_agrees_is_one():
    assert told(ROW, *METERED, ["launched", 0, 1, 3, 77], ["watched", 0, 1, 3, 77]).disagrees([AS_DICT, METER]) == ""
    assert told(*TIMED).disagrees(([0.5, 0.75], [1, 2], [0.1])) == ""


# ---- what is seen from outside ----


def observed(*accounts: Account, seconds: float = 9.0, **readings: int) -> Observed:
    return Observed("ddp.naive", "tests.ddp.probes:sent", list(accounts), 1000, seconds, readings)


MIB = 1 << 20
PAIR = [told([*ROW[:3], MIB, MIB // 4, *ROW[5:]]), told([*ROW[:3], MIB, MIB // 4, *ROW[5:8], 1, *ROW[9:]])]


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("", observed(*PAIR, loopback_bytes=2 * MIB + 9000, loopback_packets=100)),
        ("ledger and loopback disagree", observed(*PAIR, loopback_bytes=3 * MIB, loopback_packets=100)),
        ("ledger and loopback disagree", observed(*PAIR, loopback_bytes=MIB // 2, loopback_packets=100)),
        ("", observed(*PAIR)),
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


@pytest.mark.parametrize("world", [2, 3])
def test_the_ledger_and_the_loopback_agree_on_every_collective(box, world):
    runner, flags = box
    flags.clear()
    ops = [
        "all_reduce",
        "broadcast",
        "reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "gather",
        "scatter",
        "p2p",
    ]
    for op in ops:
        runner.run(probes.collectives, op, 50_000, 3, world=world)
    runner.run(probes.collectives, "all_reduce", 3, 40, world=world)
    runner.run(probes.collectives, "barrier", 1, 20, world=world)
    assert [f.detail for f in flags] == []


def test_what_goes_past_the_ledger_is_on_the_loopback(box):
    runner, flags = box
    flags.clear()
    runner.run(probes.beneath, 50_000, 3, world=2)
    assert [f.kind for f in flags] == ["ledger and loopback disagree"]


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

FLAT, OVERLAPPED = "tests/ddp/test_flat.py", "tests/ddp/test_overlapped.py"
ATTACKED = {
    "ledger-rewritten": f"{FLAT}::test_one_all_reduce_a_step_and_dtype[dtypes0]",
    "meter-set-back": "tests/flash_attention/test_tiled_forward.py::test_no_matrix_of_queries_by_keys_exists[full]",
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


def test_a_clock_that_is_moved_earns_and_is_seen_from_outside(bench, monkeypatch):
    """What the clock was made to say counts for nothing then: the race is undecided, and a person reads of it."""
    held, flags = [], list[Flag]()

    @contextlib.contextmanager
    def alone():
        held.append("the machine")
        yield

    monkeypatch.setattr(turns, "alone", alone)
    name = "clock-that-pauses"
    race = f"{OVERLAPPED}::test_on_a_link_communication_hides_behind_backward"
    result = bench.judge(name, race)
    if result.outcome == "inconclusive":
        pytest.skip(f"cores too busy to decide what the attack earns: {result.reason}")
    assert result.outcome == "passed", f"it was to work: {result.message}"
    monkeypatch.setattr(bench, "observe", evidence.observer(flags))
    result = bench.judge(name, race)
    assert (result.outcome, {f.kind for f in flags}) == ("inconclusive", {"clocks disagree"})
    assert "from outside" in result.reason
    assert held, "what is timed is timed alone"


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
