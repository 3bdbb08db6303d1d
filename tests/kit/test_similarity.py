"""A renamed copy is found, independent work is not reported as a copy, and grades never change."""

import ast
import csv
import re
import shutil

import pytest

from grader import mutants, similarity
from grader.gradebook import Flag, Graded
from grader.report import pairs as pages
from grader.submissions import find
from lab.course.assignment import ROOT, default

from .classroom import invoke, latest, recorded, result

FILE = "flash_attention/tiled_backward.py"
APART = "tiled-backward-queries-outside"  # a variant that was written independently, with another loop order
HOSTILE = '"</pre></mark><script>alert(1)</script>"'


def renamed(text: str) -> str:
    """Change all bound names, comments, docstrings and blank lines."""
    tree = ast.parse(text)
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bound |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    for i, name in enumerate(sorted(bound)):
        text = re.sub(rf"(?<![\w.]){name}\b", f"mine_{i}", text)
    text = re.sub(r'""".*?"""', '"""Mine alone."""', re.sub(r"#.*", "# my own idea", text), flags=re.DOTALL)
    return re.sub(r"(?m)$", "  # mine", text.replace("\n", "\n\n"))


@pytest.fixture(scope="module")
def classroom(tmp_path_factory):
    """ada wrote her code, bob copied it, cyd wrote it differently, dan wrote nothing, eve copied from last year."""
    folder = tmp_path_factory.mktemp("similarity")
    ada = (ROOT / "reference" / FILE).read_text(encoding="utf-8")
    variant = next(v for v in mutants.read("variant", "flash_attention") if v.name == APART)
    cyd = (mutants.apply(variant, folder / "variants") / FILE).read_text(encoding="utf-8")
    stub = (ROOT / "student" / FILE).read_text(encoding="utf-8")
    naive = (ROOT / "reference" / "ddp" / "naive.py").read_text(encoding="utf-8")
    texts = {"ada": ada, "bob": renamed(ada) + f"\nx = {HOSTILE}\n", "cyd": cyd, "dan": stub}
    for name, text in texts.items():
        write(folder / "class" / name / FILE, text)
    write(folder / "class" / "eve" / "ddp" / "naive.py", renamed(naive))
    write(folder / "2025" / "fay" / "ddp" / "naive.py", naive)
    write(folder / "2025" / "gus" / "ddp" / "naive.py", naive)
    return folder


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def compared(classroom):
    """Return {(one, other): pair}, most similar first."""
    parties = [*similarity.class_parties(find([classroom / "class"]))]
    assert [p.name for p in parties if not p.files] == ["dan"]
    assert similarity.compare(parties[0], next(p for p in parties if p.name == "dan")).share == 0
    parties += similarity.class_parties(find([classroom / "2025"]), "earlier")
    parties.append(similarity.kit_party({FILE, "ddp/naive.py"}))
    return {(p.one.name, p.other.name): p for p in similarity.pairs(parties)}


def test_renamed_copy_ranks_first_and_independent_code_scores_low(compared):
    in_class = {names: p for names, p in compared.items() if p.other.kind == "class"}
    assert next(iter(in_class)) == ("ada", "bob")
    assert in_class["ada", "bob"].share > 0.9
    assert in_class["ada", "cyd"].share < 0.5
    assert in_class["bob", "cyd"].share < 0.5
    assert not [names for names in compared if "dan" in names], "stubs alone are like nothing"


def test_fork_similarity_ignores_shared_model_and_adapters(classroom, tmp_path):
    """bob renamed ada's code; cyd wrote his own. All have the course's model and the same adapters."""
    for name, file in (("ada", "flash.py"), ("bob", "attention.py"), ("cyd", "flash.py")):
        write(tmp_path / name / "tests" / "adapters.py", "from cs336_systems import *\n")
        write(
            tmp_path / name / "cs336_basics" / "model.py",
            (ROOT / "lab" / "model" / "transformer.py").read_text(encoding="utf-8"),
        )
        write(tmp_path / name / "cs336_systems" / file, (classroom / "class" / name / FILE).read_text(encoding="utf-8"))
    parties = list(similarity.class_parties(find([tmp_path])))
    assert [[*p.files] for p in parties] == [[similarity.FORK]] * 3
    shares = {(p.one.name, p.other.name): p.share for p in similarity.pairs(parties)}
    assert shares["ada", "bob"] > 0.9
    assert max(shares["ada", "cyd"], shares["bob", "cyd"]) < 0.5


def test_copies_of_kit_solutions_and_variants_are_recognized(compared):
    kit_pairs = {one: p.files[0] for (one, other), p in compared.items() if other == similarity.KIT and p.files}
    assert (kit_pairs["ada"].share, kit_pairs["ada"].other.label) == (1.0, "reference")
    assert (kit_pairs["cyd"].share, kit_pairs["cyd"].other.label) == (1.0, APART)


def test_earlier_years_are_compared_only_with_the_class(compared):
    assert compared["eve", "2025/fay"].share > 0.9
    assert not [names for names in compared if set(names) == {"2025/fay", "2025/gus"}]


def test_similarity_pages_and_csv_escape_submission_text(compared, tmp_path):
    ada, bob = compared["ada", "bob"].one, compared["ada", "bob"].other
    names = ("=HYPERLINK(1)", "<script>alert(1)</script>\u202e")
    one, other = (similarity.Party(name, "class", p.files) for name, p in zip(names, (ada, bob), strict=True))
    index = pages.write(tmp_path, [similarity.compare(one, other)], ["<b>zed"], default(), 0.5)
    for page in (index, tmp_path / "pairs" / "1.html"):
        text = page.read_text(encoding="utf-8")
        assert "&lt;script&gt;alert(1)" in text
        assert "<script>alert" not in text
        assert "\u202e" not in text
        assert "</pre></mark><script" not in text
    rows = list(csv.DictReader((tmp_path / "similarity.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0]["submission"] == "'=HYPERLINK(1)"
    assert float(rows[0]["share"]) > 0.9


def test_flag_option_flags_pairs_once_and_changes_no_grade(classroom, tmp_path):
    folder, found = tmp_path / "class", Flag("forbidden call", "torch")
    for name in ("ada", "bob"):
        shutil.copytree(classroom / "class" / name, folder / name)
    recorded(tmp_path, *(Graded(name, flags=[found], results=[result()]) for name in ("ada", "bob")))

    def flags(*options: str) -> tuple[list[Flag], list[float]]:
        invoke(tmp_path, "similarity", folder, *options)
        bob = latest(tmp_path)["bob"]
        return bob.flags, [s.earned for s in bob.scores(default(), default().profiles["tour"])]

    before = flags()
    assert before[0] == [found]
    after = flags("--flag")
    assert [f.kind for f in after[0]] == [found.kind, *[similarity.FLAG] * 2]
    assert "also in ada; most in flash_attention/tiled_backward.py" in after[0][1].detail + after[0][2].detail
    assert after[1] == before[1]
    assert flags("--flag") == after, "flagged twice"
