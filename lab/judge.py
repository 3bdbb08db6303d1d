"""Compares what came back with what was expected, and says where it is worst."""

from __future__ import annotations

import torch


def close(
    got: torch.Tensor,
    want: torch.Tensor,
    yardstick: torch.Tensor,
    what: str,
    factor: float = 3.0,
    dims: str = "",
    cause: str = "",
) -> None:
    """Assert that got is want within `factor` times the error of a plain same-dtype computation.

    want: the float64 oracle's; yardstick: what the plain computation in the inputs' dtype gives. Its error by norm and
    its worst element are both measured, and at least half an ulp of the dtype is allowed.
    """
    assert isinstance(got, torch.Tensor), f"{what}: expected a tensor, got {type(got).__name__}"
    assert got.shape == want.shape, f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    if not want.numel():
        return
    got64, want64 = got.double(), want.double()
    error, plain = (got64 - want64).abs(), (yardstick.double() - want64).abs()
    ulp = torch.finfo(yardstick.dtype).eps * want64.abs().clamp_min(want64.abs().mean())
    allowed = factor * torch.maximum(plain.max(), ulp)
    # NaN compares false: not (error <= allowed) catches it where error > allowed would not.
    wrong = ~(error <= allowed)
    if not wrong.any():
        return
    flat = int(torch.nan_to_num(error / allowed, nan=torch.inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape))
    place = f"({', '.join(map(str, index))})" + (f" of ({dims})" if dims and len(dims.split(",")) == len(index) else "")
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {wrong.numel()} values are off; worst at {place}: "
        f"got {got64[index]:.7g}, expected {want64[index]:.7g}, allowed ±{float(allowed[index]):.2g}"
        + (f": {cause}" if cause else "")
    )
