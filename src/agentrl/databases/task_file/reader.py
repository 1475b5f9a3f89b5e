"""A task file, checked: all bad rows are reported at once, each with its place.

    scan_tasks, read_tasks    a whole file, with its tasks
    TaskCheck                 a file of any size, a piece at a time, without its tasks

A check stores the kinds of tasks (`TaskKind`), not the tasks, so its size does not grow with the
file. Rows with the same id are found after the last row.
"""

import math
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from agentrl.databases.scorer_notation import parse_scorer, write_scorer
from agentrl.databases.task_file.file_rows import Row, UnreadableFile, read_rows
from agentrl.databases.task_file.task_line import TaskLine, misspelt_fields, parse_task

_SHOWN_MISTAKES = 20
_MOST_MISTAKES = 1000  # reading stops after this number of mistakes
_PLACES = 5  # remembered places per kind

Names = Collection[str] | None
TaskLook = Callable[[TaskLine], str | None]


class TaskFileError(ValueError):
    """A task file cannot be used. The message names each bad row."""

    @classmethod
    def of(cls, mistakes: Sequence[str]) -> Self:
        """An error with the first `_SHOWN_MISTAKES` of `mistakes` and the number of the others."""
        more = len(mistakes) - _SHOWN_MISTAKES
        rest = [f"... and {more} more"] if more > 0 else []
        return cls("\n".join([*mistakes[:_SHOWN_MISTAKES], *rest]))


