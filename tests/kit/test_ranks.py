"""The harness that runs probes: new child processes, ranks, the ledger, and a clear message for each way to end."""

import dataclasses
import os
import socket
import subprocess
import sys
import time

import psutil
import pytest

from lab.cluster.costs import Link
from lab.course.assignment import ROOT
from lab.harness.executor import PATHS
from lab.harness.runner import ProbeFailed
from lab.ranks.switch import Switch
from lab.solution import framing, wire
from lab.solution.framing import FORGED

from . import probes, toy


def failure(runner, *args, **options) -> ProbeFailed:
    with pytest.raises(ProbeFailed) as caught:
        runner.run(*args, **options)
    return caught.value


def test_every_probe_gets_a_fresh_process(runner):
    assert [runner.run(probes.counter) for _ in range(3)] == [1, 1, 1]
    assert runner.run(probes.rank_and_world, world=3) == [[0, 3], [1, 3], [2, 3]]


def test_rank_output_is_merged_when_equal_and_labelled_otherwise(runner):
    runner.printed = ""
    runner.run(probes.print_text, "fine", world=2)
    runner.run(probes.print_text, "", world=2)
    runner.run(probes.warn, "two\nlines")
    *printed, warning = runner.printed.splitlines()
    assert printed == ["fine", "rank 0: this is 0", "rank 1: this is 1"]
    assert warning.partition(": ")[2] == "UserWarning: two lines"


@pytest.mark.parametrize(
    ("claimed", "knowing", "reason"),
    [("kit", True, "crashed"), ("assertion", True, "crashed"), ("nonsense", True, "crashed"),
     ("assertion", False, "refused")],
)  # fmt: skip
def test_forged_replies_are_refused_or_reported_as_crashed(runner, claimed, knowing, reason):
    error = failure(runner, probes.forge_reply, claimed, knowing)
    assert error.reason == reason
    assert knowing or FORGED in error.text


@pytest.mark.parametrize(
    ("how", "reason", "words"),
    [
        ("segfault", "crashed", "SIGSEGV"),
        ("exit", "crashed", "code 0"),
        ("system-exit", "raised", "enough"),
        ("subclass", "refused", "cannot be sent"),
        ("garbage", "refused", "answer"),
    ],
)
def test_misbehaving_probe_gets_a_reason_and_next_probe_runs(runner, how, reason, words):
    error = failure(runner, probes.misbehave, how)
    assert error.reason == reason
    assert words in error.text
    assert how != "system-exit" or "said before the end" in error.output
    assert runner.run(probes.misbehave, "print") == "fine", "what it prints is kept, and cut"


@pytest.mark.parametrize("how", ["spin", "sleep"])
def test_hanging_probe_is_stopped_and_its_stack_reported(runner, how):
    start = time.monotonic()
    error = failure(runner, probes.misbehave, how, timeout=1.0)
    assert time.monotonic() - start < 10
    assert error.reason == "hung"
    assert "misbehave" in error.stacks


@pytest.fixture
def crowded():
    """crowded(n) keeps a core busy with n processes, and returns the core's number."""
    if not os.path.exists("/proc/self/schedstat"):
        pytest.skip("this system does not say how long a process waited for a core")
    core, others = max(os.sched_getaffinity(0)), []

    def crowd(count: int) -> int:
        for _ in range(count):
            others.append(subprocess.Popen(["sh", "-c", "while :; do :; done"], start_new_session=True))
            os.sched_setaffinity(others[-1].pid, {core})
        return core

    yield crowd
    for other in others:
        other.kill()
        other.wait()


def test_time_spent_waiting_for_a_core_is_no_part_of_the_limit(runner, crowded):
    core = crowded(5)
    runner.spent_s = 0.0
    took_s = runner.run(probes.work, core, 0.5, timeout=1.0)
    assert took_s > 1.0, "the core was not crowded"
    assert runner.spent_s < took_s - 0.5
    assert failure(runner, probes.work, core, 9.0, timeout=0.5).reason == "hung"


def test_probe_without_a_core_is_busy_and_wastes_little_time(runner, crowded):
    core = crowded(16)
    error = failure(runner, probes.work, core, 0.35, timeout=0.4, exercise="ddp.naive")
    assert (error.reason, error.text[:20]) == ("busy", "the machine was busy")
    assert runner.wasted_s["ddp.naive"] < 2.0


@pytest.fixture
def spinning(runner):
    """The zygote, and two ranks that never end."""
    zygote = runner.warm()
    zygote.wait()
    job = runner.job(probes.misbehave, world=2)
    with Switch(2) as switch:
        socket.send_fds(zygote.requests, [framing.PROBE], [end.fileno() for end in switch.ends])
        framing.send(zygote.requests.fileno(), dataclasses.asdict(job), [wire.pack(("spin",))])
        parent = psutil.Process(zygote.process.pid)
        while len(ranks := parent.children()) < 2:
            pass  # no pause, since a child can be lost between a fork and its registration
        yield parent, ranks
        runner.close()  # before the switch, since ranks that lose the switch end by themselves


def test_closing_the_runner_ends_forked_ranks(runner, spinning):
    runner.close()  # as Ctrl-C does
    assert not any(rank.is_running() for rank in spinning[1])


def test_probe_environment_does_not_mention_pytest(runner, monkeypatch):
    for name, value in {"_": "/bin/pytest", "ASKED_BY": "PyTest 9", "PYTEST_VERSION": "9", "OTHER": "kept"}.items():
        monkeypatch.setenv(name, value)
    runner.close()  # so that the next probe starts a process in this environment
    seen = runner.run(probes.environment)
    assert {"PATH", "OTHER"} <= seen.keys()
    assert [n for n in seen if n not in PATHS and "pytest" in f"{n}={seen[n]}".replace(str(ROOT), "").lower()] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a process with its parent on Linux alone")
