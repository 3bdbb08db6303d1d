"""What a call raises, for probes that ask how an implementation answers bad input."""

from __future__ import annotations

from collections.abc import Callable


def raised(call: Callable[[], object], text: bool = False) -> str:
    """The name of what `call` raises, with text also what it says; "nothing" where it returns. What is not written yet
    is raised on."""
    try:
        call()
    except NotImplementedError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}" if text else type(error).__name__
    return "nothing"
