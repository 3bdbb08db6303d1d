"""In a sandbox, ranks reach each other only through the switch; without one, the same probes find other channels."""

import io
import secrets
from pathlib import Path

import pytest

from lab.course.assignment import ROOT
from lab.ranks import alone

from . import probes_apart as probes
from .boxes import runner_in
from .probes import litter

IMPL = ROOT / "reference"
# These fail for root, or in some kernels and containers. Each has found the word on some machine. Without a sandbox,
# the working folder is pytest's.
MAY_FAIL = {"a file in any folder that can be written", "a terminal", "a file in the working folder"}


@pytest.fixture(scope="module")
def boxed():
    with runner_in("bubblewrap", IMPL) as runner:
        yield runner
        notes = list(runner.executor.notes)
    assert not [note for note in notes if "ranks" in note], notes


@pytest.mark.parametrize("way", probes.CHANNELS)
def test_sandbox_closes_channel_between_ranks(boxed, way):
    _, found = boxed.run(probes.meet, way, world=2)
    assert found, f"{way}: it was not looked for"
    assert found != "found", f"{way}: expected nothing to be found"


@pytest.mark.parametrize("way", sorted(probes.CHANNELS.keys() - MAY_FAIL))
def test_channel_between_ranks_is_open_without_sandbox(runner, way):
    """This checks the probes. Without a sandbox they must find the word."""
    try:
        _, found = runner.run(probes.meet, way, world=2)
    finally:
        for folder in ("/tmp", "/dev/shm"):
            Path(folder, probes.NAME).unlink(missing_ok=True)
    assert found == "found", f"{way}: {found}"


def test_probe_finds_no_files_of_earlier_probe(boxed):
    for _ in range(3):
        assert [f for f in boxed.run(litter) if f in ("mine", "hoard")] == []


def test_ranks_share_no_descriptor(boxed):
    first, second = boxed.run(probes.descriptors, world=2)
    assert not [file for file in first if file in second], (first, second)


def test_no_rank_holds_the_arguments_of_another(runner):
    """A rank's memory does not contain other ranks' arguments, since the zygote that forks ranks never had them."""
    prefix, suffixes = secrets.token_hex(8), [secrets.token_hex(8) for _ in range(3)]
    for rank, (given, found) in enumerate(
        runner.run(probes.search_memory, [prefix + suffix for suffix in suffixes], prefix, world=3)
    ):
        assert given == [prefix + suffixes[rank] if r == rank else None for r in range(3)]
        assert found == [suffixes[rank]], f"rank {rank}: expected its own alone, {found} of {suffixes}"


def test_rank_cannot_weaken_its_sandbox(boxed):
    for errors in boxed.run(probes.try_escapes, world=2):
        assert "nothing" not in errors.values(), errors


def test_ranks_share_a_folder_only_when_probe_requests_it(boxed, runner):
    for either in (boxed, runner):
        assert either.run(probes.shared, world=2, folder={}) == ["", probes.WORD.decode()]
        with pytest.raises(Exception, match=r"folder=|No such file"):
            either.run(probes.shared, world=2)


def test_trace_reads_only_plain_files_of_shared_folder(boxed, runner):
    for either in (boxed, runner):
        (trace,) = either.trace(probes.litter, folder={"given": b"1"})
        assert trace.files.items() - {("locked", b"")} == {("given", b"1"), ("file", probes.WORD)}  # root reads locked
        assert either.run(probes.shared, world=2, folder={})[1] == probes.WORD.decode()


def test_mounts_below_a_kept_mount_are_left_out(monkeypatch):
    """Sorted by characters, /tmp/kit-out, a class next to the kit, stands between /tmp/kit and the kit's files."""
    paths = ["/", "/tmp", "/tmp/kit", "/tmp/kit/.venv", "/tmp/kit/.venv/lib/lab", "/tmp/kit-out/scratch", "/var"]
    lines = "\n".join(f"1 2 0:3 / {path} rw - tmpfs tmpfs rw" for path in paths)
    monkeypatch.setattr(alone, "open", lambda file: io.StringIO(lines), raising=False)
    monkeypatch.setattr(alone.os.path, "isdir", lambda path: True)
    assert alone._mounted_in("/tmp/") == ["/tmp/kit", "/tmp/kit-out/scratch"]
