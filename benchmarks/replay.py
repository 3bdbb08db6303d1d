"""Replays the inner loop of a kernel's machine code on a model of one multiprocessor (SM). Nothing is measured.

The model is one quarter of an SM: it issues one instruction per cycle, in order per warp. The machine code holds stall
counts and scoreboards. Warps share the pipes and a tensor core; tiles come out of L2 at a fixed latency and rate.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field

from lab.measure.sass import HMMA_CYCLES, Instruction

# Threads per cycle and SM (CUDA C++ Programming Guide, throughput of arithmetic instructions, 9.0).
RATES = {"fma": 128, "alu": 64, "imad": 64, "mufu": 16, "shfl": 32, "lsu": 32}
# Cycles until a result is there, where the code waits for it by a scoreboard; cycles that a warp keeps a pipe busy.
LATENCIES = {"mufu": 18, "shfl": 24, "lsu": 30, "tile": 24, "tensor": 33, "copy": 20}
OCCUPIES = {"mufu": 8, "shfl": 4, "lsu": 4, "alu": 2, "imad": 2, "fma": 1}
QUEUE, DRAIN = 4, 40  # wgmma that a warp may issue ahead; cycles from the end of the last one until a wait returns
L2_LATENCY, L2_BYTES = 650, 40  # cycles until a tile's first byte; bytes per cycle and SM when all SMs ask
SKEW = 200  # cycles between the starts of two programs on one SM


@dataclass
class Warp:
    program: int
    leads: bool  # asks for the program's tiles
    ready: float
    at: int = 0  # the next instruction
    step: int = 0
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * 8)
    queue: deque[Instruction] = field(default_factory=deque)  # wgmma that the tensor core has not begun
    groups: list[float] = field(default_factory=list)  # ends of committed groups of wgmma; inf if not known yet
    tiles: int = 0  # waits for tiles that were met in this step
    at_barrier: bool = False
    ends: list[float] = field(default_factory=list)  # of each step


class Replay:
    """Cycles per step of `loop`, run by `warps` warps in each of `programs` programs on an SM.

    ahead: steps between asking for tiles and using them; step_bytes: all tiles of one step.
    """

    def __init__(self, loop: list[Instruction], warps: int, programs: int, ahead: int, step_bytes: int):
        self.loop, self.ahead = loop, ahead
        self.warps = [Warp(p, w == 0, SKEW * p) for p in range(programs) for w in range(warps // 4)]
        self.asks = sum(i.pipe == "copy" for i in loop)
        self.waits = sum(_waits_for_tile(i) for i in loop)
        self.part_bytes = step_bytes / max(1, self.asks)
        self.arrivals: dict[tuple[int, int], list[float]] = defaultdict(list)  # of (program, step)
        self.busy: dict[str, float] = defaultdict(float)  # until when, by pipe
        self.now = 0.0
        self.running: tuple[Warp, float, bool] | None = None  # a wgmma: whose, its end, whether it ends a group
        self.l2_free = 0.0
        self.last = self.warps[0]

    def cycles(self, steps: int = 24) -> float:
        """Mean of the middle steps of the slowest warp."""
        while any(len(w.ends) < steps for w in self.warps):
            self._advance_tensor_core()
            order = [self.last, *(w for w in self.warps if w is not self.last)]
            for warp in order:
                if len(warp.ends) < steps and self._can_issue(warp, self.loop[warp.at]):
                    self._issue(warp, self.loop[warp.at])
                    break
            self.now += 1
            if self.now > 1e6:
                raise RuntimeError("the replayed loop does not end: the model lacks an instruction that it waits for")
        first, last = steps // 3, steps - 1 - steps // 6
        return max((w.ends[last] - w.ends[first]) / (last - first) for w in self.warps)

    def _advance_tensor_core(self) -> None:
        """Warps with queued wgmma take turns."""
        if self.running and self.running[1] <= self.now:
            warp, end, ends_group = self.running
            if ends_group:
                warp.groups[warp.groups.index(float("inf"))] = end + DRAIN
            self.running = None
            self.warps.sort(key=lambda w: w is warp)  # the others first
        if self.running is None and (warp := next((w for w in self.warps if w.queue), None)):
            wgmma = warp.queue.popleft()
            self.running = (warp, self.now + wgmma.tensor_cycles(), wgmma.ends_group)

    def _can_issue(self, warp: Warp, i: Instruction) -> bool:
        if warp.at_barrier or warp.ready > self.now or self.busy[i.pipe] > self.now:
            return False
        if any(i.waits >> board & 1 and warp.scoreboards[board] > self.now for board in range(6)):
            return False
        if i.name == "HGMMA":
            return len(warp.queue) < QUEUE
        if i.allowed is not None:
            warp.groups = [end for end in warp.groups if end > self.now]
            return len(warp.groups) <= i.allowed
        if _waits_for_tile(i) and self.asks and warp.step >= self.ahead:
            needed = -(-(warp.tiles + 1) * self.asks // self.waits)
            arrived = self.arrivals[warp.program, warp.step]
            return len(arrived) >= needed and arrived[needed - 1] <= self.now
        return True

    def _issue(self, warp: Warp, i: Instruction) -> None:
        pipe = i.pipe
        if i.name == "HGMMA":
            warp.queue.append(i)
            if i.ends_group:
                warp.groups.append(float("inf"))
        elif pipe in OCCUPIES or i.name == "HMMA":
            self.busy[pipe] = self.now + OCCUPIES.get(pipe, HMMA_CYCLES)
        elif pipe == "copy" and warp.leads:
            self.l2_free = max(self.l2_free, self.now) + self.part_bytes / L2_BYTES
            self.arrivals[warp.program, warp.step + self.ahead].append(self.l2_free + L2_LATENCY)
        elif pipe == "barrier" and _whole_program(i):
            self._meet(warp)
        warp.tiles += _waits_for_tile(i)
        result, operands = i.sets
        warp.scoreboards[result] = max(warp.scoreboards[result], self.now + LATENCIES.get(pipe, 12))
        warp.scoreboards[operands] = max(warp.scoreboards[operands], self.now + 8)
        warp.ready = max(warp.ready, self.now + max(1, i.stall))
        warp.at, self.last = warp.at + 1, warp
        if warp.at == len(self.loop):
            warp.at, warp.tiles, warp.step = 0, 0, warp.step + 1
            warp.ends.append(self.now)

    def _meet(self, warp: Warp) -> None:
        """A barrier of all warps of a program."""
        warp.at_barrier = True
        members = [w for w in self.warps if w.program == warp.program]
        if all(w.at_barrier for w in members):
            for w in members:
                w.at_barrier, w.ready = False, self.now + 12


def _waits_for_tile(i: Instruction) -> bool:
    return i.op.startswith("SYNCS.PHASECHK")


def _whole_program(i: Instruction) -> bool:
    threads = re.search(r",\s*0x([0-9a-f]+)", i.operands)
    return "ARV" not in i.op and (not threads or int(threads[1], 16) > 128)
