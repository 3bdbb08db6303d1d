"""Trains a transformer on a mesh; returns the losses and gradients of each rank."""

import functools
import gc
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from lab.harness.raising import raised
from lab.measure.memory import LiveStorages, meter
from lab.measure.process import weigh
from lab.model.transformer import Config, Transformer
from lab.ranks import gates

LR = 0.1


def build_model(model: dict, to_moe: Callable, state: dict | None = None) -> Transformer:
    """Build the model that `model` describes: sizes, and maybe experts, k, tied. to_moe: as in mesh/parallel.py."""
    transformer = Transformer(Config(**model["sizes"]))
    if model.get("experts"):
        to_moe(transformer, model["experts"], model["k"], model.get("factor"))
    if state is not None:
        transformer.load_state_dict(state)
    if model.get("tied"):
        transformer.head.weight = transformer.embedding.weight
    return transformer


def parallelized(impl, model: dict, state: dict | None, degrees: dict, plan: dict, mesh=None):
    mesh, transformer = mesh or impl.mesh.mesh.Mesh(**degrees), build_model(model, impl.mesh.parallel.to_moe, state)
    return impl.mesh.compose.parallelize(transformer, mesh, impl.mesh.parallel.Plan(**plan) if plan else None)


def pieces(parallel, values: list) -> list:
    """Return [name, shape of the tensor rank's part, start, numbers] per piece on this rank; numbers: None if there is
    no gradient. values: one tensor per parameter, in the order of `placements`."""
    found = []
    for placement, value in zip(parallel.placements().values(), values, strict=True):
        for p in placement.pieces:
            numbers = None if value is None else value.flatten()[p.offset : p.offset + p.count].clone()
            found.append([p.name, list(p.shape), p.start, numbers])
    return found


def trained(impl, model: dict, state: dict, degrees: dict, plan: dict, batches: list, watched: bool = False) -> dict:
    """Train one step per batch. batches: [tokens, targets] of the whole batch. With dropout, also returns the masks.

    Asks for a gate when each step begins, such as "step 0". watched: also when a chunk of this rank runs, such as
    "forward 1" or "backward 1".
    """
    compose, share = impl.mesh.compose, impl.mesh.parallel.share
    parallel, masks = parallelized(impl, model, state, degrees, plan), []
    for module in parallel.modules():
        if isinstance(module, torch.nn.Dropout) and plan.get("dropout"):
            module.register_forward_hook(lambda module, args, output: masks.append(output.detach() != 0))
    for number, chunk in enumerate(parallel.chunks if watched else ()):
        chunk.register_forward_hook(functools.partial(watch, number))
    optimizer = torch.optim.SGD(parallel.parameters(), lr=LR)
    losses, gradients = [], []
    stage, last = parallel.mesh.coordinate()["pipe"], parallel.mesh.size("pipe") - 1
    for step, batch in enumerate(batches):
        tokens, targets = (share(t, parallel.mesh) for t in batch)
        tokens = tokens if stage == 0 else torch.full_like(tokens, -1)  # must not be read here
        targets = targets if stage == last else torch.full_like(targets, -1)
        gates.mark(f"step {step}")
        losses.append(float(compose.train_step(parallel, optimizer, tokens, targets)))
        if step == 0:
            gradients = pieces(parallel, [p.grad for p in parallel.placements()])
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": pieces(parallel, [p.detach() for p in parallel.placements()]),
        "masks": masks,
        "planned": [f"{action.kind} {action.chunk}" for action in parallel.actions()] if watched else [],
    }


def watch(number: int, module, args, output) -> None:
    """Mark forward and backward of a chunk: a forward hook."""
    gates.mark(f"forward {number}")
    output.register_hook(lambda _: gates.mark(f"backward {number}"))


def clipped(impl, model: dict, state: dict, degrees: dict, plan: dict, batch: list) -> dict:
    """Take a step whose `clip` sets all gradients to zero. Return the largest change of a parameter, for each call of
    clip whether it got the model and all gradients, and these gradients."""
    parallel, share = parallelized(impl, model, state, degrees, plan), impl.mesh.parallel.share
    before, calls, seen = [p.detach().clone() for p in parallel.parameters()], [], []

    def clip(passed) -> None:
        calls.append(passed is parallel and all(p.grad is not None for p in passed.parameters()))
        seen.extend(pieces(passed, [p.grad for p in passed.placements()]))
        for p in passed.parameters():
            p.grad.zero_()

    tokens, targets = (share(t, parallel.mesh) for t in batch)
    impl.mesh.compose.train_step(parallel, torch.optim.SGD(parallel.parameters(), lr=1.0), tokens, targets, clip=clip)
    changes = [float((p.detach() - old).abs().max()) for p, old in zip(parallel.parameters(), before, strict=True)]
    return {"change": max(changes), "calls": calls, "gradients": seen}


def each_plan(impl, model: dict, degrees: dict, plans: list) -> Iterator:
    """Yield the parallelized model per plan, all on one mesh."""
    mesh = impl.mesh.mesh.Mesh(**degrees)
    return (parallelized(impl, model, None, degrees, plan, mesh) for plan in plans)


