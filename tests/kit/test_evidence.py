"""Forbidden names are found in a solution's source. Only one process at a time measures."""

import fcntl

import pytest

from grader import cs336
from lab.harness import timing_lock
from lab.solution import forbidden
from lab.solution.unwritten import untouched

# ---- names in the source ----

SDPA = "torch.nn.functional.scaled_dot_product_attention"
NAMED = {
    "as it is written": "import torch\ntorch.nn.functional.scaled_dot_product_attention(1)",
    "imported": "from torch.nn.functional import scaled_dot_product_attention as y",
    "renamed": "import torch.nn.functional as G; f = G.scaled_dot_product_attention",
    "an instrument": "from lab.ranks.group import ledger",
    "instruments of a folder": "import lab.ranks.group",
}
HONEST = {
    "another's attribute": "class A:\n    scaled_dot_product_attention = 1\nA.scaled_dot_product_attention",
    "text": "print('torch.nn.functional.scaled_dot_product_attention')",
    "a part of the name": "import torch\nprecision = 'float16'\ngetattr(torch, precision)",
    "settings": "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
}


@pytest.mark.parametrize("name", [*NAMED, *HONEST])
def test_forbidden_names_are_found_and_lookalikes_allowed(tmp_path, name):
    (tmp_path / "solution.py").write_text((NAMED | HONEST)[name])
    assert bool(forbidden.find(tmp_path, "solution.py", [SDPA])) == (name in NAMED)


@pytest.mark.parametrize(
    ("code", "hidden"),
    [
        ("from .other import *", "ddp/other.py"),
        ("import impl\nimpl.ddp.other.f", "ddp/other/__init__.py"),
        ("from .. import ddp\nddp.other.f", "ddp/other.py"),
        ("", "ddp/__init__.py"),  # an import of the package runs it
    ],
)
def test_forbidden_names_are_found_in_imported_solution_files(tmp_path, code, hidden):
    for file, text in {"ddp/naive.py": code, hidden: NAMED["imported"]}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert [f.partition(":")[0] for f in forbidden.find(tmp_path, "ddp/naive.py", [SDPA])] == [hidden]


UNREADABLE = {"minus signs": "x = " + "-" * 20_000 + "1", "many MB": "#" * (5 << 20), "a sum": "x = 1" + "+1" * 50_000}


@pytest.mark.parametrize("name", UNREADABLE)
def test_solution_too_large_to_parse_is_refused(tmp_path, name):
    """Python may still run the file, so it cannot count as clean. A parser's error must not end the caller."""
    file = tmp_path / "solution.py"
    file.write_text(UNREADABLE[name])
    with pytest.raises(forbidden.Unreadable, match=r"solution\.py: .*; (shorten it|take them apart)"):
        forbidden.find(tmp_path, "solution.py", [SDPA])
    assert untouched(file) == ""
    assert cs336.edition(file.read_bytes()) == "cs336-2025"
    assert cs336.lab_uses(tmp_path) == [], "a file that cannot be read is no evidence"


# ---- turns ----


def test_timing_lock_excludes_a_second_holder():
    lock = timing_lock.FOLDER / f"shardlings-{timing_lock._devices()[0]}.lock"
    with timing_lock.alone(), lock.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_core_lock_that_timed_out_is_not_waited_for_again(monkeypatch, tmp_path):
    monkeypatch.setattr(timing_lock, "FOLDER", tmp_path)
    monkeypatch.setattr(timing_lock, "WAIT_S", 0.2)
    monkeypatch.setattr(timing_lock, "_unavailable", set())
    with (tmp_path / f"shardlings-{timing_lock._devices()[0]}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.warns(UserWarning, match="core-"), timing_lock.alone():
            assert timing_lock._unavailable == {timing_lock._devices()[0]}
        monkeypatch.setattr(timing_lock, "WAIT_S", 1e6)
        with pytest.warns(UserWarning, match="core-"), timing_lock.alone():
            pass
