"""Each read of a tensor by the host is recorded; operators that stay on the device are not."""

import numpy
import pytest
import torch

from lab.measure.reads import reads

READS = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: 1 if x.any() else 0,
    "in": lambda x: 1.0 in x,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: numpy.asarray(x),
    "from_dlpack": lambda x: numpy.from_dlpack(x),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "equal": lambda x: torch.equal(x, x),
    "print": lambda x: f"{x} {x.sum():.3f}",
    "alpha": lambda x: torch.add(x, x, alpha=x.sum()),
    "tensor of tensors": lambda x: torch.tensor([x[0], x[1]]),
}
NO_READS = {
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "clamp": lambda x: (1 / torch.linalg.vector_norm(x)).clamp(max=1.0) * x,
    "index": lambda x: x[torch.tensor([1, 0])],
    "shape": lambda x: x.numel() + x.dim() + len(x),
    "to its own device": lambda x: x.to(x.device).to(torch.float64),
    "foreach": lambda x: torch._foreach_mul_([x.clone(), x.clone()], x.sum()),
    "iterate": lambda x: sum(row * row for row in x),
}


@pytest.mark.parametrize("how", [*READS, *NO_READS])
def test_host_reads_are_detected_and_device_operators_are_not(how):
    with reads() as found:
        (READS | NO_READS)[how](torch.ones(2))
    assert bool(found) == (how in READS)