def placed(impl, model: dict, degrees: dict, plans: list) -> list:
    """Return per plan the config, and [name, dim cut along tensor, start, count, axes of copies] per piece."""
    return [
        {"config": vars(parallel.config), "pieces": [
            [p.name, p.dim, p.start, p.count, list(placement.copies)]
            for placement in parallel.placements().values() for p in placement.pieces
        ]} for parallel in each_plan(impl, model, degrees, plans)
    ]  # fmt: skip


def held_bytes(impl, model: dict, degrees: dict, plans: list) -> list:
    """Return per plan the bytes on this rank after parallelizing the model, including RoPE's tables."""
    sizes: list = []
    mesh = impl.mesh.mesh.Mesh(**degrees)  # one for all plans: each group has threads on every rank
    for plan in plans:
        with LiveStorages() as memory:
            parallel = parallelized(impl, model, None, degrees, plan, mesh)
            gc.collect()
            sizes.append(memory.now())
        del parallel
    return sizes


def weighed(impl, model: dict, degrees: dict, plan: dict, seed: int, ballast: int) -> list:
    """Parallelize a model, show its bytes in the memory peak, and return [name, start, count, sum] per piece."""
    mesh, transformer = impl.mesh.mesh.Mesh(**degrees), refilled(build_model(model, impl.mesh.parallel.to_moe), seed)
    parallel = impl.mesh.compose.parallelize(transformer, mesh, impl.mesh.parallel.Plan(**plan))
    weigh(ballast)
    return [
        [name, start, len(numbers), float(numbers.double().sum())]
        for name, _, start, numbers in pieces(parallel, [p.detach() for p in parallel.placements()])
    ]


def refilled(transformer: Transformer, seed: int) -> Transformer:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(transformer.named_parameters()):
            parameter.normal_(generator=generator)
    return transformer


def drawn(impl, model: dict, degrees: dict, plans: list) -> list:
    """Return per plan torch's random numbers after parallelizing a model, and after seeding with rank_seed."""
    numbers = []
    for parallel, plan in zip(each_plan(impl, model, degrees, plans), plans, strict=True):
        first = torch.rand(4).tolist()
        torch.manual_seed(impl.mesh.compose.rank_seed(parallel.mesh, plan["seed"], sequence=plan["sequence"]))
        numbers.append([first, torch.rand(4).tolist()])
    return numbers


def refused(impl, cases: list) -> list:
    """Return errors as text. cases: degrees, then [model, plan] each, plus a number of sequences to test train_step."""
    errors = []
    mesh = impl.mesh.mesh.Mesh(**cases[0])
    for model, plan, *sequences in cases[1:]:

        def attempt(model=model, plan=plan, sequences=sequences) -> None:
            parallel = parallelized(impl, model, None, cases[0], plan, mesh)
            for n in sequences:
                tokens = torch.zeros(n, model["sizes"]["context"], dtype=torch.long)
                impl.mesh.compose.train_step(parallel, torch.optim.SGD(parallel.parameters(), lr=LR), tokens, tokens)

        errors.append(raised(attempt, text=True))
    dist.barrier()
    return errors


def attached(impl, x: torch.Tensor, w: torch.Tensor, c: torch.Tensor, dtype: str, times: int) -> dict:
    """Return y = attach(xᵀ, Σ w²), and gradients after `times` backwards of Σ c · y. dtype: of x; w keeps its own."""
    x, w = x.to(getattr(torch, dtype)).requires_grad_(), w.clone().requires_grad_()
    with meter([x, w]) as memory:
        loss = w.square().sum()
        before = memory.saved_bytes
        inner = x.mT  # strides differ from x's
        y = impl.mesh.attach.attach(inner, loss)
        saved = memory.saved_bytes - before
    seen: list = []
    loss.register_hook(lambda g: seen.append([str(g.dtype), list(g.shape), float(g)]))
    incoming: list = []
    inner.register_hook(incoming.append)
    sent = (c.to(y.dtype).mT * 1).mT  # a gradient with unusual strides
    for _ in range(times):
        y.backward(sent, retain_graph=True)
    return {
        "y": y.detach(), "dx": x.grad, "dw": w.grad, "saved_bytes": saved, "loss": seen,
        "copied": y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr(),
        "passed on": all(g.data_ptr() == sent.data_ptr() for g in incoming), "dtype": str(y.dtype),
    }  # fmt: skip


def attached_without_gradients(impl, x: torch.Tensor) -> list:
    """Return whether the result requires grad under no_grad, if no input requires grad, and if only the loss does; then
    the gradient of that loss's w, and whether the result was x each time."""
    attach, w = impl.mesh.attach.attach, torch.ones((), requires_grad=True)
    with torch.no_grad():
        no_grad = attach(x, w * 2)
    neither, loss_only = attach(x, torch.ones(())), attach(x, w * 2)
    loss_only.sum().backward()
    returned = [no_grad, neither, loss_only]
    return [*(y.requires_grad for y in returned), float(w.grad), all(torch.equal(y, x) for y in returned)]
