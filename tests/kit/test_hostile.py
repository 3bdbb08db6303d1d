"""The corpus of attacks is well formed, and a successful attack is reported.

`make hostile` grades the whole corpus; `test_examples.py` grades four attacks in a class.
"""

from dataclasses import replace

import pytest

from grader import batch, hostile, hostility, mutants
from grader.errors import InputError
from grader.gradebook import Graded
from grader.hostility import Outcome
from grader.sandbox import available
from lab.course.assignment import ROOT, default
from lab.harness.runner import Executor, ProbeFailed
from lab.harness.test_index import marks
from lab.ranks import operators
from lab.solution.framing import FORGED
from tests.flash_attention import probes_speed

from . import probes
from .classroom import result

CORPUS = hostile.read()
TESTS = [*(ROOT / "tests").glob("*/test_*.py")]


def test_attack_corpus_covers_all_techniques_and_is_well_formed():
    assert len(CORPUS) >= 60
    used = {attack.technique for attack in CORPUS}
    assert used == set(hostile.techniques()), "a technique without an attack is a promise that is not kept"
    assert len(used) >= 25
    for attack in CORPUS:
        assert attack.why, attack.name
        tests = {mark.test for file in TESTS for mark in marks(file) if mark.id == attack.exercise}
        assert attack.loses == hostile.EVERYTHING or {*attack.loses} <= tests, attack.name
        assert set(attack.needs) <= set(hostility.NEEDS), attack.name
        assert attack.exercise or (attack.archive and attack.loses == hostile.EVERYTHING), (
            f"{attack.name}: earns where?"
        )


@pytest.mark.parametrize("attack", [a for a in CORPUS if a.edits], ids=lambda a: a.name)
def test_attack_edits_apply_to_current_reference(attack):
    assert mutants.texts(mutants.Edited(attack.name, attack.exercise, attack.why, "assertion", attack.edits))


def test_honest_submissions_must_earn_full_points_without_neighbour(tmp_path):
    if why := available()["bubblewrap"]:
        pytest.skip(f"no sandbox: {why}")
    good = next(a for a in hostile.honest() if a.exercise == hostility.NEIGHBOUR and a.edits)
    file = good.edits[0][0]
    bad = replace(good, name="bad", edits=(), files={file: "nothing = 0\n"})
    got = {o.attack.name: o for o in hostility.grade([good, bad], tmp_path, jobs=1)}
    assert not got[good.name].wrong, got[good.name].line
    assert got[good.name].earned == 1.0
    assert len(got["bad"].wrong) >= 1, got["bad"].line
    assert not any("neighbour" in o.line for o in got.values())
    assert hostility.summary([*got.values()]).startswith("2 honest submissions: 1 not as they must be")


def test_honest_submissions_cover_every_exercise_and_variant():
    honest = hostile.honest()
    names = [a.name for a in honest]
    assert len({*names}) == len(names)
    assert {a.exercise for a in honest if not a.edits} == {*default().exercises}
    assert sum(bool(a.edits) for a in honest) == sum(len(mutants.read("variant", s.name)) for s in default().stages)
    assert hostility.chosen((), [names[0]], honestly=True) == [honest[0]]
    with pytest.raises(InputError, match="--technique"):
        hostility.chosen(["pickle"], (), honestly=True)


def outcome(**fields) -> Outcome:
    """A correct Outcome, except for these fields."""
    attack = hostile.Attack("a", "pickle", "ddp.naive", "why", files={"ddp/naive.py": ""})
    return replace(Outcome(attack, flags=["forbidden call"], evidence="line 3"), **fields)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [({}, 0), ({"not_run": "no memory cgroup here", "earned": 1.0}, 0), ({"earned": 0.1}, 1), ({"evidence": ""}, 1),
     ({"neighbour": "earned 0 of 3"}, 1), ({"left": ["process 7 (sh)"]}, 1), ({"seconds": 1e4}, 1),
     ({"broken": "the attack could not be judged"}, 1)],
    ids=str,
)  # fmt: skip
def test_unexpected_attack_outcomes_are_reported(fields, wrong):
    assert len(outcome(**fields).wrong) == wrong


