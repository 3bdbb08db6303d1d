"""Logical clocks: compute when each rank did what, from gates, messages and waits that the switch recorded."""

from collections import defaultdict, deque
from typing import Any

from lab.ranks.ledger import MESSAGES


def replayed(traces: list, last: int) -> list[list]:
    """Return per rank a list of [kind, micro-batch, chunk, start], one per action. A forward takes 1, a backward 2.

    An action asks for a gate: "forward 0 2" is micro-batch 0 on virtual stage 2 of 0 … `last`. The second and third
    number of a message name the action that made it: 0.0 and 2.0 for that forward, 0.0 and 2.5 for its backward.
    Messages take no time. An action begins when the message that it needs has left. A rank that waits for a message
    continues when the other rank has issued its end.
    """
    clocks, issued, departed, events = [0.0] * len(traces), {}, {}, [[] for _ in traces]
    pending, other_ends = [deque(_timeline(trace)) for trace in traces], _other_ends(traces)

    def ready(rank: int, event: str, key: Any) -> float | None:
        """Return the earliest time that other ranks allow for this event; None if it is not known yet."""
        if event == "wait":
            return issued.get(other_ends.get((rank, key)))
        if event == "issue":
            return 0.0
        kind, micro_batch, stage = _action(key)
        source = stage + (-1 if kind == "forward" else 1)
        is_local = not 0 <= source <= last or source % len(traces) == rank
        return 0.0 if is_local else departed.get((micro_batch, source + (kind == "backward") / 2))

    progress = True
    while progress:
        progress = False
        for rank, todo in enumerate(pending):
            while todo and (earliest := ready(rank, *todo[0][1:])) is not None:
                _, event, key = todo.popleft()
                clocks[rank], progress = max(clocks[rank], earliest), True
                if event == "issue":
                    issued[rank, key] = clocks[rank]
                    if (producer := _producer(traces[rank], key)) is not None:
                        departed[producer] = clocks[rank]
                elif event == "act":
                    kind, micro_batch, stage = _action(key)
                    events[rank].append([kind, micro_batch, stage // len(traces), clocks[rank]])
                    clocks[rank] += 1 if kind == "forward" else 2
    stuck = {rank: todo[0][2] for rank, todo in enumerate(pending) if todo}
    assert not stuck, f"ranks went on without the message that they need: {stuck}"
    return events


def _timeline(trace: Any) -> list[tuple]:
    """Return (seconds, "act", gate) and (seconds, "issue" or "wait", number of the message), in the switch's order."""
    seen = [(gate.at_s, "act", gate.name) for gate in trace.gates]
    for row in trace.messages:
        seen += [(row.issued_s, "issue", row.number)] + [(row.waited_s, "wait", row.number)] * (row.waited_s >= 0)
    return sorted(seen)


def _action(gate: str) -> tuple[str, int, int]:
    kind, micro_batch, stage = gate.split()
    return kind, int(micro_batch), int(stage)


def _producer(trace: Any, number: int) -> tuple | None:
    """Read from a message which action made it: (micro-batch, stage, + ½ in backward); None for a receive."""
    payload = trace.payloads[number]
    if trace.messages[number].op != "send" or payload is None or len(payload) < 3:
        return None
    return tuple(payload[1:3].tolist())


def _other_ends(traces: list) -> dict:
    """Map each end of a message, (rank, number), to its other end. Ends of the same pair and tag match in order."""
    ends: dict = defaultdict(lambda: {op: [] for op in MESSAGES})
    for rank, trace in enumerate(traces):
        for row in trace.messages:
            if row.op in MESSAGES:
                direction = (rank, row.peer) if row.op == "send" else (row.peer, rank)
                ends[*direction, row.tag][row.op].append((rank, row.number))
    pairs = [pair for both in ends.values() for pair in zip(*both.values(), strict=False)]
    return dict(pairs) | {other: one for one, other in pairs}
