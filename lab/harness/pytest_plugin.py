"""The student's runner as a pytest plugin: `run`, `rng`, `expect`, and a summary in points.

A test names its exercise and kind, runs a probe, and judges the values that it returns:

    @exercise("ddp.naive", kind="numerics")
    def test_replicas_start_equal(run, rng): …
"""

import hashlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ..course import assignment as assignments
from ..course.assignment import KINDS, ROOT, Assignment, AssignmentError
from ..solution import forbidden, wire
from ..solution.impl import folder_of
from ..solution.unwritten import untouched
from . import dependencies, mistakes, timing_lock
from .files import write_atomically
from .judge import MEASURED, TIMING_MESSAGES, Measurement, check_callers_unchanged, keep
from .outcomes import mark_of, result
from .rng import Rng
from .runner import Executor, ProbeFailed, Runner
from .test_index import marks
from .trace import Trace
from .verdicts import OWNED, PROFILE, RESULTS, RUNNER, VERDICTS, Verdicts

T = TypeVar("T")
NUMBERS = pytest.StashKey[dict[str, dict[str, Measurement]]]()  # by exercise and name of the measurement
KIT = [ROOT / "tests" / "kit", ROOT / "tests" / "docs"]  # the kit's own tests, not for students
CS336 = ROOT / "tests" / "cs336"  # another course's tests of the same exercises
SELECTED = pytest.StashKey[Counter[str]]()  # by exercise: number of tests
DIGESTS = pytest.StashKey[dict[str, dict[str, str]]]()  # by exercise: digests of all that its results depend on


def exercise(id: str, kind: str, triton: str = "interpret") -> pytest.MarkDecorator:
    """Mark a test with the exercise it judges, and its kind: "numerics", "property" or "timing".

    triton: the mode in which its probes run, so that their zygote can start in advance.
    """
    return pytest.mark.exercise(id, kind=kind, triton=triton)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardlings")
    group.addoption("--impl", default="student", help="student, reference, or a folder (default: student)")
    group.addoption("--stage", action="append", default=[], help="only this stage; may be given again")
    group.addoption("--exercise", action="append", default=[], help="only this exercise; may be given again")
    group.addoption("--profile", help="such as core: of what is not named (default: LAB_PROFILE or core)")
    group.addoption("--seed", default="public", help="what inputs are drawn from (default: public)")
    group.addoption("--inline", action="store_true", help="run probes in pytest itself, for a debugger")
    group.addoption("--expect-cache", default=str(ROOT / ".cache" / "expect"), help="where expected values are kept")


def pytest_configure(config: pytest.Config) -> None:
    workers = getattr(config.option, "numprocesses", None)  # of pytest-xdist, which has no summary of exercises
    if config.option.tbstyle == "auto" and not workers and not _selects(KIT, config):
        # A student's run: the summary shows one failure per exercise. --tb=short shows all, with tracebacks.
        config.option.tbstyle, config.option.reportchars = "no", ""
    config.addinivalue_line("markers", "exercise(id, kind): the exercise a test judges")
    config.stash[RESULTS], config.stash[NUMBERS] = [], {}
    implementation(config)
    if config.option.inline:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before test files import Triton
    names = [s.name for s in _or_usage_error(assignments.default).stages]
    for stage in config.option.stage:
        if stage not in names:
            raise pytest.UsageError(f"--stage: expected one of {', '.join(names)}, got {stage!r}")
    for id in config.option.exercise:
        stage = _or_usage_error(assignments.default().exercise, id, prefix="--exercise: ").stage
        if config.option.stage and stage not in config.option.stage:
            want = f"--stage {stage}, or --exercise alone"
            raise pytest.UsageError(f"--exercise {id}: expected {want}, got --stage {' '.join(config.option.stage)}")
    config.stash[PROFILE] = _profile(config)


def _profile(config: pytest.Config) -> Assignment:
    """The exercises that this session tests: those of --profile, or all if ids, files or tests are named."""
    known = assignments.default()
    files = any(str(a).partition("::")[0].endswith(".py") for a in config.args)
    if config.option.exercise or files or _selects([CS336], config):
        return known
    return _or_usage_error(known.of_profile, config.option.profile or assignments.students_profile())


def _or_usage_error(read: Callable[..., T], *args: Any, prefix: str = "") -> T:
    """Call `read`, and turn its AssignmentError into pytest's UsageError."""
    try:
        return read(*args)
    except AssignmentError as error:
        raise pytest.UsageError(f"{prefix}{error}") from None