def test_open_mark_excuses_only_earned_points_and_must_be_current():
    known = replace(outcome().attack, open="nobody sees it")
    assert outcome(attack=known, earned=1.0).wrong == []
    assert "remove" in outcome(attack=known).wrong[0]
    assert outcome(attack=known, earned=1.0, neighbour="harmed").wrong, "open says nothing of its neighbour"


def test_a_neighbour_that_loses_points_or_is_flagged_is_harmed():
    id = default().exercise(hostility.NEIGHBOUR).id
    good = [result(id, kind=kind) for kind in ("numerics", "property")]
    bad = [*good, result(id, "failed", test="other", reason="crashed", message="gone")]
    flag = batch.Flag("forbidden call", "x")
    for results, flags, word in ((good, [], ""), (bad, [], "earned"), ([], [], "earned"), (good, [flag], flag.kind)):
        neighbour = Graded("x", results=results, flags=flags)
        got = hostility._outcome(replace(outcome().attack, exercise=id), Graded("x", results=good), [], neighbour, [])
        assert word in got.neighbour
        assert bool(got.neighbour) == bool(word)


def test_flags_are_raised_for_suspicious_failures_only():
    """`grader mutants` checks that variants and the reference pass all tests."""
    assert not [*batch._flags([result(), result(outcome="not_run", reason="no GPU")])]
    for reason, message in (("forbidden", "x"), ("crashed", "x"), ("refused", FORGED)):
        assert len([*batch._flags([result(outcome="failed", reason=reason, message=message)])]) == 1
    assert not [*batch._flags([result(outcome="failed")])], "wrong is not dishonest"
    lucky = result(outcome="failed", public="passed")
    assert len([*batch._flags([lucky])]) == 1
    assert not [*batch._flags([lucky, result(), result()])], "right by luck on the public seed is not dishonest"


HONEST = """
import collections, dataclasses, enum, functools, inspect, io, logging, tempfile, traceback, typing, warnings
import numpy, torch

Point = collections.namedtuple("Point", "x y")


class Named(typing.NamedTuple):
    x: int


@dataclasses.dataclass(frozen=True)
class Data:
    x: int


class Colour(enum.Enum):
    RED = 1


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def step():
    try:
        raise ValueError("mine")
    except ValueError:
        traceback.print_exc(file=io.StringIO())
        logging.getLogger("mine").warning("caught")
    warnings.warn("careful")
    inspect.signature(step)
    traceback.format_stack()
    typing.Literal["a", "b"]
    numpy.r_[1, 2]
    torch.library.custom_op("mine::double", mutates_args=())(double)
    with torch.profiler.profile(with_stack=True):
        torch.jit.script(double)(torch.ones(2))
    io.open("/dev/null").close()
    with tempfile.TemporaryFile() as file:
        file.write(b"kept")
    return Point(1, 2).x + Named(3).x + Data(4).x + Colour.RED.value + functools.reduce(int.__add__, [1, 2])
"""


def test_common_library_calls_in_a_solution_are_allowed(solution):
    assert solution(HONEST).run(probes.call) == 12


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
OPERATORS = {
    "overload": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, q, q)",
    "taken apart": "torch.ops.aten._scaled_dot_product_attention_math.default.decompose(q, q, q)",
    "by the compiler": f"torch._C._jit_get_operation('{FLASH}')[0](q, q, q)",
    "at its key": "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default.redispatch("
    "torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), q, q, q)",
    "for the kit": "lab.dryrun.rank.fused_attention(q, q, q, True)",
    "a layer": "torch._native_multi_head_attention(*3 * [q[0]], 8, 2, *[torch.ones(24, 8), torch.ones(24)],"
    " *[torch.ones(8, 8), torch.ones(8)])",
}


def test_forbidden_operator_is_refused_on_every_call_path(solution):
    forbidden = default().exercise("flash_attention.tiled_forward").forbidden
    for how, call in OPERATORS.items():
        code = f"import torch, lab.dryrun.rank\ndef step():\n    q = torch.ones(1, 2, 4, 8)\n    {call}\n    return 1\n"
        with pytest.raises(ProbeFailed) as refused:
            solution(code).run(probes.call, forbidden=forbidden)
        assert refused.value.reason == "forbidden", f"{how}: {refused.value.text}"
        assert solution(code).run(probes.call) == 1, f"{how}: where nothing is forbidden it runs"


