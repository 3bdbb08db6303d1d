"""Mutants made by rule: every place where students slip is changed, one at a time, and nothing else."""

from __future__ import annotations

from grader import mutants, operators

TOY = '''"""A toy: π before the code, as ast counts bytes."""

from lab.provided import provided


class Toy:
    def step(self, grads, group):
        π = len(grads) // 2
        for grad in grads[: -(-π // 3)]:
            if grad.numel() < π:
                raise ValueError(f"{π + 1}")
            total = torch.sub(grad.detach().mean(), π + 1)
            dist.all_reduce(total, group=group)
        self.work.wait()


@provided
def given(a, b):
    return a + b
'''

CHANGES = [
    (8, "len(grads) // 2 → -(-len(grads) // 2)"),
    (9, "-(-π // 3) → π // 3"),
    (10, "grad.numel() < π → grad.numel() <= π"),
    (12, "torch.sub(grad.detach().mean(), π + 1) → torch.sub(π + 1, grad.detach().mean())"),
    (12, "grad.detach().mean() → grad.detach().sum()"),
    (12, "grad.detach() → grad"),
    (12, "π + 1 → π - 1"),
    (13, "dist.all_reduce(total, group=group) → pass"),
    (13, "dist.all_reduce(total, group=group) → dist.all_reduce(total)"),
    (14, "self.work.wait() → pass"),
]


def test_each_rule_changes_its_place_and_nothing_that_is_provided_or_said(tmp_path):
    (tmp_path / "toy.py").write_text(TOY, encoding="utf-8")
    found = operators.changes("ddp.naive", "toy.py", tmp_path)
    assert [(c.line, c.what) for c in found] == CHANGES
    assert {c.function for c in found} == {"Toy.step"}
    for change in found:
        after = mutants.texts(change.edited("change-0"), tmp_path)["toy.py"]
        differ = [
            i for i, pair in enumerate(zip(TOY.splitlines(), after.splitlines(), strict=True), 1) if len({*pair}) > 1
        ]
        assert differ == [change.line]
        compile(after, "toy.py", "exec")
