"""Ranges open and close in order for every recorder, also when an exception leaves the block.

Must hold: the nvtx package gets the ranges if it is installed; without it, torch.cuda.nvtx gets them if there is CUDA;
torch's profiler always gets them. Typical fakes: only one of these recorders (caught by a test of each); a pop that an
exception skips (caught by blocks that raise); names in attention that cover other work (caught by recording the range
in which every product and softmax runs).
"""

import pytest

from lab.harness.judge import close
from lab.harness.pytest_plugin import exercise
from lab.model.transformer import attention

from . import probes_ranges as probes

ANNOTATE = "benchmarking.annotate"
DEVICE = {"package": "real", "cuda": "simulated", "both": "simulated", "neither": "real"}
SETUPS = {
    "package": "the nvtx package installed", "cuda": "CUDA and no nvtx package (torch.cuda.nvtx)",
    "both": "CUDA and the nvtx package, which goes first", "neither": "neither",
}  # fmt: skip


def draw(rng, depth: int, break_rate: float = 0.4) -> list:
    """Nested ranges, each [name, [inner ranges], whether an exception leaves it]."""
    if depth == 0:
        return []
    names = [f"{rng.choice(['layer', 'step', 'naïve', '100% {of} it'])} {rng.integers(0, 99)}" for _ in range(2)]
    return [[name, draw(rng, depth - 1, break_rate), rng.uniform(0, 1) < break_rate] for name in names]


def expected(tree: list) -> list:
    events = []
    for name, children, _ in tree:
        events += [["push", name], *expected(children), ["pop", name]]
    return events


def broken_off(tree: list) -> int:
    return sum(bool(broken) + broken_off(children) for _, children, broken in tree)


@exercise(ANNOTATE, kind="numerics")
@pytest.mark.parametrize("backend", DEVICE)
def test_ranges_nest_and_close_after_exceptions(run, rng, backend):
    tree = draw(rng, 3)
    tree[0][2] = tree[1][1][0][2] = True
    got = run(probes.pushes_and_pops, tree, backend, device=DEVICE[backend])
    raised = broken_off(tree)
    assert got["caught"] == raised, f"{raised} exceptions were raised within ranges, {got['caught']} came out"
    want = expected(tree) if backend != "neither" else []
    pops, due = ([kind for kind, *_ in events].count("pop") for events in (got["events"], want))
    unclosed = f": exceptions left {due - pops} ranges open" * (pops < due) if got["events"] else ": nothing reaches it"
    pairs = enumerate(zip(got["events"], want, strict=False))
    first = next((i for i, (g, w) in pairs if g != w), min(len(got["events"]), len(want)))
    assert got["events"] == want, (
        f"with {SETUPS[backend]}: {len(got['events'])} pushes and pops, expected {len(want)}; they differ from number "
        f"{first} on: got {got['events'][first : first + 2]}, expected {want[first : first + 2]}{unclosed}"
    )


@exercise(ANNOTATE, kind="numerics")
@pytest.mark.parametrize("backend", ["package", "cuda"])
def test_a_decorated_function_may_call_itself(run, rng, backend):
    depth = rng.integers(2, 4)
    got = run(probes.decorated, "down", depth, backend, device=DEVICE[backend])
    assert got["value"] == depth, f"the decorated function returned {got['value']}, undecorated it is {depth}"
    want = [["push", "down"]] * (depth + 1) + [["pop", "down"]] * (depth + 1)
    assert got["events"] == want, f"{depth + 1} calls inside each other: {got['events']}"


@exercise(ANNOTATE, kind="numerics")
@pytest.mark.parametrize("backend", ["package", "cuda", "neither"])
def test_the_profiler_sees_the_same_ranges(run, rng, backend):
    tree = draw(rng, 2)
    tree[0][2] = True
    tree = [[f"{name} {i}", [[f"{n} {i} {j}", [], b] for j, (n, _, b) in enumerate(c)], b]
            for i, (name, c, b) in enumerate(tree)]  # fmt: skip
    want = [name for kind, name in expected(tree) if kind == "push"]
    got = run(probes.profiled, tree, want, backend, device=DEVICE[backend])
    assert [name for name, _, _ in got] == want, f"the profiler saw {[n for n, _, _ in got]}, the ranges were {want}"
    spans = {name: (start, end) for name, start, end in got}
    for name, children, _ in tree:
        for child, _, _ in children:
            (start, end), (first, last) = spans[name], spans[child]
            assert start <= first <= last <= end, f"{child} sticks out of {name}"


@exercise(ANNOTATE, kind="numerics")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_annotated_attention_is_attention(run, rng, is_causal):
    shape, (queries, keys) = (rng.integers(1, 2), rng.integers(2, 3)), rng.shuffled([rng.integers(9, 24), 30])
    q, k, v = (rng.normal(*shape, n, 8) for n in (queries, keys, keys))
    got = run(probes.attend, q, k, v, is_causal)
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    narrow = [t.clone().requires_grad_() for t in (q, k, v)]
    want, plain = attention(*wide, is_causal), attention(*narrow, is_causal)
    empty = got["o"].isnan().all(-1).nonzero()[:, -1]
    what = f"of {queries} queries and {keys} keys"
    assert not len(empty), f"o of query {int(empty[0])} {what} is NaN: it sees no key, not even its own"
    cause = "query i sees keys 0 to i, also where there are more of one than of the other" if is_causal else ""
    close(got["o"], want.detach(), plain.detach(), f"o {what}", dims="batch, head, query, dim", cause=cause)
    want.sum().backward()
    plain.sum().backward()
    for name, gradient, w, n in zip("qkv", got["gradients"], wide, narrow, strict=True):
        assert gradient is not None, f"no gradient reaches {name}"
        close(gradient, w.grad, n.grad, f"d{name}", dims="batch, head, position, dim")


@exercise(ANNOTATE, kind="property")
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_each_part_of_attention_is_in_its_range(run, rng, is_causal):
    n = rng.integers(9, 20)
    got = run(probes.attend, *(rng.normal(2, n, 8) for _ in range(3)), is_causal)
    names = [name for kind, name in got["events"] if kind == "push"]
    assert names == ["attention", "scores", "softmax", "values"], f"ranges, in order: {names}"
    products = [path for operator, path in got["places"] if operator in ("mm", "bmm")]
    assert products == ["attention > scores", "attention > values"], f"the two products ran in {products}"
    for operator, part in (
        ("scale", "scores"), ("masked_fill", "scores"), ("where", "scores"), ("_softmax", "softmax"),
    ):  # fmt: skip
        paths = {path for o, path in got["places"] if o == operator}
        assert paths <= {f"attention > {part}"}, f"{operator} ran in {sorted(paths)}, it belongs to {part!r}"
