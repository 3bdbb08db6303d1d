"""Execute a pipeline schedule: run chunks of a model on several ranks, with messages between them."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lab.cluster.schedule import Action


def execute(
    actions: Sequence[Action],
    chunks: Sequence[nn.Module],
    inputs: Sequence[Any],
    targets: Sequence[Any],
    loss_fn: Callable[[Tensor, Any], Tensor],
    message_spec: Tensor,
    group: dist.ProcessGroup | None = None,
    tied: nn.Parameter | None = None,
) -> Tensor | None:
    """Do this rank's actions of any schedule, and return the mean loss on the last rank of `group`, None on the others.

    chunks: of this rank; chunk c of rank r is virtual stage c · W + r of W ranks. The first virtual stage gets
    inputs[i] for micro-batch i, each other stage the output of the stage before. All these outputs have the shape,
    dtype and device of `message_spec`. On the last stage, loss_fn(output, targets[i]) is a scalar. inputs are read only
    on the group's rank 0, targets only on its last rank; elsewhere both may be empty. Gradients are those of the mean
    loss over micro-batches, and are added to .grad. tied: on the group's first and last rank, the parameter of which
    both have a copy (embedding and head). Afterwards both copies have the sum of both gradients, with the same bits.
    Before, its .grad is None or zero.

    Use only sends and receives between neighbours, in the order of the actions. Send the result of an action, with any
    strides, before the next action begins, and do not wait for that send. Drop a message once it has been received. On
    Gloo a send looks incomplete until somebody waits for it, so let a thread wait. At the end the first and the last
    rank send each other the tied gradient, directly and once. Drop input, output and graph of a micro-batch when
    backward no longer needs them. Chunks may have collectives of their own.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2; for the
    tied weight Shoeybi et al. 2019, "Megatron-LM".
    """
    micro_batches = len({action.micro_batch for action in actions})
    messages = _Messages(len(chunks), micro_batches, message_spec, group)
    loss: Tensor | None = None
    alive: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # (micro-batch, chunk) -> input, output
    arrived = messages.exchange(None, None, actions[0])
    for action, next_action in zip(actions, [*actions[1:], None], strict=True):
        key = action.micro_batch, action.chunk
        if action.kind == "forward":
            x = None if arrived is None else arrived.requires_grad_()
            output = chunks[action.chunk](inputs[action.micro_batch] if x is None else x)
            if messages.stage(action) == messages.last:
                output = loss_fn(output, targets[action.micro_batch]) / micro_batches
                loss = output.detach() if loss is None else loss + output.detach()
            alive[key] = x, output
            result: Tensor | None = output.detach()
        else:
            x, output = alive.pop(key)
            torch.autograd.backward(output, arrived)  # of the loss there is no gradient to come
            result = None if x is None else x.grad
        arrived = messages.exchange(action, result, next_action)
    messages.finish()
    if tied is not None:
        _sum_tied(tied, group)
    return loss


class _Messages:
    """Messages between the virtual stages of this rank and their neighbours."""

    def __init__(self, chunks: int, micro_batches: int, message_spec: Tensor, group: dist.ProcessGroup | None):
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.last = self.world * chunks - 1
        self.micro_batches, self.message_spec, self.group = micro_batches, message_spec, group
        self.sent: list[tuple[dist.Work, Tensor, Callable[[], Any]]] = []  # and what waits for it
        self.kept: dict[int, Tensor] = {}  # by tag: from this rank to itself

    def stage(self, action: Action) -> int:
        """The virtual stage of an action of this rank."""
        return action.chunk * self.world + self.rank

    def exchange(self, done: Action | None, result: Tensor | None, next_action: Action | None) -> Tensor | None:
        """Send the result of `done`, if a stage needs it, and return the input of `next_action`, if it needs one.

        Both are started together: of two neighbours that send to each other first, neither would ever receive.
        """
        ops, arriving = [], None
        if done is not None and result is not None and 0 <= (to := self.stage(done) + _step(done)) <= self.last:
            result, tag = result.contiguous(), self._tag(done, to)
            if to % self.world == self.rank:
                self.kept[tag] = result
            else:
                self._check(done, result)
                ops.append(dist.P2POp(dist.isend, result, group=self.group, tag=tag, group_peer=to % self.world))
        if next_action is not None and 0 <= (source := self.stage(next_action) - _step(next_action)) <= self.last:
            tag = self._tag(next_action, self.stage(next_action))
            if source % self.world == self.rank:
                return self.kept.pop(tag)
            arriving = torch.empty_like(self.message_spec)
            ops.append(dist.P2POp(dist.irecv, arriving, group=self.group, tag=tag, group_peer=source % self.world))
        works = dist.batch_isend_irecv(ops) if ops else []
        self.sent = [sent for sent in self.sent if not sent[0].is_completed()]
        if ops and ops[0].op is dist.isend:
            self.sent.append((works[0], ops[0].tensor, self._waiting(works[0])))
        if arriving is not None:
            works[-1].wait()
        return arriving

    def _waiting(self, send: dist.Work) -> Callable[[], Any]:
        """Return a function that waits for this send. On Gloo only wait() completes a send, so a thread calls it."""
        if dist.get_backend(self.group) != "gloo":
            return send.wait
        thread = threading.Thread(target=send.wait, daemon=True)
        thread.start()
        return thread.join

    def finish(self) -> None:
        """Wait until all messages have been received."""
        for *_, wait in self.sent:
            wait()

    def _tag(self, action: Action, to: int) -> int:
        """A unique tag per message, so that messages can be received in any order."""
        return ((action.kind == "backward") * self.micro_batches + action.micro_batch) * (self.last + 1) + to

    def _check(self, done: Action, result: Tensor) -> None:
        spec = self.message_spec
        if (result.shape, result.dtype) != (spec.shape, spec.dtype):
            raise ValueError(
                f"{done}: expected a message of shape {tuple(spec.shape)}, {spec.dtype}, as `message_spec`, "
                f"got {tuple(result.shape)}, {result.dtype}"
            )


def _step(action: Action) -> int:
    """Offset from a virtual stage to the stage that needs its result."""
    return 1 if action.kind == "forward" else -1


def _sum_tied(tied: nn.Parameter, group: dist.ProcessGroup | None) -> None:
    """Give the first and the last rank the sum of both gradients; on one rank autograd has summed already."""
    last = dist.get_world_size(group) - 1
    if not last:
        return
    assert tied.grad is not None
    other, received = last - dist.get_rank(group), torch.empty_like(tied.grad)
    ops = [
        dist.P2POp(dist.isend, tied.grad, group=group, group_peer=other),
        dist.P2POp(dist.irecv, received, group=group, group_peer=other),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    tied.grad += received  # a + b here and b + a there: the same bits
