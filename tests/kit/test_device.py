"""The simulated GPU: virtual time is exact, torch gives the same numbers, and uninstall restores everything."""

import contextlib
import copy
import time
import timeit
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lab.measure import clock, device
from lab.measure.roofline import A100

from .test_reads import READS

MS = 1e-3
OVERHEAD = 20e-6  # seconds of clock reads, launches and driver calls


@contextlib.contextmanager
def elapses(seconds: float, tolerance: float = OVERHEAD):
    start = time.perf_counter()
    yield
    assert time.perf_counter() - start == pytest.approx(seconds, abs=tolerance)


# ---- time, streams and events ----


WAITS = {
    "wait_stream": lambda first, second: second.wait_stream(first),
    "wait_event": lambda first, second: second.wait_event(first.record_event()),
    "event.wait": lambda first, second: first.record_event().wait(second),
}


@pytest.mark.parametrize("how", WAITS)
def test_a_stream_waits_for_another(gpu, how):
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with elapses(30 * MS):
        gpu.launch(10 * MS, first)
        WAITS[how](first, second)
        gpu.launch(20 * MS, second)
        second.synchronize()


def test_events_measure_the_time_between_them(gpu):
    start, end = torch.cuda.Event(enable_timing=True), torch.Event("cuda", enable_timing=True)
    start.record()
    gpu.launch(7 * MS)
    end.record()
    later, untimed = torch.cuda.Event(enable_timing=True), torch.cuda.Event()
    for other, words in ((end, "not ready"), (untimed, "enable_timing"), (later, "recorded")):
        with pytest.raises(RuntimeError, match=words):
            start.elapsed_time(other)
    while not end.query():  # each poll takes time
        pass
    gpu.launch(5 * MS)
    later.record()
    later.synchronize()
    assert [start.elapsed_time(end), end.elapsed_time(later)] == pytest.approx([7, 5], abs=0.02)


# ---- clocks ----

CLOCKS = ["time", "perf_counter", "monotonic", "process_time", "thread_time"]


CLOCK_READS = {
    **{name: lambda name=name: getattr(time, name)() for name in CLOCKS},
    **{f"{name}_ns": lambda name=name: getattr(time, f"{name}_ns")() / 1e9 for name in CLOCKS},
    "clock_gettime": lambda: time.clock_gettime(time.CLOCK_MONOTONIC),
    "clock_gettime_ns": lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9,
    "default_timer": lambda: timeit.default_timer(),
}


@pytest.mark.parametrize("name", CLOCK_READS)
def test_clock_continues_real_time_with_virtual_time(name):
    real = CLOCK_READS[name]()
    with device.SimulatedGPU() as gpu:
        start = CLOCK_READS[name]()
        assert 0 <= start - real < 60
        gpu.launch(3.0)
        torch.cuda.synchronize()
        assert CLOCK_READS[name]() - start == pytest.approx(3, abs=OVERHEAD)


def test_sleep_takes_no_real_time_and_no_cpu_time(gpu):
    real, cpu = clock.perf_counter(), time.process_time()
    gpu.launch(100.0)
    with elapses(100):
        time.sleep(100)
        torch.cuda.synchronize()  # the device worked during the sleep
    assert clock.perf_counter() - real < 10
    assert time.process_time() - cpu < OVERHEAD
    with pytest.raises(ValueError, match="non-negative"):
        time.sleep(-1)


def test_timeit_measures_virtual_time(gpu):
    def step():
        gpu.launch(10 * MS)
        torch.cuda.synchronize()

    for timed in (timeit.timeit(step, number=1), *timeit.repeat(step, number=1), timeit.Timer(step).timeit(1)):
        assert timed == pytest.approx(10 * MS, abs=OVERHEAD)


# ---- torch.cuda and torch.accelerator ----


def test_there_is_one_device(gpu):
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 1
    assert torch.cuda.current_device() == 0
    torch.cuda.set_device(0)
    with torch.cuda.device(0):
        assert torch.cuda.get_device_name() == torch.cuda.get_device_properties(0).name == A100.name
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.accelerator.current_stream() is torch.cuda.current_stream()
    with elapses(10 * MS):
        gpu.launch(10 * MS, torch.cuda.Stream())
        torch.accelerator.synchronize()


# ---- "cuda" tensors ----

CPU_ONLY = {"numpy", "asarray", "from_dlpack", "tensor of tensors"}  # torch refuses all but the last of a CUDA tensor
CUDA_READS = {**READS, "copy_": lambda x: torch.empty(2).copy_(x)}

CUDA_TENSORS = {
    "zeros": lambda: torch.zeros(3, device="cuda"),
    "tensor": lambda: torch.tensor([1.0], device="cuda"),
    "arange": lambda: torch.arange(3, device="cuda:0"),
    "cuda": lambda: torch.ones(2).cuda(),
    "to": lambda: torch.ones(2).to("cuda", non_blocking=True),
    "pinned": lambda: torch.empty(2, pin_memory=True).pin_memory().cuda(non_blocking=True),
    "view": lambda: torch.ones(2, 2).cuda().t()[1:].detach(),
    "module": lambda: nn.Linear(2, 2, device="cuda").weight,
    "copy": lambda: copy.deepcopy(nn.Linear(2, 2).cuda()).weight,
}


