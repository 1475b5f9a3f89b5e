"""The result of a complete check of a task file, stored under the digest of its content.

The check of a large file continues while the run starts (`go_on`). A resumed run does not repeat
it: `known_check` returns the stored result.
"""

import asyncio
import hashlib
from collections.abc import Collection
from pathlib import Path

import bson

from agentrl.databases.task_file.reader import TaskCheck, TaskFile, TaskKind
from agentrl.databases.task_file.task_line import TaskLine
from agentrl.databases.task_file.task_rows import known_digest
from agentrl.whole_file import write_whole

_SLICE_S = 0.005  # the longest time that a check blocks the event loop


def checked_by(*names: Collection[str]) -> str:
    """An identifier of the check of names against `names` (scorers, schemas, agents)."""
    told = repr([sorted(each) for each in names])
    return hashlib.sha256(told.encode()).hexdigest()[:8]


async def go_on(check: TaskCheck, share: float = 0.25) -> TaskFile:
    """Read a file to its end, using `share` of this thread's time; returns what was found.

    Raises `TaskFileError` if the file becomes unreadable.
    """
    while not check.advance(_SLICE_S):
        await asyncio.sleep(_SLICE_S * (1 / share - 1))
    return check.found


def known_check(path: Path, folder: Path, by: str | None = None) -> TaskFile | None:
    """The result of an earlier complete check of this content without mistakes; None if none.

    `by`: only of the check with this identifier (`checked_by`); None: of any check.
    """
    digest = known_digest(path, folder)
    for file in sorted(folder.glob(f"{digest}-{by or '*'}.checked")):
        found = bson.decode(file.read_bytes())
        kinds = [
            TaskKind(TaskLine(**kind["first"]), kind["rows"], [(n, p) for n, p in kind["places"]])
            for kind in found["kinds"]
        ]
        return TaskFile(path, found["n_tasks"], kinds, doubts=found["doubts"])
    return None


def keep_check(found: TaskFile, folder: Path, by: str) -> None:
    """Keep the result of a complete check, if it has no mistakes and `folder` exists."""
    if found.mistakes or not folder.is_dir():
        return
    kinds = [
        {"first": vars(kind.first), "rows": kind.rows, "places": kind.places}
        for kind in found.kinds
    ]
    content = {"n_tasks": found.n_tasks, "kinds": kinds, "doubts": list(found.doubts)}
    digest = known_digest(found.path, folder)
    with write_whole(folder / f"{digest}-{by}.checked") as partial:
        partial.write_bytes(bson.encode(content))
