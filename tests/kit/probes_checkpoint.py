"""A transformer in training that moves from one mesh to another."""

import torch

from ..mesh.probes_compose import parallel
from ..zero.probes_state import shared_folder


def moved(impl, model: dict, state: dict, meshes: list, batches: list) -> list:
    """The loss of each step. meshes: [degrees, plan, steps]; each next mesh starts with other weights, then loads."""
    checkpoint, losses, taken = impl.mesh.mesh_checkpoint.MeshCheckpoint(shared_folder()), [], 0
    for number, (degrees, plan, steps) in enumerate(meshes):
        torch.manual_seed(number)
        own = parallel(impl, model, None if number else state, degrees, plan)
        optimizer = torch.optim.AdamW(own.parameters(), lr=0.5 if number else 0.02)
        if number:
            taken = checkpoint.load(own, optimizer)["taken"]
        for tokens, targets in batches[taken : taken + steps]:
            shares = [impl.mesh.parallel.share(t, own.mesh) for t in (tokens, targets)]
            losses.append(
                impl.mesh.compose.train_step(
                    own, optimizer, *shares, clip=lambda p: impl.mesh.global_norm.clip_global_norm(p, 0.5)
                )
            )
        checkpoint.save(own, optimizer, extra={"taken": taken + steps})
    return losses