ROUNDABOUT = {
    "getattr": "getattr(torch.nn.functional, 'scaled_dot' + '_product_attention')(q, q, q)",
    "a container": "[f for n, f in vars(torch.nn.functional).items() if n.startswith('scaled_dot')][0](q, q, q)",
    "partial": "functools.partial(torch.nn.functional.scaled_dot_product_attention, q, q)(q)",
    "methodcaller": "operator.methodcaller('scaled_dot_product_attention', q, q, q)(torch.nn.functional)",
    "exec": "exec('import torch.nn.functional as F; F.scaled_dot_product_attention(q, q, q)')",
    "the same function": "torch._C._nn.scaled_dot_product_attention(q, q, q)",
    "torch calls it": "torch.nn.TransformerEncoderLayer(8, 2)(q[0])",
    "torch is handed it": "torch.utils._pytree.tree_map(torch.save, q)",
    "a class": "getattr(torch.nn, 'MultiheadAttention')(8, 2)",
    "a subclass": "type('Mine', (torch.nn.MultiheadAttention,), {})(8, 2)",
    "where it is defined": "sys.modules['torch.distributed.distributed_c10d'].all_reduce(q)",
    "a module that is loaded": "getattr(torch.nn, 'utils').parameters_to_vector([q])",
    "a module that is not": "importlib.import_module('torch.distributed.' + 'pipelining')",
    "a builtin of a module": "importlib.import_module('pickle').dumps(1)",
}


@pytest.mark.parametrize("how", ROUNDABOUT)
def test_a_forbidden_call_is_refused_however_it_is_written(solution, how):
    forbidden = [*default().exercise("flash_attention.tiled_forward").forbidden, "torch.distributed.all_reduce",
             "torch.nn.utils", "torch.distributed.pipelining", "torch.save", "pickle"]  # fmt: skip
    code = "import functools, importlib, operator, sys, torch, torch.distributed\n"
    code += f"def step():\n    q = torch.ones(1, 2, 4, 8)\n    {ROUNDABOUT[how]}\n    return 1\n"
    with pytest.raises(ProbeFailed) as refused:
        solution(code).run(probes.call, forbidden=forbidden)
    assert refused.value.reason == "forbidden", refused.value.text


def test_a_forbidden_object_must_not_be_held_even_if_it_is_never_called(solution):
    code = "import torch\nheld = getattr(torch.nn, 'Multihead' + 'Attention')\ndef step():\n    return 1\n"
    with pytest.raises(ProbeFailed, match="held is the forbidden torch") as refused:
        solution(code).run(probes.call, forbidden=["torch.nn.MultiheadAttention"])
    assert refused.value.reason == "forbidden"


def test_forbidden_names_match_only_intended_operators():
    """`torch.distributed._tensor` is a package. As an operator it once forbade scalar_tensor, which `where` needs."""
    matches = {e: operators.matching(e.forbidden) for e in default().exercises.values()}
    assert {e.stage for e, found in matches.items() if found} == {"mixed_precision", "flash_attention"}
    assert "aten::_fused_rms_norm" in matches[default().exercise("mixed_precision.rms_norm")]


def test_speed_probe_may_call_forbidden_functions_itself(runner):
    """The probe's own calls do not count as calls of the solution."""
    runner.executor = Executor(ROOT / "reference")
    runner.forget()
    forbidden = default().exercise("flash_attention.speed").forbidden
    *_, worst = runner.run(probes_speed.raced, "backward", True, 1, 3, (1, 1, 32, 16), "cpu", 1, forbidden=forbidden)
    assert worst < 4


def test_runner_refuses_probes_after_total_time_limit(solution):
    runner = solution("def step():\n    return 1\n")
    assert runner.run(probes.call) == 1
    runner.limit_s = runner.spent_s / 2
    with pytest.raises(ProbeFailed, match="all probes so far"):
        runner.run(probes.call)
