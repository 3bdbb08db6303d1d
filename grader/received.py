"""Opens the archive of a whole class, as learning platforms offer it for download: an archive of archives or folders.

Names are checked and bytes are counted as in a student's archive, with limits for a class.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from lab.course.listing import some

from . import archives, layouts

METADATA = "submission_metadata.yml"  # Gradescope's: who handed in what, and when
_LIMITS = archives.UnpackLimits(files=100_000, total_bytes=4 << 30, file_bytes=64 << 20)


def is_class(path: Path) -> bool:
    """Whether an archive is no submission itself, and holds archives of submissions or Gradescope's list of them."""
    try:
        members = [m.parts for m in archives.open_source(path, _LIMITS).members() if m.parts]
        names = [parts[-1] for parts in members]
        if any(re.fullmatch(r"submission_\d+", part) for parts in members for part in parts[:-1]) and METADATA in names:
            return True  # of one submission, too
        if layouts.kind_of(path):
            return False
    except archives.SubmissionError:
        return False  # unpacking it as a submission says why
    return any(name == METADATA or layouts.is_archive(Path(name)) for name in names if not layouts.ignored(name))


def unpack(path: Path, into: Path, tell: Callable[[str], None]) -> Path:
    """Write what the archive of a class holds below the folder `into`; the folder that has the submissions.

    Raises SubmissionError when it is damaged or passes a limit; then nothing of it is left.
    """
    source = archives.open_source(path, _LIMITS)
    members = [m for m in source.members() if m.kind != "folder" and not any(map(layouts.ignored, m.parts))]
    wanted = {m.name: m.parts for m in members if m.kind == "file" and m.parts}
    if left_out := [m.shown for m in members if m.name not in wanted]:
        tell(f"{path.name}: left out for their names, or as links: {some(left_out)}")
    target = into / f"{path.name.partition('.')[0]}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    shutil.rmtree(target, ignore_errors=True)  # of the same archive, opened before
    try:
        if len(wanted) > _LIMITS.files:
            raise archives.SubmissionError(f"{path.name}: expected at most {_LIMITS.files} files; split it")
        for name, content in source.read(set(wanted)):
            file = target.joinpath(*wanted[name])
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
    except (OSError, archives.SubmissionError) as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, archives.SubmissionError):
            raise
        raise archives.SubmissionError(f"{path.name}: cannot be opened in {into}: {error.strerror}") from None
    while [*map(Path.is_dir, target.iterdir())] == [True]:  # platforms put a folder around the submissions
        (target,) = target.iterdir()
    return target
