"""Stand-ins, for `lab train`, of exercises that no other needs: torch's own, or plain. Named <stage>_<exercise>."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def ddp_bucketed(module: ModuleType) -> type[nn.Module]:
    """torch's DistributedDataParallel. Its gradients are synchronized when backward returns."""

    class Replica(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module, bucket_bytes: int = 25 << 20, group: Any = None):
            super().__init__(module, process_group=group, bucket_cap_mb=bucket_bytes / 2**20)

        def finish_gradient_synchronization(self) -> None:
            pass

    return Replica


def ddp_clip_and_count(module: ModuleType) -> Any:
    """Returns torch's own function."""
    return lambda parameters, max_norm: nn.utils.clip_grad_norm_(list(parameters), max_norm)


def zero_state_dict(module: ModuleType) -> type:
    """Each rank saves its own state; only the same number of ranks, on the same mesh, can load it."""
    return _ByRank


mesh_mesh_checkpoint = zero_state_dict


def mesh_global_norm(module: ModuleType) -> Any:
    """Gathers all gradients on every rank: correct, but sends far more than one number per rank."""

    def clip_global_norm(parallel: Any, max_norm: float) -> torch.Tensor:
        coordinate, copies = parallel.mesh.coordinate(), parallel.placements()
        grads = [p.grad.flatten() for p, spec in copies.items() if not any(coordinate[a] for a in spec.copies)]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, torch.cat([torch.zeros(1), *(g.detach().cpu() for g in grads)]))
        norm = torch.linalg.vector_norm(torch.cat(gathered))
        for p in copies:
            p.grad.mul_(min(1.0, max_norm / max(norm.item(), 1e-12)))
        return norm

    return clip_global_norm


class _ByRank:
    """A checkpoint with one file per rank, rewritten at each save. Rank 0 writes the index once all files exist."""

    def __init__(self, folder: Any, group: Any = None):
        self.folder = Path(folder)

    def save(self, module: nn.Module, optimizer: torch.optim.Optimizer, *, extra: Any = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {i: optimizer.state[p] for i, p in enumerate(_parameters(optimizer)) if p in optimizer.state}
        torch.save({"module": module.state_dict(), "state": state}, self._file)
        dist.barrier()
        if dist.get_rank() == 0:
            (self.folder / "index.json").write_text(json.dumps({"ranks": dist.get_world_size(), "extra": extra}))
        dist.barrier()

    def load(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        index = json.loads((self.folder / "index.json").read_text())
        if index.get("ranks") != dist.get_world_size():
            raise ValueError(
                f"expected a checkpoint of {dist.get_world_size()} ranks by a stand-in, which cannot be resharded, "
                f"got one of {index.get('ranks', 'another kind')}"
            )
        saved, parameters = torch.load(self._file, weights_only=True), _parameters(optimizer)
        module.load_state_dict(saved["module"])
        for i, state in saved["state"].items():
            optimizer.state[parameters[i]] = state
        return index["extra"]

    @property
    def _file(self) -> Path:
        return self.folder / f"rank-{dist.get_rank()}.pt"


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
