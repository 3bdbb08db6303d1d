"""Triton kernels without a GPU, ahead of time: the machine code they compile to.

with compiling(90) as kernels:  # without TRITON_INTERPRET: every launch compiles for sm_90, and runs nothing
    attention(q, k, v)
kernels[0].spilled_bytes, kernels[0].instructions["wgmma"]
"""

import contextlib
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .kernels import digest, settings

# Instructions of the tensor cores and of the copy engine (TMA), as they appear in PTX.
INSTRUCTIONS = {"mma": "mma.sync", "wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "tma": "cp.async.bulk.tensor"}


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel. shared_bytes: static and dynamic shared memory per program."""

    name: str
    source: str  # digest of its source
    program: str  # digest of Triton's IR, equal for both 16-bit dtypes
    warps: int
    registers: int  # per thread
    spilled_bytes: int  # per thread: size of the stack, which Triton kernels use only for spills
    shared_bytes: int
    instructions: dict[str, int]  # count of each of INSTRUCTIONS
    keywords: dict[str, Any]  # keyword arguments of the launch: BLOCK_M, num_stages and others
    cubin: bytes
    settings: str  # as in `lab.measure.kernels.Launch`


def _driver(target: Any) -> Any:
    """Return a driver for a GPU that does not exist. Triton reads only the target from it."""
    return SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: target.arch,  # kernels are cached by device
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )


@contextlib.contextmanager
def compiling(arch: int) -> Iterator[list[Kernel]]:
    """Compile each kernel launched in the block for sm_`arch`, without running it. Autotuning takes the first config.

    Tensors may lie on the CPU; their values are not read. Raises RuntimeError if TRITON_INTERPRET is set.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels are interpreted in this process: unset TRITON_INTERPRET to compile them")
    kernels: list[Kernel] = []
    run, autotuned, driver = JITFunction.run, Autotuner.run, triton.runtime.driver

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with _disable_current_modes():
            compiled = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(_kernel(self.fn, compiled, args, kwargs))
        return compiled

    def first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(self, "configs", self.configs[:1]):
            return autotuned(self, *args, **kwargs)

    before = getattr(driver, "_active", None)
    driver.set_active(_driver(GPUTarget("cuda", arch, 32)))  # type: ignore[no-untyped-call]
    try:
        with (
            mock.patch.object(JITFunction, "run", compile_only),
            mock.patch.object(Autotuner, "run", first_configuration),
        ):
            yield kernels
    finally:
        driver._active = before


def _kernel(function: Any, compiled: Any, arguments: tuple, launch: dict[str, Any]) -> Kernel:
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    usage = re.search(r"REG:(\d+) STACK:(\d+)", read_cubin(cubin, "--dump-resource-usage"))
    if usage is None:
        raise RuntimeError(f"expected the registers of {function.__name__} from cuobjdump, got none: reinstall Triton")
    return Kernel(
        function.__name__, digest(function), _program(compiled.asm["ttir"]), compiled.metadata.num_warps,
        int(usage[1]), int(usage[2]), compiled.metadata.shared,
        {name: ptx.count(text) for name, text in INSTRUCTIONS.items()}, {**launch}, cubin,
        settings(arguments, launch),
    )  # fmt: skip


def read_cubin(cubin: bytes, flag: str) -> str:
    """Run Triton's cuobjdump on a kernel's machine code, and return its output. flag: such as "-sass"."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([knobs.nvidia.cuobjdump.path, flag, file.name], capture_output=True, text=True)
    return run.stdout


def _program(ttir: str) -> str:
    """Return a digest of Triton's IR without source locations, equal for both 16-bit dtypes."""
    text = re.sub(r"#loc.*|loc\(.*?\)+", "", ttir).replace("bf16", "f16")
    return hashlib.sha256(text.encode()).hexdigest()[:16]
