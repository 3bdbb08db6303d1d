"""Judges the written questions: numbers and choices automatically, prose by a person later.

Their points are separate; they do not change the points of the code.
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from lab.commands import answers
from lab.commands.answers import GivenAnswer
from lab.course.assignment import ROOT, AssignmentError
from lab.course.questions import Question, default

from .graded import Answer, Graded, Mark

# Factor by which a wrong number is off → likely slip. The message names the slip, not the right answer.
_SLIPS = (
    (1.024, "KB and KiB mixed up?"),
    (1.024**2, "MB and MiB mixed up?"),
    (1.024**3, "GB and GiB mixed up?"),
    (8.0, "bits and bytes mixed up?"),
    (100.0, "a share and per cent mixed up?"),
    (1e3, "the wrong prefix?"),
    (1e6, "the wrong prefix?"),
    (1e9, "the wrong prefix?"),
)
# Answer.outcome in words.
OUTCOMES = {
    "right": "right",
    "near": "near: half of the points",
    "wrong": "wrong",
    "unreadable": "cannot be read",
    "missing": "not answered",
    "prose": "marked by a person",
    "unjudged": "could not be judged on this machine",
}
BEGIN, END = "<!-- questions -->", "<!-- end -->"


@dataclass(frozen=True)
class QuestionScore:
    """points = earned + lost + unmarked; possible = points - unmarked."""

    question: Question
    answer: Answer
    marks: dict[str, Mark] = field(default_factory=dict)  # by criterion

    @property
    def earned(self) -> float:
        if self.answer.outcome == "prose":
            return math.fsum(min(m.points, c.points) for c in self.question.criteria if (m := self.marks.get(c.name)))
        return self.question.points * self.answer.share

    @property
    def unmarked(self) -> float:
        """Points that nobody has judged yet, mostly for prose: neither earned nor lost."""
        if self.answer.outcome == "unjudged":
            return self.question.points
        if self.answer.outcome != "prose":
            return 0.0
        return math.fsum(c.points for c in self.question.criteria if c.name not in self.marks)

    @property
    def possible(self) -> float:
        return self.question.points - self.unmarked

    @property
    def outdated(self) -> bool:
        """Whether the answer changed after it was marked."""
        return any(m.text != text_id(self.answer.given) for m in self.marks.values())


def judge(root: Path, ids: Iterable[str]) -> tuple[list[Answer], list[str]]:
    """Return (an answer per question in ids, notes for the report) of the submission unpacked at root."""
    known = default().questions
    given, notes = answers.read(root, [known[id] for id in ids])
    return [_judge_one(g) for g in given], notes


def score(graded: Graded) -> list[QuestionScore]:
    """Return the scores of the written questions; empty for a refused submission."""
    known = default().questions
    marks: dict[str, dict[str, Mark]] = {}
    for mark in graded.marks:
        marks.setdefault(mark.question, {})[mark.criterion] = mark
    return [
        QuestionScore(known[a.question], a, marks.get(a.question, {}) if a.outcome == "prose" else {})
        for a in graded.answers
        if a.question in known
    ]


def totals(scores: Iterable[QuestionScore]) -> tuple[float, float, float]:
    """Return (earned, possible, unmarked) in points."""
    rows = [(s.earned, s.possible, s.unmarked) for s in scores]
    earned, possible, unmarked = map(math.fsum, zip(*rows, strict=True)) if rows else (0.0, 0.0, 0.0)
    return earned, possible, unmarked


def text_id(text: str) -> str:
    """Return a digest of the text that ignores differences in white space."""
    return hashlib.sha256(" ".join(text.split()).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def generated(student: Path) -> dict[Path, str]:
    """Return file → text generated from questions.toml: the student's two files, and chapters with their questions.

    Raises AssignmentError if a chapter has no markers for them.
    """
    questions = default()
    texts = {student / name: text for name, text in answers.templates(questions).items()}
    for stage in dict.fromkeys(q.stage for q in questions.questions.values()):
        chapter = ROOT / "handout" / f"{stage}.md"
        before, begin, rest = chapter.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
        _, end, after = rest.partition(f"{END}\n")
        if not (begin and end):
            raise AssignmentError(f"{chapter.name}: expected {BEGIN} … {END} around its questions; put both in")
        texts[chapter] = before + begin + section(questions.of_stage(stage)) + end + after
    return texts


def out_of_step(student: Path) -> dict[Path, str]:
    """Return file → expected text, for each generated file that is missing or differs."""
    return {
        path: text for path, text in generated(student).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }  # fmt: skip


def section(questions: Iterable[Question]) -> str:
    lines = []
    for q in questions:
        points = f"{q.points:g} {'point' if q.points == 1 else 'points'}"
        lines += answers.wrapped(f"**Question `{q.id}`** ({points}; {q.asks}). {q.text}")
        for item in (*(f"{letter}: {text}" for letter, text in q.options), *_criteria(q)):
            lines += answers.wrapped(item, "- ", "  ")
        lines += [""]
    return "\n".join(lines)


def _criteria(q: Question) -> Iterable[str]:
    uniform = {c.points for c in q.criteria} == {1}
    return (f"*{c.name}*{'' if uniform else f' ({c.points:g})'}: {c.text}" for c in q.criteria)


def _judge_one(g: GivenAnswer) -> Answer:
    q = g.question
    if g.problem:
        return Answer(q.id, g.shown, "unreadable", 0.0, g.problem)
    if g.value is None:
        return Answer(q.id, "", "missing")
    if q.kind == "prose":
        return Answer(q.id, g.shown, "prose")
    from lab.harness.runner import ExecutorLost, ProbeFailed

    from .answer_key import truth  # late: it imports torch, which takes seconds

    try:
        want = truth(q.id)
    except (ProbeFailed, ExecutorLost) as error:  # no reference here to measure, or the machine is too busy
        return Answer(q.id, g.shown, "unjudged", 0.0, str(error).partition("\n")[0])
    if q.kind == "choice":
        right = g.value == want
        return Answer(q.id, g.shown, "right" if right else "wrong", float(right))
    assert isinstance(want, float | int)
    assert isinstance(g.value, float)
    deviation = abs(g.value - want) / abs(want)
    for band, outcome, share in zip(q.bands, ("right", "near"), (1.0, 0.5), strict=False):
        if deviation <= band * (1 + 1e-9):
            return Answer(q.id, g.shown, outcome, share)
    message = f"asked for {q.closeness}"
    for factor, slip in _SLIPS:
        if any(abs(g.value * f - want) <= q.bands[0] * abs(want) for f in (factor, 1 / factor)):
            message += f"; {slip}"
            break
    return Answer(q.id, g.shown, "wrong", 0.0, message)
