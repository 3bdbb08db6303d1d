"""A failing import costs a fork only the exercises that use it; and the package cs336_basics is found."""

import importlib.util
import subprocess
import sys

import pytest

from grader.cs336.bridge.supplied import cs336_supplied
from lab.course.assignment import ROOT

from .test_cs336 import a_fork, unpacked

LACKING = {
    "tests/adapters.py": """
import cs336_kernels.cast
from cs336_systems import flash
from cs336_systems.ddp import DDP
from cs336_systems.fsdp import FSDP


class Sharded(FSDP):
    pass


def get_flashattention_autograd_function_pytorch(): return flash.Flash
def get_flashattention_autograd_function_triton(): return cs336_kernels.cast.Flash
def get_ddp(module): return DDP
def ddp_on_after_backward(module, optimizer): return isinstance(module, flash.Flash | FSDP)
def get_fsdp(module): return Sharded(module)
""",
    "cs336_systems/__init__.py": "",
    "cs336_systems/ddp.py": "DDP = 1\n",
    "cs336_systems/flash.py": "import torch\n\nCORES = torch.cuda.get_device_properties(0)\n",
    "cs336_systems/fsdp.py": "from cs336_basics.model import Linear\n",
}
USES = """
import sys
from lab.solution import impl

fork = impl.load(sys.argv[1]).fork
for name, *args in (
    ["get_ddp", 0], ["get_flashattention_autograd_function_pytorch"], ["get_flashattention_autograd_function_triton"],
    ["get_fsdp", 0], ["ddp_on_after_backward", 0, 0],
):
    try:
        found = fork.adapter("stage.exercise", name)(*args)
        print(found if name == "get_ddp" else found.apply(0, 0, 0))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_failed_import_breaks_only_adapters_that_use_it(tmp_path):
    got = unpacked(a_fork(tmp_path / "fork", LACKING), tmp_path / "impl")
    output = subprocess.run(
        [sys.executable, "-c", USES, got.root], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert output.splitlines() == [
        "1", cuda := "AssertionError: Torch not compiled with CUDA enabled",
        "ModuleNotFoundError: No module named 'cs336_kernels'", "ModuleNotFoundError: No module named 'cs336_basics'",
        cuda,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("package", "pyproject"),
    [
        ("cs336_basics", ""),
        ("lib", '[tool.setuptools.package-dir]\ncs336_basics = "lib"'),
        ("lib", '[tool.hatch.build.targets.wheel.force-include]\n"lib" = "cs336_basics"'),
        ("python/cs336_basics", '[tool.hatch.build.targets.wheel]\npackages = ["python/cs336_basics"]'),
    ],
)
def test_cs336_basics_is_found_where_a_pyproject_maps_it(tmp_path, monkeypatch, package, pyproject):
    a_fork(tmp_path, {f"my/{package}/__init__.py": "", "my/pyproject.toml": pyproject})
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    cs336_supplied.find_packages(tmp_path)
    spec = importlib.util.find_spec("cs336_basics")
    assert [*spec.submodule_search_locations] == [str(tmp_path / "my" / package)]
