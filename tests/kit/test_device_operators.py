"""The cost of operators on the simulated GPU: roofline, training, autocast."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lab.measure import device


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("operator", "make", "seconds"),
    [
        (torch.matmul, lambda: (ones(1024, 512), ones(512, 1024)), 2 * 1024 * 512 * 1024 / 19.5e12),
        (torch.matmul, lambda: 2 * (ones(768, 768, dtype=torch.bfloat16),), 2 * 768**3 / 312e12),
        (torch.add, lambda: (ones(2**23), ones(2**23)), 3 * 4 * 2**23 / 2.039e12),
        (F.scaled_dot_product_attention, lambda: 3 * (ones(1, 2, 512, 64),), 4 * 2 * 512 * 512 * 64 / 19.5e12),
        (partial(F.scaled_dot_product_attention, is_causal=True), lambda: 3 * (ones(1, 2, 512, 64),),
         2 * 2 * 512 * 512 * 64 / 19.5e12),
    ],
)  # fmt: skip
def test_an_operator_takes_as_long_as_its_arithmetic_or_its_bytes(gpu, operator, make, seconds):
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
    torch.ones(3) + 1  # the host's
    assert gpu.launches == before + 1  # reshape of a transpose copies


# ---- nothing else changes ----


def train(place: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)).to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.arange(11).to(place), (torch.arange(11) % 3).to(place)
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


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_backward_is_charged_and_believes_in_cuda_too(gpu, how):
    w = torch.ones(4, device="cuda", requires_grad=True)
    y = (Scale.apply(w) @ w.detach()).sum()
    before = gpu.launches
    if how == "backward":
        y.backward()
        gradient = w.grad
    else:
        (gradient,) = torch.autograd.grad(y, w)
    assert gpu.launches - before >= 3
    assert gradient.is_cuda
    assert gradient.tolist() == [3.0] * 4


def test_autocast_and_loss_scaling_work(gpu):
    model = nn.Linear(4, 4).cuda()
    optimizer, scaler = (torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda", init_scale=8.0))
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(torch.ones(2, 4, device="cuda"))
        assert out.dtype == torch.float16
    before = model.weight.tolist()
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.tolist() != before
