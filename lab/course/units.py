"""Numbers with units: "1.5 MB" and "1500000 B" are the same answer; "1.5 Mb" is refused."""

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TABLE: dict[str, tuple[str, float]] = {
    **{f"{p}B": ("bytes", n) for p, n in {**_PREFIXES, **_BINARY}.items()},
    **{f"{p}B/s": ("bytes a second", n) for p, n in {**_PREFIXES, **_BINARY}.items()},
    **{f"{p}FLOP": ("FLOPs", n) for p, n in _PREFIXES.items()},
    **{f"{p}FLOP/s": ("FLOPs a second", n) for p, n in _PREFIXES.items()},
    "s": ("seconds", 1.0),
    "ms": ("seconds", 1e-3),
    "µs": ("seconds", 1e-6),
    "us": ("seconds", 1e-6),
    "ns": ("seconds", 1e-9),
    "min": ("seconds", 60.0),
    "h": ("seconds", 3600.0),
    "%": ("a share", 0.01),
    "x": ("a share", 1.0),
}


class UnitError(ValueError):
    """A unit is unknown or of the wrong kind. The message lists the expected units."""


def known(unit: str) -> bool:
    """Whether a question may use this unit: one of the table, a word such as "messages", or ""."""
    return unit in _TABLE or unit == "" or unit.isalpha()


def in_base(value: float, unit: str, target: str) -> float:
    """Convert a value to a base unit: bytes, seconds, FLOPs, bytes or FLOPs per second, a share of 1, or a count.

    target: the question's unit. Raises UnitError if `unit` is of another kind. in_base(1.5, "MiB", "MB") is 1572864.
    """
    given = unit.strip().replace("\u03bc", "\u00b5").replace("FLOPs", "FLOP")
    if target not in _TABLE:
        if given not in (target, ""):
            raise UnitError(f"expected {target or 'no unit'}, got {unit[:40]!r}")
        return value
    kind = _TABLE[target][0]
    if given not in _TABLE or _TABLE[given][0] != kind:
        options = ", ".join(u for u, (k, _) in _TABLE.items() if k == kind and u != "us" and u[:2] not in ("KB", "KF"))
        raise UnitError(f"expected a unit of {kind} ({options}), got {unit[:40]!r}")
    return value * _TABLE[given][1]
