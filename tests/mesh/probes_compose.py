"""Trains a transformer on a mesh; returns the losses and gradients of each rank."""

import functools
import gc
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from lab.harness.raising import raised
from lab.measure.memory import Held, meter
from lab.measure.process import weigh
from lab.model.transformer import Config, Transformer
from lab.ranks import gates

LR = 0.1


def whole(model: dict, to_moe: Callable, state: dict | None = None) -> Transformer:
    """The model that `model` describes: sizes, and maybe experts, k and tied. to_moe: as in mesh/parallel.py."""
    made = Transformer(Config(**model["sizes"]))
    if model.get("experts"):
        to_moe(made, model["experts"], model["k"], model.get("factor"))
    if state is not None:
        made.load_state_dict(state)
    if model.get("tied"):
        made.head.weight = made.embedding.weight
    return made


def parallel(impl, model: dict, state: dict | None, degrees: dict, plan: dict, mesh=None):
    mesh, made = mesh or impl.mesh.mesh.Mesh(**degrees), whole(model, impl.mesh.parallel.to_moe, state)
    return impl.mesh.compose.parallelize(made, mesh, impl.mesh.parallel.Plan(**plan) if plan else None)


def pieces(parallel, values: list) -> list:
    """[name, shape of the tensor rank's part, start, numbers] of everything that this rank has; None where there is no
    gradient. values: one tensor a parameter, in the order of `placements`."""
    found = []
    for placed, value in zip(parallel.placements().values(), values, strict=True):
        for p in placed.pieces:
            own = None if value is None else value.flatten()[p.offset : p.offset + p.count].clone()
            found.append([p.name, list(p.shape), p.start, own])
    return found


def trained(impl, model: dict, state: dict, degrees: dict, plan: dict, batches: list, watched: bool = False) -> dict:
    """Train a step per batch. batches: [tokens, targets] of the whole batch. With dropout, also returns the masks.

    Asks for a gate as each step begins, "step 0"; watched: also where a chunk of this rank goes "forward 1" or
    "backward 1".
    """
    compose, share = impl.mesh.compose, impl.mesh.parallel.share
    own, masks = parallel(impl, model, state, degrees, plan), []
    for module in own.modules():
        if isinstance(module, torch.nn.Dropout) and plan.get("dropout"):
            module.register_forward_hook(lambda module, args, output: masks.append(output.detach() != 0))
    for number, chunk in enumerate(own.chunks if watched else ()):
        chunk.register_forward_hook(functools.partial(watch, number))
    optimizer = torch.optim.SGD(own.parameters(), lr=LR)
    losses, gradients = [], []
    place, last = own.mesh.coordinate()["pipe"], own.mesh.size("pipe") - 1
    for step, batch in enumerate(batches):
        tokens, targets = (share(t, own.mesh) for t in batch)
        tokens = tokens if place == 0 else torch.full_like(tokens, -1)  # must not be read here
        targets = targets if place == last else torch.full_like(targets, -1)
        gates.mark(f"step {step}")
        losses.append(float(compose.train_step(own, optimizer, tokens, targets)))
        if step == 0:
            gradients = pieces(own, [p.grad for p in own.placements()])
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": pieces(own, [p.detach() for p in own.placements()]),
        "masks": masks,
        "planned": [f"{action.kind} {action.chunk}" for action in own.actions()] if watched else [],
    }


def watch(number: int, module, args, output) -> None:
    """A forward hook of the chunk with that number."""
    gates.mark(f"forward {number}")
    output.register_hook(lambda _: gates.mark(f"backward {number}"))


def clipped(impl, model: dict, state: dict, degrees: dict, plan: dict, batch: list) -> dict:
    """The largest change of a parameter by a step whose `clip` sets all gradients to zero, how often it ran, and the
    gradients that it was given."""
    own, share = parallel(impl, model, state, degrees, plan), impl.mesh.parallel.share
    before, calls, seen = [p.detach().clone() for p in own.parameters()], [], []

    def clip(given) -> None:
        calls.append(given is own and all(p.grad is not None for p in given.parameters()))
        seen.extend(pieces(given, [p.grad for p in given.placements()]))
        for p in given.parameters():
            p.grad.zero_()

    tokens, targets = (share(t, own.mesh) for t in batch)
    impl.mesh.compose.train_step(own, torch.optim.SGD(own.parameters(), lr=1.0), tokens, targets, clip=clip)
    changes = [float((p.detach() - old).abs().max()) for p, old in zip(own.parameters(), before, strict=True)]
    return {"change": max(changes), "calls": calls, "gradients": seen}


def each(impl, model: dict, degrees: dict, plans: list) -> Iterator:
    """The parallelized model for each plan, on one mesh."""
    mesh = impl.mesh.mesh.Mesh(**degrees)
    return (parallel(impl, model, None, degrees, plan, mesh) for plan in plans)


