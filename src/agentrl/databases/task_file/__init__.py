"""Task files: rows of JSONL, JSON or Parquet, checked as a whole before anything is stored.

file_rows.py   a file as a stream of rows, whatever its format
task_line.py   what a row says: our own layout, or the one of verl's datasets
reader.py      all rows of a file, and all mistakes in it at once
checked.py     a check that goes on while the run has begun, and that is not done twice
task_rows.py   any row of a file by its number, without the others
"""

from agentrl.databases.task_file.checked import checked_by, go_on, keep_check, known_check
from agentrl.databases.task_file.reader import (
    TaskCheck,
    TaskFile,
    TaskFileError,
    TaskKind,
    TaskLook,
    read_tasks,
    scan_tasks,
)
from agentrl.databases.task_file.task_line import DEFAULT_SCORER, TaskLine
from agentrl.databases.task_file.task_rows import TaskRows, known_digest, open_tasks

__all__ = [
    "DEFAULT_SCORER",
    "TaskCheck",
    "TaskFile",
    "TaskFileError",
    "TaskKind",
    "TaskLine",
    "TaskLook",
    "TaskRows",
    "checked_by",
    "go_on",
    "keep_check",
    "known_check",
    "known_digest",
    "open_tasks",
    "read_tasks",
    "scan_tasks",
]
