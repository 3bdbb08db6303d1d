"""Exports grades: Gradescope's results.json, CSV for spreadsheets, JSON for scripts.

Text from submissions is made plain first; cells that a spreadsheet would run as formulas are disarmed.
"""

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lab.course.assignment import Assignment
from lab.course.scoring import ExerciseScore, KindScore, Result, only_refusals_fail
from lab.harness.files import write_atomically

from .. import people, written
from ..cs336 import ADVISORY
from ..csv_io import Sheet, csv_text, disarmed
from ..graded import AllGraded, Answer, Graded, Run
from ..policy import Grade
from . import fit, labels, one_line, page_name, plain, points, signed
from .canvas import canvas
from .classroom import class_summary
from .summary import REASONS, decisions, number, readable, standing

MESSAGE_LIMIT = 4000  # characters of one message
OUTPUT_LIMIT = 50_000  # characters of one Gradescope entry
_SUMS = ("earned", "possible", "not_run", "inconclusive", "adjusted", "late", "final")


def gradescope(
    graded: Graded, assignment: Assignment, ids: Collection[str], question_ids: Iterable[str] = ()
) -> dict[str, Any]:
    """Return Gradescope's results.json: a test per exercise and kind, and one per written question.

    score = fraction earned of the points that count × points of the profile. Gradescope has one total for everybody,
    so points that were not run or are excluded would otherwise be lost.

    Flags are left out: a hidden test makes Gradescope hide the total too, which would reveal the flag to the student.
    Print `evidence(graded)` in run_autograder instead: with stdout_visibility "hidden" only instructors see it.
    question_ids: those of the written questions; in a refused submission they count as not answered.
    """
    if graded.status == "refused":
        graded = replace(graded, answers=[Answer(id, "", "missing") for id in question_ids])
    grade = graded.grade(assignment, ids)
    scores, questions = grade.scores, written.score(graded)
    if graded.status == "refused":
        why = f"Could not be unpacked, so none of it was run.\n{plain(graded.message, MESSAGE_LIMIT)}"
        total = sum(s.exercise.points for s in scores) + sum(s.possible for s in questions)
        tests = [_entry("submission", "1", 0.0, total, False, why)]
    else:
        tests = [t for i, s in enumerate(scores, 1) for t in _entries(s, graded.results, i)]
        tests += [_answer(s, len(scores) + i) for i, s in enumerate(questions, 1)]
    tests += _decision_entries(graded, grade)
    got, counts, maximum = standing(graded, assignment, ids)
    notes = [one_line(note, 300) for note in graded.notes[:20]]
    if counts != maximum:
        so_far = f"{points(got)} of the {points(counts)} points that count so far, as a share of {maximum:g}"
        notes.insert(0, f"{so_far}; the rest was not run, is excluded or is not marked yet.")
    return {
        "score": round(maximum * got / counts, 4) if counts else 0.0, "execution_time": round(graded.seconds, 3),
        "output": "\n".join(notes), "output_format": "text", "test_output_format": "text", "test_name_format": "text",
        "visibility": "visible", "stdout_visibility": "hidden", "tests": tests,
    }  # fmt: skip


def evidence(graded: Graded) -> str:
    """The flags as text, for instructors only; "" if there are none."""
    return "\n".join(f"FLAG {one_line(f.kind, 200)}: {plain(f.detail, MESSAGE_LIMIT)}" for f in graded.flags)


def csv_rows(graded: AllGraded, assignment: Assignment, ids: Collection[str]) -> list[list[str | float]]:
    """Return a heading and one row per submission, by name. The cell of an exercise is empty if nothing of it ran, and
    "not attempted" if its stub is unchanged.

    inconclusive is part of not_run; final = earned + adjusted − late. The written part has three columns: points,
    points possible so far, and points of prose that nobody has marked yet.
    """
    exercises = [e for e in assignment.exercises if e in set(ids)]
    written_columns = ["written", "written_possible", "written_unmarked"]
    rows: list[list[str | float]] = [["submission", "status", *_SUMS, *written_columns, *exercises, "flags", "message"]]
    for row in class_summary(graded, assignment, ids).rows:
        g, grade = row.graded, row.grade
        cell_of: dict[str, float | str] = {
            s.exercise.id: number(s.earned) if s.possible > 0 else "" for s in grade.scores
        }
        cell_of |= {s.exercise.id: "not attempted" for s in grade.scores if not s.attempted}
        numbers = [*_numbers(grade, _SUMS).values(), *map(number, row.written)]
        cells = [cell_of.get(id, "excluded") for id in exercises]
        message = disarmed(one_line(g.message, 500))
        rows.append([disarmed(row.label), g.status, *numbers, *cells, len(g.flags), message])
    return rows