def placed(impl, model: dict, degrees: dict, plans: list) -> list:
    """The config, and [name, dim that tensor has cut, start, count, axes of copies] of all that this rank has, for each
    plan."""
    return [
        {"config": vars(own.config), "pieces": [
            [p.name, p.dim, p.start, p.count, list(at.copies)] for at in own.placements().values() for p in at.pieces
        ]} for own in each(impl, model, degrees, plans)
    ]  # fmt: skip


def held(impl, model: dict, degrees: dict, plans: list) -> list:
    """Bytes on this rank after parallelizing the model, for each plan, including RoPE's tables."""
    told: list = []
    mesh = impl.mesh.mesh.Mesh(**degrees)  # one for all: each of its groups has threads on every rank
    for plan in plans:
        with Held() as memory:
            own = parallel(impl, model, None, degrees, plan, mesh)
            gc.collect()
            told.append(memory.now())
        del own
    return told


def weighed(impl, model: dict, degrees: dict, plan: dict, seed: int, ballast: int) -> list:
    """[name, start, count, sum] of what a rank has of a parallelized model, when the process is at its largest."""
    mesh, made = impl.mesh.mesh.Mesh(**degrees), refilled(whole(model, impl.mesh.parallel.to_moe), seed)
    own = impl.mesh.compose.parallelize(made, mesh, impl.mesh.parallel.Plan(**plan))
    weigh(ballast)
    return [
        [name, start, len(numbers), float(numbers.double().sum())]
        for name, _, start, numbers in pieces(own, [p.detach() for p in own.placements()])
    ]


def refilled(made: Transformer, seed: int) -> Transformer:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(made.named_parameters()):
            parameter.normal_(generator=draw)
    return made


def drawn(impl, model: dict, degrees: dict, plans: list) -> list:
    """Random numbers of torch after parallelizing a model, and after rank_seed, for each plan."""
    told = []
    for own, plan in zip(each(impl, model, degrees, plans), plans, strict=True):
        first = torch.rand(4).tolist()
        torch.manual_seed(impl.mesh.compose.rank_seed(own.mesh, plan["seed"], sequence=plan["sequence"]))
        told.append([first, torch.rand(4).tolist()])
    return told


def refused(impl, cases: list) -> list:
    """Errors on this rank, as text. case: [model, plan] for parallelize, plus a number of sequences for train_step."""
    told = []
    mesh = impl.mesh.mesh.Mesh(**cases[0])
    for model, plan, *sequences in cases[1:]:

        def attempt(model=model, plan=plan, sequences=sequences) -> None:
            own = parallel(impl, model, None, cases[0], plan, mesh)
            for n in sequences:
                tokens = torch.zeros(n, model["sizes"]["context"], dtype=torch.long)
                impl.mesh.compose.train_step(own, torch.optim.SGD(own.parameters(), lr=LR), tokens, tokens)

        told.append(raised(attempt, text=True))
    dist.barrier()
    return told


def attached(impl, x: torch.Tensor, w: torch.Tensor, c: torch.Tensor, dtype: str, times: int) -> dict:
    """y = attach(x, Σ w²), and the gradients of Σ c · y, run `times` times. x: of this dtype, w of its own."""
    x, w = x.to(getattr(torch, dtype)).requires_grad_(), w.clone().requires_grad_()
    with meter([x, w]) as memory:
        loss = w.square().sum()
        before = memory.saved_bytes
        inner = x.mT  # strides differ from x's
        y = impl.mesh.attach.attach(inner, loss)
        saved = memory.saved_bytes - before
    seen: list = []
    loss.register_hook(lambda g: seen.append([str(g.dtype), list(g.shape), float(g)]))
    came: list = []
    inner.register_hook(came.append)
    sent = (c.to(y.dtype).mT * 1).mT  # a gradient with unusual strides
    for _ in range(times):
        y.backward(sent, retain_graph=True)
    return {
        "y": y.detach(), "dx": x.grad, "dw": w.grad, "saved_bytes": saved, "loss": seen,
        "copied": y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(),
        "passed on": all(g.data_ptr() == sent.data_ptr() for g in came), "dtype": str(y.dtype),
    }  # fmt: skip


def attached_without_gradients(impl, x: torch.Tensor) -> list:
    """Whether the result requires grad: under no_grad, if no input requires grad, and if only the loss does; the
    gradient of that loss's w; whether x came back each time."""
    attach, w = impl.mesh.attach.attach, torch.ones((), requires_grad=True)
    with torch.no_grad():
        off = attach(x, w * 2)
    nobody, alone = attach(x, torch.ones(())), attach(x, w * 2)
    alone.sum().backward()
    returned = [off, nobody, alone]
    return [*(y.requires_grad for y in returned), float(w.grad), all(torch.equal(y, x) for y in returned)]
