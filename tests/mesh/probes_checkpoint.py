"""Trains on one mesh, saves, and continues on another. The test receives the files and passes them to the next call."""

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from lab.harness.raising import raised
from lab.measure.memory import meter
from lab.ranks import gates

from ..zero.probes_state import copy_on_change, flushed_files, record_flushes, shared_folder, snapshot
from .probes_placed import Share

BEFORE = 9.0  # value of parameters before load() fills them


def start(impl, layout: dict, name: str, options: dict, values: dict) -> tuple:
    """Make a model and its optimizer, with parameters in reverse order and options as a scheduler sets them."""
    share = Share(impl, layout, values)
    optimizer = getattr(torch.optim, name)([*share.shares][::-1])
    optimizer.param_groups[0].update({k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
    return share, optimizer


def steps(share: Share, optimizer: torch.optim.Optimizer, gradients: list) -> None:
    for full in gradients:
        for parameter, gradient in zip(share.shares, share.cut(full), strict=True):
            parameter.grad = gradient
        optimizer.step()


def session(impl, layout: dict, name: str, options: dict, values: dict, gradients: list, extra: dict) -> dict:
    """Load the checkpoint in the ranks' folder, if there is one; take one step per entry of `gradients`; save."""
    folder = shared_folder() / "made" / "by save"
    checkpoint = impl.mesh.mesh_checkpoint.MeshCheckpoint(folder)
    share, optimizer = start(impl, layout, name, options, values)
    result: dict = {"extra": None, "peak_bytes": 0}
    is_saved = folder.exists()
    gates.mark("load")
    if is_saved:
        with meter(share.shares) as memory:
            result["extra"] = checkpoint.load(share, optimizer)
        result |= {"peak_bytes": memory.peak_bytes, "loaded": copied_pieces(share, optimizer)}
    gates.mark("steps")
    errors: list = [None] * dist.get_world_size()  # on some rank the loaded state may not fit
    dist.all_gather_object(errors, raised(lambda: steps(share, optimizer, gradients), text=True))
    stopped = next((text for text in errors if text != "nothing"), "")
    gates.mark("save")
    with record_flushes() as flushed:
        if not stopped:
            checkpoint.save(share, optimizer, extra=extra)
    gates.mark("saved")
    if stopped:
        return {**result, "stopped": stopped}
    dist.barrier()
    result["flushed"] = flushed_files(flushed, shared_folder().parent)
    group = optimizer.param_groups[0]
    result["group"] = {key: list(v) if isinstance(v, tuple) else v for key, v in group.items() if key in options}
    result["tuples"] = sorted(key for key, v in group.items() if isinstance(v, tuple))
    result["parameters"] = [piece for piece in copied_pieces(share, optimizer) if not piece[3]]
    result["steps"] = sorted({float(s["step"]) for s in optimizer.state.values() if "step" in s})
    result["numbers"] = sum(p.numel() for p in share.shares)
    return result


def weighed(impl, layout: dict, shapes: dict) -> list:
    """Load a checkpoint of AdamW; return [name, tensor rank, start, key, count, sum] per piece."""
    values = {name: torch.full((), BEFORE).expand(*shape) for name, shape in shapes.items()}  # takes no memory
    share, optimizer = start(impl, layout, "AdamW", {"lr": 0.1}, values)
    impl.mesh.mesh_checkpoint.MeshCheckpoint(shared_folder() / "made" / "by save").load(share, optimizer)
    return [[*piece, len(numbers), float(numbers.double().sum())] for *piece, numbers in pieces(share, optimizer)]


def copied_pieces(share: Share, optimizer: torch.optim.Optimizer) -> list:
    """Return [name, tensor rank, start, key of its state ("": the parameter), numbers] per piece on this rank."""
    return [[*piece, numbers.clone()] for *piece, numbers in pieces(share, optimizer)]


def pieces(share: Share, optimizer: torch.optim.Optimizer) -> Iterator[list]:
    """Yield the same as `copied_pieces`, without copying the numbers."""
    for parameter, placement in share.placements().items():
        state = {k: s for k, s in optimizer.state.get(parameter, {}).items() if k != "step" and s is not None}
        for key, value in {"": parameter.detach(), **state}.items():
            for p in placement.pieces:
                fits = value.shape == parameter.shape
                numbers = value.flatten()[p.offset : p.offset + p.count] if fits else value.flatten()
                yield [p.name, share.coord["tensor"], p.start, key, numbers]


def killed(impl, layout: dict, values: dict, gradients: list, late: int) -> list:
    """Load what a kill at each event of the second save would leave; return [rank, event, "old", "new" or else]."""
    folder, options = shared_folder(), {"lr": 0.1}
    checkpoint = impl.mesh.mesh_checkpoint.MeshCheckpoint(folder)
    share, optimizer = start(impl, layout, "AdamW", options, values)
    states = {}
    for number, name in enumerate(("old", "new")):
        steps(share, optimizer, gradients[number : number + 1])
        dist.barrier()
        with copy_on_change(folder, late) as copies:
            checkpoint.save(share, optimizer, extra={"saved": name})
            copies.append(("return", snapshot(folder, len(copies))))
        states[name] = contents(share, optimizer, {"saved": name})
        dist.barrier()
    all_events: list = [None] * dist.get_world_size()
    dist.all_gather_object(all_events, [[event, copy and str(copy)] for event, copy in copies])
    all_events[0].append(["at the end", str(folder)])
    return [
        [rank, event, loaded_state(impl, layout, options, values, Path(copy), states)]
        for rank, events in enumerate(all_events) for event, copy in events if copy is not None
    ]  # fmt: skip


def contents(share: Share, optimizer: torch.optim.Optimizer, extra: object) -> list:
    """Return everything that a checkpoint must restore: [extra, parameters …, states of the optimizer …]."""
    moments = [t for p in share.shares for _, t in sorted(optimizer.state.get(p, {}).items())]
    return [extra, *(t.detach().clone() for t in (*share.shares, *moments))]


def loaded_state(impl, layout: dict, options: dict, values: dict, folder: Path, states: dict) -> str:
    """Load from a folder; return "old", "new", or a text about what was loaded instead."""
    share, optimizer = start(impl, layout, "AdamW", options, {n: torch.full_like(v, BEFORE) for n, v in values.items()})
    try:
        extra = impl.mesh.mesh_checkpoint.MeshCheckpoint(folder).load(share, optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    got = contents(share, optimizer, extra)
    return next((name for name, state in states.items() if same_bits(got, state)), "a mixture")


def same_bits(one: list, other: list) -> bool:
    """Whether two `contents` have the same bits."""
    alike = one[0] == other[0] and len(one) == len(other)
    return alike and all(torch.equal(a, b) for a, b in zip(one[1:], other[1:], strict=True))


def refused(impl, layouts: dict, values: dict) -> dict:
    """Return the errors of loading and saving, by name, and whether a failed load left the model unchanged.

    layouts, values: "saved", and one entry per layout that load must refuse. Invalid `extra` and groups are tried too.
    """
    folder, options = shared_folder(), {"lr": 0.1}
    checkpoint = impl.mesh.mesh_checkpoint.MeshCheckpoint(folder)
    share, optimizer = start(impl, layouts["saved"], "AdamW", options, values["saved"])
    errors = {"nothing saved": raised(lambda: checkpoint.load(share, optimizer))}
    dist.barrier()
    steps(share, optimizer, [values["saved"]])
    several = torch.optim.AdamW([{"params": [p]} for p in share.shares], **options)
    odd = torch.optim.AdamW([{"params": [*share.shares], "odd": object()}], **options)
    cases = {"extra": (optimizer, {"no JSON": object()}), "odd": (odd, None), "groups, save": (several, None)}
    for name, (target, extra) in cases.items():
        errors[name] = raised(lambda: checkpoint.save(share, target, extra=extra))  # noqa: B023
        dist.barrier()  # hangs if an error stopped only some ranks
    errors["refused saves, files"] = str([path.name for path in folder.rglob("*") if path.is_file()])
    dist.barrier()
    checkpoint.save(share, optimizer)
    errors["groups, load"] = raised(lambda: checkpoint.load(share, several))
    for name in [*layouts][1:]:
        other, fresh = start(impl, layouts[name], "AdamW", options, values[name])
        before = contents(other, fresh, None)
        errors[name] = raised(lambda: checkpoint.load(other, fresh))  # noqa: B023
        errors[f"{name}, left alone"] = str(same_bits(before, contents(other, fresh, None)))
    return errors