def as_json(run: Run, graded: AllGraded, assignment: Assignment, ids: Collection[str]) -> dict[str, Any]:
    """Return everything about a run except its seed and manifest: {"run": {...}, "submissions": {label: {...}}}."""
    info = {key: value for key, value in asdict(run).items() if key not in ("seed", "manifest")}
    shown = labels(graded)
    return {"run": info, "submissions": {shown[name]: _submission(g, assignment, ids) for name, g in graded.items()}}


def _submission(g: Graded, assignment: Assignment, ids: Collection[str]) -> dict[str, Any]:
    grade, questions, written_fields = g.grade(assignment, ids), written.score(g), ("earned", "possible", "unmarked")
    tests: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for r in g.results:
        tests[r.exercise].append(asdict(fit(r)))
    return {
        "status": g.status, "message": plain(g.message, MESSAGE_LIMIT), "hash": one_line(g.hash, 100),
        "seconds": round(g.seconds, 3), "notes": [one_line(note, 300) for note in g.notes], **_numbers(grade, _SUMS),
        "decisions": [remark._asdict() for remark in decisions(g, grade)],
        "exercises": {
            s.exercise.id: {
                **_numbers(s, _SUMS[:4]), "attempted": s.attempted, "excluded": s.exercise.id in grade.excluded,
                "tests": tests[s.exercise.id],
            }
            for s in g.scores(assignment, ids)
        },
        "written": {
            **dict(zip(written_fields, map(number, written.totals(questions)), strict=True)),
            "questions": {
                s.question.id: {
                    **_numbers(s, written_fields), **asdict(fit(s.answer)),
                    "marks": [asdict(fit(m)) for m in s.marks.values()],
                }
                for s in questions
            },
        },
        "flags": [asdict(fit(flag)) for flag in g.flags],
    }  # fmt: skip


def _entries(s: ExerciseScore, results: list[Result], number: int) -> list[dict[str, Any]]:
    """Return Gradescope's tests for one exercise: one per kind, and one for advisory tests."""
    name = s.exercise.id
    if not s.kinds:
        why = f"Not run: {points(s.exercise.points)} points, neither earned nor lost."
        return [_entry(f"{name} (not run)", f"{number}", 0.0, 0.0, None, why)]
    entries = []
    for i, k in enumerate(s.kinds, 1):
        of_kind = [r for r in results if r.exercise == name and r.kind == k.kind]
        nothing_ran = not k.passed and not k.failed
        word = "inconclusive" if k.inconclusive > 0 else "not run"
        word = word if nothing_ran else "" if s.attempted else "not attempted"
        title = f"{name}: {k.kind}" + (f" ({word})" if word else "")
        counted = None if nothing_ran else k.passed > 0 and not k.failed and (k.earned > 0 or k.points == 0)
        entries.append(_entry(title, f"{number}.{i}", k.earned, k.points - k.not_run, counted, _output(s, k, of_kind)))
    if of_kind := [r for r in results if r.exercise == name and r.kind == ADVISORY]:
        k = KindScore(ADVISORY, 0.0, passed=sum(r.outcome == "passed" for r in of_kind))
        passed = k.passed == len(of_kind)
        title = f"{name}: advisory (worth no points)"
        entries.append(_entry(title, f"{number}.{len(s.kinds) + 1}", 0.0, 0.0, passed, _output(s, k, of_kind)))
    return entries


def _answer(s: written.QuestionScore, number: int) -> dict[str, Any]:
    """Return Gradescope's test for one written question. Prose is worth nothing until a person has marked it."""
    lines = [f"{written.OUTCOMES[s.answer.outcome]}. {one_line(s.answer.message, 300)}".strip()]
    if s.answer.outcome == "prose":
        lines = [f"{points(s.unmarked)} points to be marked."] if s.unmarked else []
        lines += [f"{m.criterion}: {points(m.points)}. {plain(m.comment, 1000)}".strip() for m in s.marks.values()]
    elif s.answer.given:
        lines.append(f"You answered: {one_line(s.answer.given, 200)}")
    full = s.earned >= s.possible if s.possible > 0 else None
    return _entry(f"{s.question.id} (written)", f"{number}", s.earned, s.possible, full, "\n".join(lines))


