"""Draws models with gates, and checks that ranks train them like one process on the whole batch.

A drawn model is a tuple (width, plan, states). If plan is a list, it describes a chain of small layers. If plan is a
number, it is the depth of a `probes.Model`.
"""

from collections.abc import Iterator
from operator import call

import torch

from lab.harness import gated, judge
from lab.harness.judge import close
from lab.harness.named import number_of
from lab.ranks import gates

from . import probes_wrappers
from .payloads import check_own_gradients


def draw_chain(rng, world, dtypes=("float32",), layers=None, hidden=None, largest=0):
    """Draw a Chain: (width, plan, states). States differ between ranks. hidden: size in all layers; largest: in one."""
    width = rng.integers(2, 5)
    count = layers or rng.integers(4, 6)
    plan = [[hidden or rng.integers(1, 7), dtypes[i % len(dtypes)]] for i in range(count)]
    if largest:
        plan[rng.integers(0, count - 1)][0] = largest
    return width, plan, [gated.draw_state(rng, probes_wrappers.build(width, plan), 0.4) for _ in range(world)]


def draw_model(rng, world, steps=3):
    """Draw a Model, (width, depth, states), and its batches. States differ between ranks."""
    width, depth = rng.integers(3, 6), rng.integers(1, 3)
    states = [gated.draw_state(rng, probes_wrappers.build(width, depth), 0.5) for _ in range(world)]
    return (width, depth, states), draw_batches(rng, width, world, [[[0]]] * steps)


def draw_batches(rng, width, world, orders):
    """Return batches[rank][step][micro-batch] = [x, y, order]. orders[step][micro-batch]: layers to run, in order."""
    rows = rng.integers(2, 4)
    return [[[[rng.normal(rows, width), rng.normal(rows, width), o] for o in step] for step in orders]
            for _ in range(world)]  # fmt: skip


def whole_batch(width, plan, state, batches, lr, set_to_none, exact, numbers) -> dict:
    """Train in one process on the batches of all ranks. exact: everything in float64; else each parameter's own dtype.

    numbers: by which gates multiply. Result["own"][step][rank] has the gradients of that rank's batch alone.
    """
    m = probes_wrappers.build(width, plan)
    m.load_state_dict(state)
    if exact:
        m.double()
    probes_wrappers.start(m, set_to_none)
    optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=lr, momentum=0.9)
    gradients, outputs, local_gradients = [], [], []

    def loss(ranks: list, step: int, outs: list) -> torch.Tensor:
        """Return the loss of one step on the samples of these ranks: the mean over micro-batches."""
        micro_batches, total = len(ranks[0][step]), torch.zeros(())
        for i in range(micro_batches):
            x, y = (torch.cat([rank[step][i][j] for rank in ranks]) for j in (0, 1))
            if exact:
                x, y = x.double(), y.double()
            outs.append(m(x, ranks[0][step][i][2], prefix=f"{step}.{i}", **probes_wrappers.keywords(plan)))
            total = total + ((outs[-1] - y) ** 2).mean() / micro_batches
        return total

    with gates.answered(numbers):
        for step in range(len(batches[0])):
            probes_wrappers.clear(m, set_to_none, [layer for *_, order in batches[0][step] for layer in order])
            local_gradients.append([loss_gradients(m, loss([rank], step, [])) for rank in batches])
            loss(batches, step, outputs).backward()
            gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in m.named_parameters()})
            optimizer.step()
    outputs = [out.detach() for out in outputs]
    return {"gradients": gradients, "outputs": outputs, "own": local_gradients, "state": dict(m.state_dict())}


def loss_gradients(m: torch.nn.Module, loss: torch.Tensor) -> dict:
    """Return gradients by parameter name; None where the loss does not use the parameter. Leaves .grad unchanged."""
    trained = {n: p for n, p in m.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(loss, [*trained.values()], allow_unused=True), strict=True))


def train(run, rng, kind, model, batches, orders, set_to_none, options, expect, max_lr) -> tuple:
    """Train on all ranks; return (traces, result of the float64 oracle, result of a plain computation)."""
    width, plan, states = model
    lr = rng.uniform(0.05, max_lr)
    numbers = gated.draw(rng, orders, width)
    traces = run.trace(
        probes_wrappers.steps, kind, options or {}, width, plan, states, batches, lr, set_to_none, world=len(states),
        gates=numbers, hold=gated.backwards(orders),
    )  # fmt: skip
    for rank, trace in enumerate(traces):
        judge.modes(trace.values["modes"], f"rank {rank} of {len(states)}")
    args = width, plan, states[0], batches, lr, set_to_none
    return traces, *(expect(whole_batch, *args, exact, numbers) for exact in (True, False))


def rank_record(trace, orders, rank, want, plain) -> dict:
    """Return a rank's values, with "made", the messages before the first step, and "steps". Each step is a record of
    lab.harness.gated.steps, with "own": the gradients of this rank alone, exact and plain."""
    steps = [{**record, "own": [oracle["own"][step][rank] for oracle in (want, plain)]}
             for step, record in enumerate(gated.steps(trace, orders))]  # fmt: skip
    return {**trace.values, "made": trace.messages[: trace.gates[0].issued], "steps": steps}