@dataclass
class TaskKind:
    """Tasks of a file with the same scorer, answer schema and agent, all with or without answer.

    `first`: the first of them. `rows`: their number. `places`: row number and place of the first
    few, such as (3, "line 3 (id a)").
    """

    first: TaskLine
    rows: int = 0
    places: list[tuple[int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class TaskFile:
    """The content of a task file.

    `n_tasks`: number of good rows. `mistakes`: a sentence for each bad row. `doubts`: a sentence
    for each field name that looks like a misspelling of one of ours. `tasks`: the good rows in
    order; empty for a `TaskCheck`.
    """

    path: Path
    n_tasks: int = 0
    kinds: Sequence[TaskKind] = ()
    mistakes: Sequence[str] = ()
    doubts: Sequence[str] = ()
    tasks: Sequence[TaskLine] = ()

    def without_mistakes(self) -> Sequence[TaskLine]:
        """The tasks. Raises `TaskFileError` if there are mistakes."""
        if self.mistakes:
            raise TaskFileError.of([*self.mistakes, *self.doubts])
        return self.tasks


def read_tasks(path: Path) -> Sequence[TaskLine]:
    """All tasks of a JSONL, JSON or Parquet file, in order.

    Names of scorers, schemas and agents are not checked. Raises `TaskFileError` that lists all bad
    rows: not JSON, no `query`, a repeated `id`, a field of the wrong type.
    """
    return scan_tasks(path).without_mistakes()


def scan_tasks(
    path: Path,
    known_scorers: Names = None,
    known_schemas: Names = None,
    known_agents: Names = None,
    look: TaskLook | None = None,
) -> TaskFile:
    """Read a JSONL, JSON or Parquet file: its tasks and all its mistakes.

    `known_scorers`, `known_schemas`, `known_agents`: allowed names; None: not checked. `look`: a
    further check of good rows, which returns what is wrong or None. Raises `TaskFileError` if the
    file cannot be read or has no tasks.
    """
    tasks: list[TaskLine] = []

    def keep(task: TaskLine) -> str | None:
        wrong = look(task) if look is not None else None
        if wrong is None:
            tasks.append(task)
        return wrong

    check = TaskCheck(path, known_scorers, known_schemas, known_agents, keep)
    check.advance()
    return replace(check.found, tasks=tasks)


class TaskCheck:
    """An incremental check of a file. The arguments are those of `scan_tasks`."""

    def __init__(
        self,
        path: Path,
        known_scorers: Names = None,
        known_schemas: Names = None,
        known_agents: Names = None,
        look: TaskLook | None = None,
    ) -> None:
        self.path = path
        self.complete = False
        self._known: dict[str, Names] = {
            "scorer": known_scorers, "answer_schema": known_schemas, "agent_name": known_agents,
        }  # fmt: skip
        self._look = look
        self._rows = read_rows(path)
        self._read = 0
        self._n_tasks = 0
        self._ids, self._numbers = array("q"), array("q")  # hashes of ids, and row numbers
        self._kinds: dict[tuple[object, ...], TaskKind] = {}
        self._mistakes: list[tuple[int, str]] = []
        self._near: dict[tuple[str, str], tuple[str, int, str]] = {}

    @property
    def found(self) -> TaskFile:
        """The result so far."""
        return TaskFile(
            self.path,
            self._n_tasks,
            list(self._kinds.values()),
            [sentence for _, sentence in sorted(self._mistakes)],
            list(self._doubts()),
        )

    def advance(self, seconds: float = math.inf) -> bool:
        """Read on for about `seconds`; returns whether the check is complete.

        Raises `TaskFileError` if the file cannot be read or has no tasks.
        """
        ends = time.monotonic() + seconds
        try:
            while not self.complete:
                row = next(self._rows, None)
                if row is None or len(self._mistakes) >= _MOST_MISTAKES:
                    self._end()
                else:
                    self._take(row)
                if time.monotonic() >= ends:
                    break
        except UnreadableFile as error:
            raise TaskFileError(f"task file {self.path} {error}") from None
        return self.complete

    def _take(self, row: Row) -> None:
        self._read += 1
        problems = []
        task = None
        try:
            task = task_of_row(row)
        except ValueError as error:
            problems.append(str(error))
        problems += _unknown_names(row.fields, self._known)
        if task is not None:
            self._ids.append(hash(task.id))
            self._numbers.append(row.number)
            if not problems and self._look is not None and (said := self._look(task)) is not None:
                problems.append(said)
        if problems:
            self._mistakes.append((row.number, f"{row.place_in(self.path)}: {'; '.join(problems)}"))
            return
        assert task is not None
        self._n_tasks += 1
        names = (task.scorer, task.answer_schema, task.agent_name, task.answer is None)
        kind = self._kinds.setdefault(names, TaskKind(task))
        kind.rows += 1
        if len(kind.places) < _PLACES:
            kind.places.append((row.number, f"{row.unit} {row.number} (id {task.id})"))
        for pair in misspelt_fields(row.fields):
            first, count, unit = self._near.get(pair, (row.place_in(self.path), 0, row.unit))
            self._near[pair] = (first, count + 1, unit)

    def _end(self) -> None:
        self._mistakes += self._repeated_ids()
        if not self._read:
            raise TaskFileError(f"task file {self.path} holds no task")
        self.complete = True

    def _repeated_ids(self) -> Iterator[tuple[int, str]]:
        """Row number and sentence for each row that repeats an earlier id.

        Only hashes of ids are in memory: a million ids as text take ten times as much. Rows with
        equal hashes are read again.
        """
        hashes, numbers = np.array(self._ids), np.array(self._numbers)
        values, counts = np.unique(hashes, return_counts=True)
        if len(values) == len(hashes):
            return
        suspects = set(numbers[np.isin(hashes, values[counts > 1])].tolist())
        first: dict[str, str] = {}
        for row in read_rows(self.path):
            if row.number not in suspects:
                continue
            task, place = task_of_row(row), f"{row.unit} {row.number}"
            if first.setdefault(task.id, place) != place:
                yield (
                    row.number,
                    f"{row.place_in(self.path)}: id {task.id!r} is already in {first[task.id]}",
                )

    def _doubts(self) -> Iterator[str]:
        for (name, ours), (place, rows, unit) in self._near.items():
            yield (
                f"{place}: is the field `{name}` meant to be `{ours}`? It is kept as one of your "
                f"own{f' (so in {rows} {unit}s)' if rows > 1 else ''}"
            )


def task_of_row(row: Row) -> TaskLine:
    """The task of a row. Raises ValueError for a bad row."""
    if row.problem is not None:
        raise ValueError(row.problem)
    return parse_task(row.fields, row.number)


def _unknown_names(
    fields: Mapping[str, Any], known: Mapping[str, Collection[str] | None]
) -> Iterator[str]:
    """Sentences on unknown names in a row. `parse_task` reports names that cannot be parsed."""
    for field_name, names in known.items():
        value = fields.get(field_name)
        if value is None or names is None:
            continue
        try:
            used = parse_scorer(write_scorer(value)) if field_name == "scorer" else (value,)
        except ValueError:
            continue
        for name in used:
            if isinstance(name, str) and name not in names:
                yield f"unknown {field_name} {name!r}; known: {', '.join(sorted(names))}"
