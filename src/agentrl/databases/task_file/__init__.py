"""Task files: rows of JSONL, JSON or Parquet, checked as a whole before anything is stored.

file_rows.py   a file as a stream of rows, whatever its format
task_line.py   what a row says: our own layout, or the one of verl's datasets
reader.py      all rows of a file, and all mistakes in it at once
"""

from agentrl.databases.task_file.reader import TaskFile, TaskFileError, read_tasks, scan_tasks
from agentrl.databases.task_file.task_line import DEFAULT_SCORER, TaskLine

__all__ = [
    "DEFAULT_SCORER",
    "TaskFile",
    "TaskFileError",
    "TaskLine",
    "read_tasks",
    "scan_tasks",
]
