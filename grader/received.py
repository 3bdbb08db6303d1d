"""Unpacks the archive of a whole class from a learning platform: an archive of archives or folders.

Names and sizes are checked as in a student's archive, with higher limits.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from lab.course.listing import some

from . import archives, layouts

METADATA = "submission_metadata.yml"  # Gradescope's list of submissions, with students and times
_LIMITS = archives.UnpackLimits(files=100_000, total_bytes=4 << 30, file_bytes=64 << 20)


def is_class(path: Path) -> bool:
    """Whether an archive holds a whole class (archives of submissions, or Gradescope's list), not one submission."""
    try:
        members = [m.parts for m in archives.open_source(path, _LIMITS).members() if m.parts]
        names = [parts[-1] for parts in members]
        if any(re.fullmatch(r"submission_\d+", part) for parts in members for part in parts[:-1]) and METADATA in names:
            return True  # also if the class has only one submission
        if layouts.kind_of(path):
            return False
    except archives.SubmissionError:
        return False  # unpacking it as a submission will report the reason
    return any(name == METADATA or layouts.is_archive(Path(name)) for name in names if not layouts.ignored(name))


def unpack(path: Path, folder: Path, report: Callable[[str], None]) -> Path:
    """Unpack the archive of a class below `folder`; return the folder that contains the submissions.

    Raises SubmissionError if it is damaged or exceeds a limit, and then removes what was unpacked.
    """
    source = archives.open_source(path, _LIMITS)
    members = [m for m in source.members() if m.kind != "folder" and not any(map(layouts.ignored, m.parts))]
    wanted = {m.name: m.parts for m in members if m.kind == "file" and m.parts}
    if left_out := [m.shown for m in members if m.name not in wanted]:
        report(f"{path.name}: left out for their names, or as links: {some(left_out)}")
    target = folder / f"{path.name.partition('.')[0]}-{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    shutil.rmtree(target, ignore_errors=True)  # from an earlier call with the same archive
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
        raise archives.SubmissionError(f"{path.name}: cannot be opened in {folder}: {error.strerror}") from None
    while [*map(Path.is_dir, target.iterdir())] == [True]:  # platforms put a folder around the submissions
        (target,) = target.iterdir()
    return target