def implementation(config: pytest.Config) -> Path:
    """The folder that --impl names."""
    name = config.option.impl
    path = folder_of(name)
    if not path.is_dir():
        raise pytest.UsageError(f"--impl: expected student, reference or a folder, got {name!r}, which is no folder")
    return path


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore tests of the kit and of cs336 unless their path is given, and files of exercises that are not selected."""
    if collection_path in (*KIT, CS336):
        return None if _selects([collection_path], config) else True
    if config.option.exercise and collection_path.match("test_*.py"):
        judged = {mark.id for mark in marks(collection_path)}
        return True if judged and judged.isdisjoint(config.option.exercise) else None
    return None


def _selects(folders: list[Path], config: pytest.Config) -> bool:
    paths = [Path(str(a).partition("::")[0]).resolve() for a in config.args]
    return any(path.is_relative_to(folder) for path in paths for folder in folders)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the zygote that most probes use: it imports torch while pytest collects the tests."""
    option = session.config.option
    if not (option.collectonly or option.inline or _selects(KIT, session.config)):
        _runner(session.config).warm()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check markers, put tests in the handout's order, and keep those that --stage and --exercise select."""
    known = assignments.default().exercises
    order = {id: n for n, id in enumerate(known)}
    for item in items:
        mark = item.get_closest_marker("exercise")
        if mark is None:
            continue
        if mark.args[0] not in known or mark.kwargs.get("kind") not in KINDS:
            raise pytest.UsageError(f"{item.nodeid}: @exercise{mark.args} {mark.kwargs}: no such exercise or kind")
    stages, ids = config.option.stage, config.option.exercise
    selected = [
        i for i in items
        if (not stages or mark_of(i)[0].partition(".")[0] in stages) and (not ids or mark_of(i)[0] in ids)
        and (mark_of(i)[0] in config.stash[PROFILE].exercises or not mark_of(i)[0])
    ]  # fmt: skip
    items[:] = sorted(selected, key=lambda i: (order.get(mark_of(i)[0], -1), mark_of(i)[1] == "timing"))
    config.stash[SELECTED] = counts = Counter(mark_of(i)[0] for i in items if mark_of(i)[0])
    if config.option.impl == "student" and not config.option.inline and not _is_partial(config):
        config.stash[DIGESTS] = {id: dependencies.digests(id, implementation(config).resolve()) for id in counts}
    if any(mark_of(i)[0] for i in items):
        config.stash[VERDICTS] = verdicts = Verdicts(config, _runner(config), config.stash[RESULTS])
        if not _is_partial(config):
            verdicts.numerics_count = Counter(mark_of(i)[0] for i in items if mark_of(i)[1] == "numerics")
    if not config.option.collectonly and not config.option.inline:
        for mode in sorted({m.kwargs["triton"] for i in items if (m := i.get_closest_marker("exercise"))}):
            _runner(config).warm(mode)  # it imports torch in the background


def _is_partial(config: pytest.Config) -> bool:
    """Whether the session may contain only some of an exercise's tests."""
    return bool(config.option.keyword or config.option.markexpr or any("::" in str(a) for a in config.args))


def _runner(config: pytest.Config) -> Runner:
    """The runner of this session; a grader puts its own in the stash first."""
    if RUNNER not in config.stash:
        runner_type: type[Runner] = Runner
        if config.option.inline:
            from .inline import InlineRunner as runner_type
        config.stash[OWNED] = True
        config.stash[RUNNER] = runner_type(Executor(implementation(config)), config.option.seed)
    return config.stash[RUNNER]


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[RESULTS][:] = mistakes.explained_again(session.config.stash[RESULTS])
    if VERDICTS in session.config.stash:
        session.config.stash[VERDICTS].keep()


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.stash.get(OWNED, False):
        config.stash[RUNNER].close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Run a timed test alone: no other timed test uses the same cores and GPUs.

    A timed test can take a minute to decide, so it runs only after all other tests of its exercise pass.
    """
    id, kind = mark_of(item)
    if kind != "timing":
        return (yield)
    earlier = (r for r in item.config.stash[RESULTS] if r.exercise == id and r.kind != "timing")
    failed = [r for r in earlier if r.outcome == "failed"]
    if failed and failed[0].reason == "unwritten":
        raise ProbeFailed("unwritten", failed[0].message.partition("\n")[0])
    if failed:
        raise AssertionError(f"not timed: it counts once numerics and property tests of {id} pass")
    with timing_lock.alone():
        return (yield)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`run(probe, *args, world=None, …)`: see runner.Runner. `run.trace(…)` returns each rank's whole trace.

    Stand-ins replace prerequisites that do not pass, except in tests of CS336, whose solutions have other classes. The
    code under test never runs in this process.
    """
    runner = _runner(request.config)
    id, _ = mark_of(request.node)
    if not id:
        return runner
    definition = assignments.default().exercise(id)
    failure = _failure_in_source(runner.executor.source, definition)
    verdicts = request.config.stash[VERDICTS]

    class ExerciseRunner:
        __call__ = Runner.run

        def trace(self, probe: Callable[..., Any], *args: Any, **options: Any) -> list[Trace]:
            traces = runner.trace(probe, *args, **self._complete(**options))
            for rank, trace in enumerate(traces):
                check_callers_unchanged(trace.values, f" on rank {rank}" if len(traces) > 1 else "")
            return traces

        def _complete(self, **options: Any) -> dict[str, Any]:
            if failure is not None:
                raise failure.again()
            stand_ins = {} if request.path.is_relative_to(CS336) else verdicts.stand_ins(id)
            return {"exercise": id, "forbidden": definition.forbidden, "replace": stand_ins, **options}

    return ExerciseRunner()


