"""The simulated GPU: virtual time is exact, torch still works, and uninstall restores everything."""

import contextlib
import copy
import time
import timeit

import pytest
import torch
from torch import nn

from lab.measure import clock, device
from lab.measure.roofline import A100

from .test_reads import READS

MS = 1e-3
OVERHEAD = 20e-6  # clock reads, launches and calls into the driver


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
    start, end, untimed = (torch.cuda.Event(enable_timing=timing) for timing in (True, True, False))
    start.record()
    gpu.launch(7 * MS)
    end.record()
    untimed.record()
    assert start.query()
    assert not end.query()
    never = torch.cuda.Event(enable_timing=True)
    for other, words in ((end, "not ready"), (untimed, "enable_timing"), (never, "recorded")):
        with pytest.raises(RuntimeError, match=words):
            start.elapsed_time(other)
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(7, abs=0.02)


def test_polling_an_event_makes_time_pass(gpu):
    event = torch.Event("cuda", enable_timing=True)
    with elapses(2 * MS):
        gpu.launch(2 * MS)
        event.record()
        while not event.query():
            pass


# ---- clocks ----

CLOCKS = ["time", "perf_counter", "monotonic", "process_time", "thread_time"]


def imported() -> float:
    """By code that binds the clock when it is loaded."""
    names: dict = {}
    exec("from time import perf_counter", names)
    return names["perf_counter"]()


TOLD = {
    **{name: lambda name=name: getattr(time, name)() for name in CLOCKS},
    **{f"{name}_ns": lambda name=name: getattr(time, f"{name}_ns")() / 1e9 for name in CLOCKS},
    "clock_gettime": lambda: time.clock_gettime(time.CLOCK_MONOTONIC),
    "clock_gettime_ns": lambda: time.clock_gettime_ns(time.CLOCK_REALTIME) / 1e9,
    "default_timer": lambda: timeit.default_timer(),
    "imported": imported,
}


@pytest.mark.parametrize("name", TOLD)
def test_every_clock_tells_virtual_time_from_the_real_one_on(name):
    real = TOLD[name]()
    with device.SimulatedGPU() as gpu:
        start = TOLD[name]()
        assert 0 <= start - real < 60
        gpu.launch(3.0)
        torch.cuda.synchronize()
        assert TOLD[name]() - start == pytest.approx(3, abs=OVERHEAD)


def test_sleep_takes_no_real_time_and_no_cpu_time(gpu):
    real, cpu = clock.perf_counter(), time.process_time()
    gpu.launch(100.0)
    with elapses(100):
        time.sleep(100)
        torch.cuda.synchronize()  # the device worked meanwhile
    assert clock.perf_counter() - real < 10
    assert time.process_time() - cpu < OVERHEAD
    with pytest.raises(ValueError, match="non-negative"):
        time.sleep(-1)


def test_what_timeit_bound_early_is_virtual(gpu):
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

NOT_HERE = {"numpy", "asarray", "from_dlpack", "tensor of tensors"}  # torch refuses all but the last of a CUDA tensor
CUDA_READS = {**READS, "copy_": lambda x: torch.empty(2).copy_(x)}

MADE = {
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


@pytest.mark.parametrize("how", MADE)
def test_a_cuda_tensor_says_so(gpu, how):
    x = MADE[how]()
    assert x.is_cuda
    assert not x.is_cpu
    assert x.device == torch.device("cuda", 0)
    assert x.get_device() == 0
    assert x.to("cuda") is x
    assert x.cpu().device.type == "cpu"
    assert x.to("cpu").device.type == "cpu"
    with pytest.raises(TypeError, match="to numpy"):
        x.detach().numpy()


def test_a_cpu_tensor_stays_one(gpu):
    x = torch.ones(2)
    for y in (x, x + 1, x.cuda().cpu(), torch.zeros_like(x.cuda(), device="cpu")):
        assert y.device.type == "cpu"
        assert not y.is_cuda
    x.cuda().add_(1)
    assert x.tolist() == [1, 1]  # .cuda() made a copy
    torch.as_tensor(x, device="cuda").add_(1)
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("how", sorted(CUDA_READS.keys() - NOT_HERE))
def test_reading_a_value_waits_for_the_stream(gpu, how):
    x = torch.ones(2, device="cuda")
    torch.cuda.synchronize()
    with elapses(10 * MS, 2 * OVERHEAD):
        gpu.launch(10 * MS)
        CUDA_READS[how](x)


# ---- installing and giving back ----

PLACES = (
    time, timeit, torch, torch.cuda, torch.cuda.nvtx, torch.accelerator, torch.Tensor, torch.autocast, torch.autograd,
    torch.autograd.graph.saved_tensors_hooks,
)  # fmt: skip


def installed() -> list[object]:
    """Everything that a simulated device may change."""
    defaults = [f.__defaults__ for f in (timeit.timeit, timeit.repeat, timeit.Timer.__init__)]
    return [*defaults, *(dict(vars(place)) for place in PLACES)]


def test_uninstall_gives_everything_back():
    available = torch.cuda.is_available()
    before = installed()
    with contextlib.suppress(KeyError), device.SimulatedGPU():
        assert all(now != was for now, was in zip(installed(), before, strict=True))
        raise KeyError  # given back after an exception too
    assert installed() == before
    assert torch.cuda.is_available() == available
    assert not torch.ones(2).is_cuda
    with pytest.raises(RuntimeError, match="simulated"):
        device.current()


def test_lab_keeps_the_real_clocks(gpu):
    real, virtual = clock.perf_counter(), time.perf_counter()
    clock.sleep(0.02)
    assert clock.perf_counter() - real >= 0.02
    assert time.perf_counter() - virtual < OVERHEAD