def _output(s: ExerciseScore, k: KindScore, results: list[Result]) -> str:
    lines = []
    for word, left_out in (("Not run", k.not_run - k.inconclusive), ("Inconclusive", k.inconclusive)):
        if left_out > 0:
            lines.append(f"{word}: {points(left_out)} points, neither earned nor lost.")
    if k.passed and k.earned == 0 and k.points > 0:
        lines.append("Passed, but counts only once all numerics of the exercise pass.")
    tests_by_text: dict[str, list[str]] = {}  # message → the tests that failed with it
    for r in results:
        if r.outcome == "passed":
            continue
        case = f" [{one_line(r.case, 100)}]" if r.case else ""
        why = REASONS.get(r.reason, one_line(r.reason, 300)) if r.outcome == "failed" else one_line(r.reason, 300)
        outcome = why if r.reason == "unwritten" else f"{r.outcome.replace('_', ' ')}{why and f', {why}'}"
        seed = {"passed": " On the secret seed only.", "failed": " On the public seed too."}.get(r.public, "")
        text = f"{outcome}.{seed}\n{plain(r.message, MESSAGE_LIMIT)}".rstrip()
        tests_by_text.setdefault(text, []).append(f"{readable(r.test)}{case}")
    lines += [f"{'; '.join(names)}: {text}" for text, names in tests_by_text.items()]
    hint = s.exercise.hints[0]
    failed = any(r.outcome == "failed" for r in results)
    if failed and not only_refusals_fail(results) and not any(hint in text for text in tests_by_text):
        lines.append(f"Hint: {hint}")
    if not lines:
        lines.append(f"{k.passed} {'test' if k.passed == 1 else 'tests'} passed.")
    return plain("\n\n".join(lines), OUTPUT_LIMIT)


def _decision_entries(graded: Graded, grade: Grade) -> list[dict[str, Any]]:
    """Return Gradescope's tests for adjustments, lateness, and excluded exercises."""
    remarks = decisions(graded, grade)
    found = []
    for name, score, kinds in (("adjusted", grade.adjusted, ["adjust"]), ("late", -grade.late, ["extend", "late"])):
        why = plain("\n\n".join(f"{d.what}: {d.why}" for d in remarks if d.kind in kinds), OUTPUT_LIMIT)
        if score:
            found.append(_entry(f"{name}: {signed(score)}", "", score, 0.0, score > 0, why))
    excluded = [(f"{id} (excluded)", plain(d.why, MESSAGE_LIMIT)) for id, d in grade.excluded.items()]
    return found + [_entry(name, "", 0.0, 0.0, None, why) for name, why in excluded]


def _entry(name: str, number: str, score: float, full: float, passed: bool | None, output: str) -> dict[str, Any]:
    """Return one of Gradescope's tests. passed: None if the test does not count; then it gets neither status nor score,
    because Gradescope shows a score of 0 of 0 as passed.
    """
    entry = {"name": name, "number": number, "output": output, "visibility": "visible"}
    if passed is None:
        return entry
    return {"score": round(score, 4), "max_score": round(full, 4), "status": "passed" if passed else "failed", **entry}


def _numbers(record: object, names: Iterable[str]) -> dict[str, float]:
    return {name: number(getattr(record, name)) for name in names}


def write_exports(folder: Path, graded: AllGraded, assignment: Assignment, ids: Collection[str]) -> None:
    """Write grades.csv and gradescope/<name>.json of each submission; update an existing canvas.csv."""
    write_atomically(folder / "grades.csv", csv_text(csv_rows(graded, assignment, ids)))
    question_ids = dict.fromkeys(a.question for one in graded.values() for a in one.answers)
    for name, one in graded.items():
        text = json.dumps(gradescope(one, assignment, ids, question_ids), indent=1) + "\n"
        write_atomically(folder / "gradescope" / f"{page_name(name)}.json", text)
    roster = folder / "canvas.csv"  # contains the students of the roster
    if roster.is_file():
        text = roster.read_text(encoding="utf-8-sig")
        write_atomically(
            roster, canvas(text, Sheet(text).headings[-1], graded, assignment, ids, people.read(folder))[0]
        )