@pytest.mark.parametrize("how", CUDA_TENSORS)
def test_cuda_tensor_reports_its_device(gpu, how):
    x = CUDA_TENSORS[how]()
    assert x.is_cuda
    assert not x.is_cpu
    assert x.device == torch.device("cuda", 0)
    assert x.get_device() == 0
    assert x.to("cuda") is x
    assert x.cpu().device.type == "cpu"
    assert x.to("cpu").device.type == "cpu"
    with pytest.raises(TypeError, match="to numpy"):
        x.detach().numpy()


def test_cpu_tensor_stays_on_cpu(gpu):
    x = torch.ones(2)
    for y in (x, x + 1, x.cuda().cpu(), torch.zeros_like(x.cuda(), device="cpu")):
        assert y.device.type == "cpu"
        assert not y.is_cuda
    x.cuda().add_(1)
    assert x.tolist() == [1, 1]  # .cuda() made a copy
    torch.as_tensor(x, device="cuda").add_(1)
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("how", sorted(CUDA_READS.keys() - CPU_ONLY))
def test_reading_a_value_waits_for_the_stream(gpu, how):
    x = torch.ones(2, device="cuda")
    torch.cuda.synchronize()
    with elapses(10 * MS, 2 * OVERHEAD):
        gpu.launch(10 * MS)
        CUDA_READS[how](x)


# ---- operators ----


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("operator", "make", "seconds"),
    [
        (torch.matmul, lambda: 2 * (ones(768, 768, dtype=torch.bfloat16),), 2 * 768**3 / 312e12),
        (torch.add, lambda: (ones(2**23), ones(2**23)), 3 * 4 * 2**23 / 2.039e12),
        (F.scaled_dot_product_attention, lambda: 3 * (ones(1, 2, 512, 64),), 4 * 2 * 512 * 512 * 64 / 19.5e12),
        (partial(F.scaled_dot_product_attention, is_causal=True), lambda: 3 * (ones(1, 2, 512, 64),),
         2 * 2 * 512 * 512 * 64 / 19.5e12),
    ],
)  # fmt: skip
def test_operator_time_is_that_of_its_flops_or_bytes(gpu, operator, make, seconds):
    inputs = make()
    torch.cuda.synchronize()
    start = gpu.now
    operator(*inputs)
    assert gpu.stream.tail - start == pytest.approx(seconds, rel=0.02, abs=gpu.launch_s)


def test_views_and_allocations_are_free(gpu):
    x = torch.ones(4, 4, device="cuda")
    before = gpu.launches
    x.t().reshape(2, 8)[0].detach().unsqueeze(0).expand(3, 8)
    torch.empty(100, device="cuda")
    torch.empty_like(x)
    torch.ones(3) + 1  # runs on the host
    assert gpu.launches == before + 1  # reshape of a transpose copies


def train(kind: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.arange(11).to(kind), (torch.arange(11) % 3).to(kind)
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach().cpu())
    return [*losses, *(p.detach().cpu() for p in model.parameters())]


def test_training_gives_the_numbers_of_the_cpu():
    expected = train("cpu")
    with device.SimulatedGPU() as gpu:
        got = train("cuda")
        assert gpu.launches > 200
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-5, atol=1e-6)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 3 * x

    @staticmethod
    def backward(ctx, do):
        (x,) = ctx.saved_tensors
        assert x.is_cuda
        assert do.is_cuda
        return do * torch.full((), 3.0, device=x.device)


def test_backward_launches_kernels_and_sees_cuda_tensors(gpu):
    w = torch.ones(4, device="cuda", requires_grad=True)
    y = (Scale.apply(w) @ w.detach()).sum()
    before = gpu.launches
    (gradient,) = torch.autograd.grad(y, w)
    assert gpu.launches - before >= 3
    assert gradient.is_cuda
    assert gradient.tolist() == [3.0] * 4


def test_autocast_casts(gpu):
    with torch.autocast("cuda", dtype=torch.float16):
        assert nn.Linear(4, 4).cuda()(torch.ones(2, 4, device="cuda")).dtype == torch.float16


# ---- installing and giving back ----

PATCHED = (
    time, timeit, torch, torch.cuda, torch.cuda.nvtx, torch.accelerator, torch.Tensor, torch.autocast, torch.autograd,
    torch.autograd.graph.saved_tensors_hooks,
)  # fmt: skip


def installed() -> list[object]:
    """All attributes that a simulated device may change."""
    defaults = [f.__defaults__ for f in (timeit.timeit, timeit.repeat, timeit.Timer.__init__)]
    return [*defaults, *(dict(vars(target)) for target in PATCHED)]


def test_uninstall_gives_everything_back():
    available = torch.cuda.is_available()
    before = installed()
    with contextlib.suppress(KeyError), device.SimulatedGPU():
        assert all(now != old for now, old in zip(installed(), before, strict=True))
        raise KeyError  # everything is restored after an exception too
    assert installed() == before
    assert torch.cuda.is_available() == available
    assert not torch.ones(2).is_cuda
    with pytest.raises(RuntimeError, match="simulated"):
        device.current()