@pytest.fixture
def replaced(request: pytest.FixtureRequest) -> Callable[..., list[str]]:
    """`replaced()`: the exercise's prerequisites that stand-ins replace; `replaced(ids)`: those among `ids`.

    A test that measures bytes must allow for stand-ins.
    """
    id, verdicts = mark_of(request.node)[0], request.config.stash[VERDICTS]
    return lambda ids=None: [need for need in verdicts.to_replace(id) if ids is None or need in ids]


def _failure_in_source(source: Path, definition: assignments.Exercise) -> ProbeFailed | None:
    """The failure that the source alone shows: a stub, a file that cannot be checked, or a forbidden call."""
    if stub := untouched(source / definition.file):
        return ProbeFailed("unwritten", stub)
    try:
        found = forbidden.find(source, definition.file, definition.forbidden)
    except forbidden.Unreadable as error:
        return ProbeFailed("import", error.msg)
    if found:
        return ProbeFailed("forbidden", f"{found[0]} is forbidden in {definition.id}: it would be the answer itself")
    return None


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> Rng:
    """Random draws of this test and case: the same for the same --seed."""
    return Rng(request.config.option.seed, request.node.nodeid.rpartition("/")[2])


@pytest.fixture
def expect(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`expect(oracle, *args)`: the oracle's value, cached on disk by the oracle's source and inputs."""
    folder = Path(request.config.option.expect_cache)

    def expected(oracle: Callable[..., Any], *args: Any) -> Any:
        source = inspect.getsource(sys.modules[oracle.__module__])
        key = hashlib.sha256(f"{oracle.__qualname__}\0{source}\0".encode() + wire.pack(args)).hexdigest()
        path = folder / key[:2] / key
        if path.is_file():
            return wire.unpack(path.read_bytes())
        value = oracle(*args)
        write_atomically(path, wire.pack(value))
        return value

    return expected


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the outcome of an exercise's test into a Result, and shorten pytest's report to its message."""
    report = yield
    if report.when == "setup":
        TIMING_MESSAGES.clear()
        MEASURED.clear()
        if RUNNER in item.config.stash:
            item.config.stash[RUNNER].printed = ""
    uneventful = {"setup": report.passed, "teardown": not report.failed}.get(report.when or "", False)
    if uneventful or not mark_of(item)[0]:
        return report
    found = result(item, call, report, _runner(item.config).printed, item.config.stash[RESULTS])
    item.config.stash[RESULTS].append(found)
    if found.outcome == "passed":
        keep(item.config.stash[NUMBERS].setdefault(found.exercise, {}), MEASURED)
    probe_failed = call.excinfo is not None and isinstance(call.excinfo.value, ProbeFailed)  # our traceback is no help
    if report.failed and (probe_failed or item.config.option.tbstyle in ("auto", "no")):
        report.longrepr = found.message
    if found.reason == "unwritten":
        report.unwritten = True  # type: ignore[attr-defined]
    if probe_failed:
        report.when = "call"  # a fixture may have run the probe: report a failure of the test, not an error
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_report_teststatus(report: Any, config: pytest.Config) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    """Count tests of stubs as "not attempted" instead of failed. --tb=short shows each."""
    if getattr(report, "unwritten", False) and report.when == "call" and config.option.tbstyle == "no":
        return "not attempted", "·", ("NOT ATTEMPTED", {"yellow": True})
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    from .progress import store_progress
    from .summary import write, write_inline

    results = config.stash[RESULTS]
    if results and config.option.inline:
        write_inline(terminalreporter, results)
    elif results:
        ran = Counter(r.exercise for r in results)
        failed = {r.exercise for r in results if r.outcome == "failed"}
        selected = config.stash[SELECTED]
        partial = {id: (n, selected[id]) for id, n in ran.items() if n < selected[id] and id not in failed}
        write(terminalreporter, results, config, partial)  # an interrupted exercise has not passed
        digests = {id: files for id, files in config.stash.get(DIGESTS, {}).items() if id in ran and id not in partial}
        store_progress(results, digests, {id: list(m.values()) for id, m in config.stash[NUMBERS].items()})