def train_chain(run, rng, kind, chain, orders, set_to_none=True, options=None, expect=call) -> tuple:
    """Train a chain; return (`rank_record` of each rank, the oracle's result, the plain result).

    Asserts that gradients are right, because other properties of a run with wrong gradients mean nothing.
    """
    world = len(chain[2])
    batches = draw_batches(rng, chain[0], world, orders)
    traces, want, plain = train(run, rng, kind, chain, batches, orders, set_to_none, options, expect, 0.15)
    ranks, mode = [], ", in evaluation mode" if world % 2 else ""
    for rank, trace in enumerate(traces):
        ranks.append(rank_record(trace, orders, rank, want, plain))
        for step, got in enumerate(ranks[-1]["gradients"]):
            check_gradients(
                f"rank {rank} of {world}, step {step}{mode}", got, want["gradients"][step], plain["gradients"][step],
                orders[step],
            )  # fmt: skip
    return ranks, want, plain


def check_training(run, rng, expect, kind, chain, orders, set_to_none=True, options=None):
    """Assert that ranks train a chain like one process on the whole batch, with bitwise equal states on all ranks."""
    ranks, want, plain = train_chain(run, rng, kind, chain, orders, set_to_none, options, expect)
    check_final_states([got["state"] for got in ranks], want, plain, len(orders), 15)


def check_final_states(states, want, plain, steps, factor):
    """Assert that each rank's final state equals that of one process, and bit for bit that of rank 0."""
    for rank, state in enumerate(states):
        for name, tensor in want["state"].items():
            close(
                state[name], tensor.double(), plain["state"][name].float(),
                f"rank {rank} of {len(states)}, {name} after {steps} steps", factor=factor,
                cause="a tied weight is one parameter" if name == "layers.0.weight" else "",
            )  # fmt: skip
            assert torch.equal(state[name], states[0][name]), (
                f"{name} differs between rank 0 and {rank} after {steps} steps: equal gradients keep replicas equal to "
                "the last bit"
            )


def check_gradients(what, got, want, plain, order):
    """Assert that gradients equal those of one process: a mean, or None for a parameter without a gradient."""
    usual = usual_error(want, plain)
    for name, tensor in want.items():
        assert (got[name] is None) == (tensor is None), (
            f"{what}: .grad of {name} is {'None' if got[name] is None else 'not None'}, expected "
            f"{'None, as no rank has a gradient' if tensor is None else 'a mean'} (layers used: {order})"
        )
        if tensor is None:
            continue
        assert got[name].dtype == plain[name].dtype, (
            f"{what}: the gradient of {name} is {got[name].dtype}, expected {plain[name].dtype}"
        )
        layer = number_of(name)
        # If the last backward did not reach this layer, backwards under no_sync() alone accumulated its gradient.
        note = "" if layer in order[-1] or not any(layer in o for o in order) else " (no_sync() alone reached it)"
        # float(): in a chain of both dtypes, float32 layers also round the inputs of float64 layers.
        close(
            got[name], tensor, plain[name].float(), f"{what}, gradient of {name}{note}", factor=15, usual=usual,
            cause="expected the mean over ranks of all that backward accumulated",
        )  # fmt: skip


def usual_error(want, plain) -> float:
    """Return the 90th percentile of the relative errors of the plain computation's gradients."""
    pairs = [(plain[name].double(), g.double()) for name, g in want.items() if g is not None and g.any()]
    errors = [(p - g).abs().max() / g.abs().mean() for p, g in pairs]
    return float(torch.stack(errors).quantile(0.9)) if errors else 0.0


def check_model_training(run, rng, kind, model, batches, expect=call) -> list:
    """Assert that ranks train a Model like one process on the whole batch; return the `rank_record` of each rank.

    A Model has a tied weight, a frozen and an unused parameter, and buffers.
    """
    world, orders = len(batches), [[[0]]] * len(batches[0])
    traces, want, plain = train(run, rng, kind, model, batches, orders, True, None, expect, 0.2)
    for rank, trace in enumerate(traces):
        got = trace.values
        for step, out in enumerate(got["outputs"]):
            local = slice(rank * len(out), (rank + 1) * len(out))
            close(
                out, want["outputs"][step][local].double(), plain["outputs"][step][local],
                f"rank {rank} of {world}, output of step {step}", factor=10, dims="row, column",
                cause="forward returns what the module returns" if step == 0 else "gradients are means over ranks",
            )  # fmt: skip
        for step, gradients in enumerate(got["gradients"]):
            absent = sorted(name for name, g in gradients.items() if g is None)
            assert absent == ["frozen", "unused"], (
                f"rank {rank}, step {step}: .grad is None for {absent}, expected for frozen and unused"
            )
    check_final_states([trace.values["state"] for trace in traces], want, plain, len(orders), 10)
    return [rank_record(trace, orders, rank, want, plain) for rank, trace in enumerate(traces)]


def steps_of(run, rng, kind, chain, orders, options=None) -> list:
    """Train a chain for a few steps; assert right gradients that were sent; return the `rank_record` of each rank."""
    ranks, _, _ = train_chain(run, rng, kind, chain, orders, options=options)
    for rank, step, record in each_step(ranks):
        check_own_gradients(f"rank {rank} of {len(ranks)}, step {step}", record, len(ranks))
    return ranks


def each_step(ranks: list) -> Iterator[tuple[int, int, dict]]:
    """Yield (rank, step, record of the step) for each rank and step."""
    for rank, got in enumerate(ranks):
        for step, record in enumerate(got["steps"]):
            yield rank, step, record
