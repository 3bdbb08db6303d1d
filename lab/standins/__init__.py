"""Stand-ins replace prerequisites that do not pass, so that a student does not lose points twice.

`lab/standins/<stage>.py` has a function per exercise that other exercises need, with the exercise's name. Its argument
`module` is the student's module, after it ran. It returns the object that replaces the student's: torch's own if torch
has one, otherwise a correct solution without the property that the exercise asks for.
"""

import importlib
import importlib.util


def exists(id: str) -> bool:
    """Whether an exercise has a stand-in."""
    stage, _, name = id.partition(".")
    module = f"{__name__}.{stage}"
    return importlib.util.find_spec(module) is not None and hasattr(importlib.import_module(module), name)


def source(id: str) -> str:
    """Return where a stand-in is: "lab.standins.ddp:naive". Raises LookupError if the exercise has no stand-in."""
    stage, _, name = id.partition(".")
    if not exists(id):
        raise LookupError(f"no stand-in for {id}: expected a function {name} in lab/standins/{stage}.py")
    return f"{__name__}.{stage}:{name}"
