"""Written questions: the kit recomputes numbers, people mark prose, and no input is trusted."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from grader import answer_key, batch, written
from grader.graded import Answer, Graded
from grader.submissions import Submission
from lab.commands import answers
from lab.course import questions
from lab.course.assignment import ROOT, AssignmentError, default
from lab.course.units import UnitError, in_base
from lab.model.transformer import SIZES, Transformer

from .classroom import raises_one_line

REAL = (ROOT / "questions.toml").read_text(encoding="utf-8")
KNOWN = questions.default().questions
COMPUTED = [q for q in KNOWN.values() if q.kind != "prose"]
PROSE = [q for q in KNOWN.values() if q.kind == "prose"]


def handed_in(folder: Path, toml: str = "", prose: str = "") -> list[Answer]:
    """Judge a submission of these two files. Return the answers to all questions."""
    (folder / "answers.toml").write_text(toml, encoding="utf-8")
    (folder / "writeup.md").write_text(prose, encoding="utf-8")
    return written.judge(folder, KNOWN)[0]


def answer(found: list[Answer], id: str) -> Answer:
    return next(a for a in found if a.question == id)


# ---- the questions ----


def test_generated_question_files_match_questions_toml():
    wrong = [str(path.relative_to(ROOT)) for path in written.out_of_step(ROOT / "student")]
    assert not wrong, f"{wrong}: run python -m grader stubs"


def test_question_counts_and_profiles_fit_their_stages():
    profiles = questions.default().profiles
    assert questions.default().of_profile("tour") == ()
    assert set(profiles["full"]) == set(KNOWN)
    for stage in default().stages:
        stage_questions = questions.default().of_stage(stage.name)
        assert 2 <= len(stage_questions) <= 4
        assert any(q.kind == "prose" for q in stage_questions)
    for name, ids in profiles.items():
        assert {KNOWN[id].stage for id in ids} <= {id.partition(".")[0] for id in default().profiles[name]}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('id = "ddp.ring_bytes"', 'id = "ddp.naive"', "an id that no question and no exercise has"),
        ("points = 1", "points = 0", "points: expected a number above 0, got 0"),
        ('unit = "MB"', 'unit = "Mb/s"', "unit: expected a unit of bytes"),
        ("bands = [0.05, 0.25]", "bands = [0.25, 0.05]", "bands: expected 2 numbers, the smaller first"),
        ("tolerance = 0.02\n", "", "tolerance: expected a number above 0, got nothing"),
        ('name = "table"', 'name = "synchronize"', "a name not used before"),
        ("core = [", 'core = ["ddp.nope", ', "profiles.core"),
    ],
)
def test_a_bad_question_is_refused_with_its_key_and_what_came(tmp_path, old, new, words):
    assert old in REAL
    (tmp_path / "questions.toml").write_text(REAL.replace(old, new, 1), encoding="utf-8")
    with raises_one_line(AssignmentError, words):
        questions.load(tmp_path / "questions.toml")


# ---- correct answers ----

PARAMETERS = sum(p.numel() for p in Transformer(SIZES["tiny"]).parameters())
BY_HAND = {
    "benchmarking.launch_bound": 200 * 8e-6,
    "mixed_precision.loss_scale": 2.0 ** math.ceil(math.log2(2**-14 / 3e-9)),
    "flash_attention.tiles": 2 * 32 * 33 / 2,
    "flash_attention.whole_matrix": 2.0 ** math.ceil(math.log2(math.sqrt(80e9 / (8 * 16 * 2)))),
    "ddp.ring_bytes": 2 * 7 / 8 * 4 * 124e6,
    "ddp.flat_gain": 199 * 2 * 7 * 50e-6,
    "zero.devices": math.ceil(12 * 13 / (80 - 4 * 13)),
    "zero.step_bytes": 3 * 3 / 4 * 4 * PARAMETERS,
    "mesh.tensor_limit": 1 + math.floor(2 * 28672 / (2 * 500e12 / 450e9)),
    "mesh.fsdp_limit": 31 / 32 * 500e12 / 50e9,
}


@pytest.mark.parametrize("id", BY_HAND)
def test_answer_key_matches_hand_computed_values(id):
    tolerance = KNOWN[id].bands[0] / 2
    assert answer_key.truth(id) == pytest.approx(BY_HAND[id], rel=tolerance)


def test_answer_key_flops_match_the_flop_counter():
    config, batch, context = SIZES["tiny"], 1, 16
    with FlopCounterMode(display=False) as counter:
        Transformer(config)(torch.randint(256, (batch, context)))
    hidden_half = config.layers * 2 * batch * config.heads * context**2 * config.dim
    assert answer_key._forward_flops(config, batch, context) == counter.get_total_flops() - hidden_half


def test_answer_key_values_lie_in_plausible_ranges():
    for q in (q for q in COMPUTED if q.kind != "choice"):
        low, high = (in_base(x, q.unit, q.unit) for x in q.range)
        assert low <= answer_key.truth(q.id) <= high


@pytest.mark.parametrize(
    ("factor", "share"), [(1, {"number": 1, "prediction": 1, "choice": 1}), (1.4, {}), (1.1, {"prediction": 0.5})]
)
def test_exact_answers_earn_full_points_and_near_ones_half_or_none(tmp_path, factor, share):
    def table(q):
        value = answer_key.truth(q.id)
        if q.kind == "choice":
            return f'[{q.id}]\nvalue = "{value if factor == 1 else "b" if value == "a" else "a"}"\n'
        return f'[{q.id}]\nvalue = {factor * value / in_base(1, q.unit, q.unit)!r}\nunit = "{q.unit}"\n'

    found = handed_in(tmp_path, "".join(map(table, COMPUTED)))
    scores = [s for s in written.score(Graded("ada", answers=found)) if s.question.kind != "prose"]
    assert [s.earned for s in scores] == [s.question.points * share.get(s.question.kind, 0) for s in scores]
    assert sum(s.possible for s in scores) == sum(q.points for q in COMPUTED)


def test_likely_mistake_is_named_without_revealing_the_answer(tmp_path):
    a = answer(handed_in(tmp_path, '[ddp.ring_bytes]\nvalue = 868\nunit = "GB"\n'), "ddp.ring_bytes")
    assert (a.outcome, a.share) == ("wrong", 0)
    assert "the wrong prefix?" in a.message
    assert "868" not in a.message


@pytest.mark.parametrize(
    ("value", "unit", "asked", "base"),
    [
        (1.5, "MB", "MB", 1.5e6),
        (1.5, "MiB", "MB", 1572864.0),
        (12, "ms", "s", 0.012),
        (7, "\u03bcs", "ms", 7e-6),
        (7, "\u00b5s", "ms", 7e-6),
        (312, "TFLOP/s", "FLOP/s", 3.12e14),
        (5, "", "ranks", 5),
        (5, "ranks", "ranks", 5),
    ],
)
def test_a_number_means_the_same_in_any_unit(value, unit, asked, base):
    assert in_base(value, unit, asked) == pytest.approx(base)


@pytest.mark.parametrize(
    ("unit", "asked"),
    [("Mb", "MB"), ("mb", "MB"), ("", "MB"), ("s", "MB"), ("MB/s", "MB"), ("tiles", "ranks"), ("", "%")],
)
def test_a_unit_of_another_kind_is_refused(unit, asked):
    with pytest.raises(UnitError, match="expected"):
        in_base(1.0, unit, asked)


# ---- students' files ----


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[ddp.ring_bytes\nvalue = 1", "not TOML"),
        (b"\xff\xfe", "expected text in UTF-8"),
        (b"# \n" * 40_000, "at most 64 KiB"),
        (b"a" + b".a" * 20_000 + b" = 1", "lines of at most 1000 characters"),
        (b"a = " + b"[\n" * 20_000, "not TOML"),
        (b"a = 1" + b"\n[a]" * 9000, "not TOML"),
        (b"a = " + b"9" * 990, ""),
    ],
)
def test_malformed_answers_file_gets_note_and_prose_still_counts(tmp_path, content, words):
    (tmp_path / "answers.toml").write_bytes(content)
    (tmp_path / "writeup.md").write_text(f"## {PROSE[0].id}\nBecause.\n")
    found, notes = written.judge(tmp_path, KNOWN)
    assert answer(found, PROSE[0].id).outcome == "prose"
    assert not words or {answer(found, q.id).outcome for q in COMPUTED} == {"unreadable"}
    assert [n for n in notes if words in n and n.startswith("answers.toml: ")]
    assert all("\n" not in n for n in notes)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("value = true", "value: expected a number, the unit beside it, got True"),
        ('value = "868 MB"\nunit = "MB"', "got 868 MB"),
        ('value = nan\nunit = "MB"', "got nan"),
        (f'value = 1{"0" * 400}\nunit = "MB"', "expected a number"),
        ("value = [1]", "got [1]"),
        ("value = 868", "unit: expected a unit of bytes (B, kB, MB, GB"),
        ('value = 868\nunit = "Mb"', "got 'Mb'"),
    ],
)
def test_unreadable_answer_gets_one_line_reason(tmp_path, table, words):
    a = answer(handed_in(tmp_path, f"[ddp.ring_bytes]\n{table}\n"), "ddp.ring_bytes")
    assert (a.outcome, a.share) == ("unreadable", 0)
    assert words in a.message
    assert "\n" not in a.message


def test_answers_accept_quoted_numbers_and_note_unknown_questions(tmp_path):
    found = handed_in(tmp_path, '[ddp.ring_bytes]\nvalue = "868"\nunit = "MB"\n[zero.devices]\nvalue = " "\n')
    assert (answer(found, "ddp.ring_bytes").outcome, answer(found, "zero.devices").outcome) == ("right", "missing")
    (tmp_path / "answers.toml").write_text("[ddp.ring_byte]\nvalue = 1\n")
    (note,) = written.judge(tmp_path, KNOWN)[1]
    assert note == "answers.toml: ddp.ring_byte: no such question; there is ddp.ring_bytes"


@settings(max_examples=60, deadline=None)
@given(toml=st.binary(max_size=200), prose=st.binary(max_size=200))
def test_judging_accepts_arbitrary_bytes_without_raising(tmp_path_factory, toml, prose):
    folder = tmp_path_factory.mktemp("any")
    (folder / "answers.toml").write_bytes(b"[ddp.ring_bytes]\nvalue = " + toml)
    (folder / "writeup.md").write_bytes(b"## ddp.timeline\n" + prose)
    found, notes = written.judge(folder, KNOWN)
    assert [a.question for a in found] == list(KNOWN)
    json.dumps(notes)


def test_prose_is_what_the_student_wrote_below_its_heading(tmp_path):
    template = answers.templates(questions.default())["writeup.md"]
    assert {a.outcome for a in handed_in(tmp_path, prose=template)} == {"missing"}
    first, second = PROSE[:2]
    text = template.replace(
        f"## {second.id}\n", "### Table\n\n> quoted\n\n## ddp.naive\nof it\n\n" + f"## {second.id}\n"
    )
    found = handed_in(tmp_path, prose=text)
    assert answer(found, first.id).given == "### Table\n\n> quoted\n\n## ddp.naive\nof it"
    assert answer(found, second.id).outcome == "missing"
    assert handed_in(tmp_path, prose="Written above any heading.") == handed_in(tmp_path)


def test_grading_a_submission_judges_its_answers(tmp_path):
    submitted = tmp_path / "in"
    (submitted / "ddp").mkdir(parents=True)
    (submitted / "ddp" / "naive.py").write_text("")
    handed_in(submitted, "[zero.devices]\nvalue = 6\n[mesh.nothing]\nvalue = 1\n", "## ddp.timeline\nPictures.\n")
    ids = ("zero.devices", "ddp.timeline")
    job = batch.Settings("public", (), "process", str(tmp_path / "cache"), ids)
    g = batch.grade_one(Submission("ada", submitted), job)
    assert [(a.question, a.outcome) for a in g.answers] == [("zero.devices", "right"), ("ddp.timeline", "prose")]
    assert any("mesh.nothing" in note for note in g.notes)
