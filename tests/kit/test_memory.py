"""The memory meter on cases that can be counted by hand, and its timeline."""

import numpy
import torch

from lab.measure.memory import meter

KIB = 1024


def kib(n: float) -> torch.Tensor:
    return torch.zeros(int(n * KIB / 4))


def test_live_and_peak_bytes():
    with meter() as memory:
        a = kib(4)
        b = kib(2)
        a.view(2, -1)[1:].add_(1).mul_(2)  # views and in-place operators allocate nothing
        assert memory.live_bytes == 6 * KIB
        del a
        c = kib(1)
    assert memory.live_bytes == 3 * KIB
    assert memory.peak_bytes == 6 * KIB
    assert memory.largest_elements == KIB
    del b, c


def test_meter_charges_foreign_memory_but_not_inputs():
    x = kib(8)
    array = numpy.zeros(KIB, dtype=numpy.float32)
    with meter(inputs=(x,)) as memory:
        x.add_(1)
        assert memory.live_bytes == 0
        y = torch.from_numpy(array)
        y.add_(1)
    assert memory.peak_bytes == 4 * KIB


def test_meter_charges_tensors_made_after_inputs_are_freed():
    inputs = [kib(4) for _ in range(20)]
    with meter(inputs) as memory:
        inputs.clear()
        kept = [kib(4) for _ in range(20)]
    assert memory.live_bytes == 80 * KIB
    del kept


def test_saved_tensor_counts_its_whole_storage_once():
    x = torch.zeros(KIB, requires_grad=True)
    with meter(inputs=(x,)) as memory:
        y = x.exp()  # autograd saves the result
        z = (y[:10] * y[10:20]).sum()  # autograd saves two views of it
    assert memory.saved_bytes == 4 * KIB
    del y, z


def test_meter_releases_memory_that_backward_frees():
    x = torch.zeros(KIB, requires_grad=True)
    with meter(inputs=(x,)) as memory:
        for _ in range(3):
            loss = x.exp().exp().sum()
            loss.backward()
            x.grad = None
            del loss
        assert memory.live_bytes == 0
    assert memory.peak_bytes < 5 * 4 * KIB
    assert memory.saved_bytes == 3 * 2 * 4 * KIB


def test_the_timelines_highest_point_is_the_peak():
    x = torch.randn(64, 64, requires_grad=True)
    with meter(inputs=(x,)) as memory:
        loss = (x @ x).tanh().exp().sum()
        memory.phase = "backward"
        loss.backward()
    lines = memory.timeline()
    assert set(lines) == {"forward", "backward"}
    assert max(map(sum, zip(*lines.values(), strict=True))) == memory.peak_bytes
    assert sum(line[-1] for line in lines.values()) == memory.live_bytes
    assert min(min(line) for line in lines.values()) >= 0
