"""The inner loops of a kernel's machine code: its instructions by pipe, and the overlap of exponentials with wgmma."""

import re
from dataclasses import dataclass

PIPE = {"MUFU": "mufu", "HGMMA": "tensor", "HMMA": "tensor", "UTCHMMA": "tensor"}  # by instruction; others: "other"


@dataclass(frozen=True)
class Instruction:
    op: str  # with modifiers: HGMMA.64x128x16.F32.BF16
    operands: str

    @property
    def name(self) -> str:
        return self.op.split(".")[0]

    @property
    def pipe(self) -> str:
        return PIPE.get(self.name, "other")

    @property
    def ends_group(self) -> bool:
        return self.name == "HGMMA" and "gsb0" in self.operands

    @property
    def allowed(self) -> int | None:
        """Number of wgmma groups that may still be in flight after this wait; None for other instructions."""
        return int(self.operands.split(",")[1], 16) if self.op.startswith("WARPGROUP.DEPBAR") else None


def disassemble(sass: str) -> dict[int, Instruction]:
    """Return instructions by address, from the output of `cuobjdump -sass`."""
    line = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@\S+\s+)?(\S+)\s*(.*?)\s*;\s*/\* 0x\w+ \*/\s*/\* 0x\w+ \*/")
    return {int(address, 16): Instruction(op, operands) for address, op, operands in line.findall(sass)}


def inner_loops(code: dict[int, Instruction]) -> list[list[Instruction]]:
    """Return all innermost loops with tensor-core instructions, even those that never run. Raises ValueError."""
    found = []
    for last, instruction in code.items():
        target = re.search(r"0x([0-9a-f]+)", instruction.operands) if instruction.name == "BRA" else None
        if target and (first := int(target[1], 16)) < last:
            body = [code[address] for address in code if first <= address <= last]
            if any(i.pipe == "tensor" for i in body) and not any(i.name == "EXIT" for i in body):
                found.append(body)
    if not found:
        raise ValueError("expected a loop with tensor-core instructions in the machine code, got none")
    return found


def coverage(loop: list[Instruction]) -> float:
    """Return the share of a loop's exponentials (MUFU) that start while a wgmma of the same warp is in flight."""
    groups, unfinished, covered = 0, False, []
    for iteration in range(2):  # the first iteration finds the groups in flight at the loop's start
        for i in loop:
            if i.name == "HGMMA":
                groups, unfinished = groups + i.ends_group, not i.ends_group
            elif i.allowed is not None:
                groups = min(groups, i.allowed)
            elif i.pipe == "mufu" and iteration:
                covered.append(groups > 0 or unfinished)
    return sum(covered) / max(1, len(covered))
