"""What a solution replaces is seen, whether a rank looks at everything or only at what has been changed.

What must be true: a change of any kind, to a module or a class, known to the zygote or not, is found; looking changes
nothing; and where dictionaries have no stamps, all of this as well.
"""

from __future__ import annotations

import sys
import types

import pytest

from lab.room import Room
from lab.runner import ProbeFailed
from lab.world import namespaces

from . import probes

CHANGES = {
    "a name": lambda it: setattr(it, "name", len),
    "a new name": lambda it: setattr(it, "other", len),
    "a name less": lambda it: delattr(it, "name"),
}


@pytest.fixture(params=[True, False], ids=["stamped", "not stamped"])
def stamps(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(namespaces, "_stamp", lambda place: -1)
    return request.param


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("kind", [types.ModuleType, type], ids=["module", "class"])
def test_every_change_has_a_stamp_and_looking_has_none(stamps, kind, what):
    it = kind("it", *([(), {}] if kind is type else []))
    it.name = print
    then = namespaces.Namespace.of(it)
    assert it.name is print
    assert dict(vars(it)) == then.values
    assert then.is_unchanged() == stamps
    CHANGES[what](it)
    assert not then.is_unchanged()


def test_what_a_module_says_of_itself_is_a_change():
    """Also by the interpreter's shorter ways, which it takes once a function has often been called."""
    it = types.ModuleType("it")
    exec("name = 0\ndef tell():\n    global name\n    name = object()\n", vars(it))
    for _ in range(100):
        it.tell()
    then = namespaces.Namespace.of(it)
    it.tell()
    assert not then.is_unchanged()


def test_what_is_remembered_is_what_is_there(stamps, monkeypatch):
    """Each module and class once, be it known or new, changed or gone in between."""
    for name in ("lab.known", "lab.changed", "lab.gone"):
        made = types.ModuleType(name)
        made.Own = type("Own", (), {"__module__": name})
        monkeypatch.setitem(sys.modules, name, made)
    plain = namespaces.now().namespaces
    namespaces.remember()
    sys.modules["lab.changed"].more = type("More", (), {"__module__": "lab.changed"})
    monkeypatch.setitem(sys.modules, "lab.new", types.ModuleType("lab.new"))
    del sys.modules["lab.gone"]
    seen = namespaces.now()
    places = [it.where for it in seen.namespaces]
    expected = [it.where for it in plain if "gone" not in getattr(it.where, "__module__", "") + it.where.__name__]
    assert len(places) == len({*map(id, places)})
    assert {*map(id, places)} == {
        *map(id, expected), id(sys.modules["lab.changed"].more), id(sys.modules["lab.new"])
    }  # fmt: skip
    assert "lab.gone" not in seen.modules
    assert seen.modules["lab.new"] is sys.modules["lab.new"]
    assert all(dict(vars(it.where)) == it.values for it in seen.namespaces)
    assert not namespaces._known, "what was remembered could be reached, and changed, by a solution"


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.equal = print",
        "import torch\ntorch.Tensor.add = print",
        "import torch.nn.functional as F\nF.relu = print",
        "import torch.distributed as d\nd.all_reduce = print",
        "import sys\nsys.modules['lab.measure.clock'].sleep = print",
        "from lab.world.ledger import Ledger\nLedger.write = print",
        "import sys\nsys.modules['time'] = sys.modules['gc']",
        "import tests.kit.probes as p\np.call = print",
    ],
    ids=lambda text: text.partition("\n")[2],
)
def test_a_solution_that_replaces_what_others_use_is_refused(runner, tmp_path, text):
    (tmp_path / "ddp").mkdir()
    lines = "\n    ".join(text.splitlines())
    (tmp_path / "ddp" / "naive.py").write_text(f"def step():\n    {lines}\n    return 1\n")
    runner.room = Room(tmp_path)
    runner.forget()
    with pytest.raises(ProbeFailed, match="does not replace what others use"):
        runner.run(probes.call)
