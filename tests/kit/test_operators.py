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
    assert [c.why for c in found] == [f"toy.py:{line}: Toy.step: {what}" for line, what in CHANGES]
    assert len({c.name for c in found}) == len(CHANGES)
    for change, (line, _) in zip(found, CHANGES, strict=True):
        after = mutants.texts(change, tmp_path)["toy.py"]
        differ = [
            i for i, pair in enumerate(zip(TOY.splitlines(), after.splitlines(), strict=True), 1) if len({*pair}) > 1
        ]
        assert differ == [line]
        compile(after, "toy.py", "exec")


def test_what_is_drawn_depends_on_the_seed_and_takes_each_exercise_in_turn():
    exercises = ["ddp.naive", "zero.split", "mesh.route"]
    one, again, other = (operators.drawn(exercises, 6, seed) for seed in ("a", "a", "b"))
    assert one == again != other
    assert sorted(c.exercise for c in one) == sorted(exercises * 2)
    assert operators.drawn(exercises, 2, "a") == one[:2]