def test_ranks_end_when_the_zygote_is_killed(runner, spinning):
    parent, ranks = spinning
    while any(os.getpgid(rank.pid) != rank.pid for rank in ranks):
        time.sleep(0.01)  # until the ranks have started
    time.sleep(0.1)
    parent.kill()
    assert toy.outlived(ranks, 5.0) == []
    assert failure(runner, probes.counter).reason == "crashed"
    assert runner.run(probes.counter) == 1, "a lost process costs one probe"


FORM = "the test could not use the value that your code returned"


@pytest.mark.parametrize(
    ("source", "reason", "words"),
    [
        ("def step():\n    return 1 / 0\n", "raised", ("ZeroDivisionError", "ddp/naive.py:2")),
        ("import not_there\n", "import", ("not_there",)),
        ("def step(:\n", "import", ("ddp/naive.py", "line 1")),
        ("raise SystemExit(0)\n", "import", ("SystemExit",)),
        ('def step():\n    raise NotImplementedError("ddp.naive: write it")\n', "unwritten", ("ddp.naive",)),
        ("def step():\n    return None.items\n", "raised", ("has no attribute 'items'",)),
        ("def step():\n    pass\n", "raised", (f"has no attribute 'items': {FORM}",)),
        ("def other():\n    pass\n", "raised", (f"has no attribute 'step': {FORM}",)),
    ],
)
def test_probe_failures_report_cause_and_location(solution, source, reason, words):
    error = failure(solution(source), probes.items_of, exercise="ddp.naive")
    assert error.reason == reason
    for word in words:
        assert word in f"{error.text} {error.where}"
    assert (FORM in error.text) == (FORM in words[0])


def test_file_with_failed_import_is_not_run_again(solution):
    runner = solution("import time\ntime.sleep(0.3)\nimport not_there\n")
    failure(runner, probes.call, exercise="ddp.naive")
    start = time.monotonic()
    assert failure(runner, probes.call, exercise="ddp.naive").reason == "import"
    assert time.monotonic() - start < 0.2


@pytest.mark.parametrize("link", [None, Link(0.002)])
def test_mismatched_collectives_are_named_long_before_the_timeout(runner, link):
    start = time.monotonic()
    error = failure(runner, probes.mismatch, world=2, timeout=60, link=link)
    assert time.monotonic() - start < 20
    assert (error.reason, "in mismatch" in error.where) == ("raised", True)
    assert "rank 0 issued broadcast #1 (4 KiB, float32); rank 1 issued all_reduce #1 (4 KiB, float32)" in error.text


def test_locally_synchronized_groups_are_not_a_mismatch(runner):
    assert runner.run(probes.local_groups, world=4) == [2.0] * 4


def test_nothing_that_the_zygote_imports_starts_a_thread():
    """A forked child has only one thread, so code that waits for another thread would wait for ever."""
    probes = [
        p.relative_to(ROOT).with_suffix("") for p in (*ROOT.glob("tests/*/probes*.py"), *ROOT.glob("lab/standins/*.py"))
    ]
    code = (
        "import importlib, os, sys; from lab.ranks import zygote; zygote._warm()\n"
        "for name in sys.argv[1:]:\n    importlib.import_module(name)\n"
        "    assert os.listdir('/proc/self/task') == [str(os.getpid())], name"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *(".".join(p.parts).removesuffix(".__init__") for p in probes)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert len(probes) > 30
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("link", [None, Link(1e-4)])
def test_waits_for_futures_are_recorded_in_the_ledger(runner, link):
    for results in runner.run(probes.futures, world=2, link=link):
        assert all(got == [[2.0] * 3, -1.0, True] for got in results.values()), results


@pytest.mark.parametrize(
    ("probe", "arguments", "words"),
    [
        ("send_to_who_is_gone", (), r"rank 1 waits in send #0 \(16 B\) to rank 0 with tag 0; rank 0 finished"),
        ("broadcast_from", (2,), "expected one of the 2 ranks of the group, 0 … 1, got 2"),
        ("receive_from_itself", (), r"received from this rank itself, which is rank 0 of \[0, 1\]"),
        ("wait_twice", (), r"from rank 0 with tag 0 a second time: on Gloo, wait\(\) of a message"),
    ],
)
def test_invalid_communication_calls_are_reported(runner, probe, arguments, words):
    with pytest.raises(ProbeFailed, match=words):
        runner.run(getattr(probes, probe), *arguments, world=2, timeout=60)


@pytest.mark.parametrize("link", [None, Link(0.002)])
def test_deadlock_of_two_receiving_ranks_is_reported_as_hung(runner, link):
    with pytest.raises(ProbeFailed, match=r"rank 1 waits in recv #0 \(16 B\) from rank 0 with tag 0: each") as caught:
        runner.run(probes.receive_first, world=2, timeout=60, link=link)
    assert caught.value.reason == "hung"
    assert "receive_first" in caught.value.stacks


@pytest.mark.parametrize("reach", ["import_module('lab.cluster.costs')", "sys.modules['lab.cluster.' + 'costs']"])
def test_calls_into_forbidden_lab_modules_fail_as_forbidden(solution, reach):
    code = f"import sys\nfrom importlib import import_module\ndef step():\n    c = {reach}\n"
    for call in ("c.ring_cost('send', 8, 2, 0, 0)", "c.Link(1.0).cost_s('send', 8, 2)"):
        runner = solution(f"{code}    return {call}\n")
        assert failure(runner, probes.call, forbidden=["lab.cluster.costs"]).reason == "forbidden"
        assert runner.run(probes.call) == 1.0 * call.startswith("c.Link")
