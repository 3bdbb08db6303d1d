"""An archive of a profile, or of the exercises released by a day, has only these exercises and works by itself."""

import datetime
import functools
import re
import tomllib

import pytest

from grader import release
from grader.cli import main
from grader.release import plan as plans
from lab.course.assignment import AssignmentError, default, needed

from .classroom import raises_one_line
from .test_release import check_run, test_links_in_release_pages_resolve, unpacked  # noqa: F401

PLAN = """
profile = "core"
[out]
2026-11-09 = ["benchmarking", "mixed_precision"]
2026-11-02 = ["benchmarking.benchmark"]
2026-11-16 = ["flash_attention", "ddp", "zero", "mesh"]
"""


@pytest.fixture(scope="module")
def files():  # `unpacked` uses it, and so do the imported tests
    return release.files("core", first_stages())


def first_stages() -> list[str]:
    return [id for id in default().profiles["core"] if id.split(".")[0] in ("benchmarking", "ddp")]


def exercises_in(found) -> set[str]:
    return {e.id for e in default().exercises.values() if f"student/{e.file}" in found}


def judged_in(found) -> set[str]:
    return {e.id for e in default().exercises.values() if f"tests/{e.stage}/test_{e.id.split('.')[1]}.py" in found}


@pytest.mark.parametrize("profile", ["tour", "short", "cs336-2025"])
def test_profile_release_has_its_exercises_and_prerequisites(profile):
    found, ids = release.files(profile), set(default().profiles[profile])
    assert judged_in(found) == ids
    assert exercises_in(found) == ids | {need for id in ids for need in needed(id)}
    assert tomllib.loads(found["assignment.toml"].decode())["profiles"] == {profile: list(default().profiles[profile])}
    assert all(release._imported(name, data) <= set(found) for name, data in found.items())


def test_profile_release_runs_alone_and_omits_other_profiles(unpacked):  # noqa: F811
    points = sum(default().exercise(id).points for id in first_stages())
    for command, code, *words in (
        ("lab", 0, f"0 of {points:g} points"),
        ("lab --profile full", 2, "--profile: expected one of core, got 'full'"),
    ):
        text = check_run(unpacked, code, "python", "-m", *command.split(), words=words)
        assert "profile full" not in text or code == 2, "it offers a profile that it lacks"
    assert "Error" not in text
    pages = [unpacked / "README.md", *unpacked.glob("handout/*.md")]
    assert not [page.name for page in pages if re.search("profile (full|short)|LAB_PROFILE", page.read_text())]
    assert "## mesh." not in (unpacked / "student" / "writeup.md").read_text()


def test_release_plan_lists_released_exercises_by_date(tmp_path):
    (tmp_path / "p.toml").write_text(PLAN)
    plan = plans.read(tmp_path / "p.toml")
    assert plan.out(datetime.date(2026, 11, 8)) == ("benchmarking.benchmark",)
    assert {id.split(".")[0] for id in plan.out(datetime.date(2026, 11, 9))} == {"benchmarking", "mixed_precision"}
    assert set(plan.out(datetime.date(2027, 1, 1))) == set(default().profiles["core"])
    assert (plan.next(datetime.date(2026, 11, 9)), plan.next(datetime.date(2026, 11, 16))) == (
        datetime.date(2026, 11, 16), None,
    )  # fmt: skip
    assert plan.remarks() == []
    with pytest.raises(AssignmentError, match=r"--on: expected 2026-11-02 or later, .* got '2026-11-01'"):
        plan.out(datetime.date(2026, 11, 1))


def test_release_plan_warns_of_missing_and_too_early_exercises(tmp_path):
    (tmp_path / "p.toml").write_text(
        'profile = "tour"\n[out]\n2026-11-02 = ["ddp.naive"]\n2026-11-03 = ["benchmarking"]'
    )
    assert plans.read(tmp_path / "p.toml").remarks() == [
        "1 of profile tour never come out: flash_attention.tiled_forward"
    ]
    (tmp_path / "p.toml").write_text('profile = "core"\n[out]\n2026-11-02 = ["ddp.flat"]\n2026-11-03 = ["ddp.naive"]')
    assert plans.read(tmp_path / "p.toml").remarks()[0] == (
        "ddp.flat comes out on 2026-11-02; it builds on ddp.naive, which comes out 2026-11-03"
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"core"', '"bore"', "p.toml: profile: expected one of tour, short, core"),
        ("2026-11-16", "2026-11-31", "p.toml: out: expected days such as 2026-11-02, got '2026-11-31'"),
        ('"zero"', '"zera"', "p.toml: out.2026-11-16: no exercise 'zera'; did you mean zero"),
        ('"zero"', '"zero.zero2"', "out.2026-11-16: expected an exercise of profile core, got 'zero.zero2'"),
        ('"zero"', '"benchmarking"', "expected a stage of which something of core is left, got 'benchmarking'"),
        ('"zero"', '"benchmarking.flops"', "benchmarking.flops is out on 2026-11-09 already"),
        ("[out]", "[out", "not TOML"),
    ],
)
def test_invalid_release_plan_gives_one_line_error(tmp_path, old, new, words):
    assert old in PLAN
    (tmp_path / "p.toml").write_text(PLAN.replace(old, new))
    with raises_one_line(AssignmentError, words):
        plans.read(tmp_path / "p.toml")


def test_release_command_uses_plan_in_current_folder(tmp_path, monkeypatch, said):
    monkeypatch.chdir(tmp_path)
    command = functools.partial(said, main, "release", "--out", "a.zip")
    assert command("--on", "2026-11-09") == (
        2, "grader: --on: expected a plan of what is out from when; write release-plan.toml, or leave --on out\n",
    )  # fmt: skip
    (tmp_path / "release-plan.toml").write_text(PLAN)
    assert command("--profile", "short")[0] == 2
    assert not (tmp_path / "a.zip").exists()
    code, text = command("--on", "2026-11-02")
    assert code == 0
    assert "release-plan.toml: 1 of the 26 of core are out on 2026-11-02; more on 2026-11-09" in text
    assert (tmp_path / "a.zip").is_file()
