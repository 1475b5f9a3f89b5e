"""All tasks of a file, checked: all bad rows are reported at once, each with its place."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from agentrl.databases.scorer_notation import parse_scorer, write_scorer
from agentrl.databases.task_file.file_rows import Row, UnreadableFile, read_rows
from agentrl.databases.task_file.task_line import TaskLine, misspelt_fields, parse_task

_SHOWN_MISTAKES = 20


class TaskFileError(ValueError):
    """A task file cannot be used. The message names each bad row."""

    @classmethod
    def of(cls, mistakes: Sequence[str]) -> Self:
        """The error that tells of them all, or of as many as can be read."""
        more = len(mistakes) - _SHOWN_MISTAKES
        rest = [f"... and {more} more"] if more > 0 else []
        return cls("\n".join([*mistakes[:_SHOWN_MISTAKES], *rest]))


@dataclass(frozen=True)
class TaskFile:
    """What a task file holds.

    `tasks`: its good rows, in its order; `rows`: the place of each in the file, as "line 3".
    `mistakes`: a sentence for each bad row. `doubts`: what is no mistake and hardly meant, a
    sentence each: fields that are near to one of ours, which the row has not.
    """

    path: Path
    tasks: list[TaskLine] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def without_mistakes(self) -> list[TaskLine]:
        """Its tasks. Raises `TaskFileError` if there is any mistake."""
        if self.mistakes:
            raise TaskFileError.of([*self.mistakes, *self.doubts])
        return self.tasks


def read_tasks(path: Path) -> list[TaskLine]:
    """All tasks of a JSONL, JSON or Parquet file, in its order.

    Names of the samplers' side are not looked at. Raises `TaskFileError` with every bad row at
    once: not JSON, no `query`, an `id` twice, a field of the wrong type.
    """
    return scan_tasks(path).without_mistakes()


def scan_tasks(
    path: Path,
    known_scorers: Collection[str] | None = None,
    known_schemas: Collection[str] | None = None,
    known_agents: Collection[str] | None = None,
) -> TaskFile:
    """A JSONL, JSON or Parquet file with all that is wrong in it.

    Scorers, schemas and agents are names of the samplers' side; None leaves them unchecked.

    Raises `TaskFileError` if it cannot be read at all, or holds nothing.
    """
    known = {"scorer": known_scorers, "answer_schema": known_schemas, "agent_name": known_agents}
    file = TaskFile(path)
    first_rows: dict[str, str] = {}
    near: dict[tuple[str, str], list[int]] = {}  # the rows, by number
    try:
        for row in read_rows(path):
            place = f"{row.unit} {row.number}"
            problems = []
            task = None
            try:
                task = _task(row)
                if first_rows.setdefault(task.id, place) != place:
                    problems.append(f"id {task.id!r} is already in {first_rows[task.id]}")
            except ValueError as error:
                problems.append(str(error))
            problems += _unknown_names(row.fields, known)
            if problems:
                file.mistakes.append(f"{row.place_in(path)}: {'; '.join(problems)}")
                continue
            assert task is not None
            file.tasks.append(task)
            file.rows.append(place)
            for pair in misspelt_fields(row.fields):
                near.setdefault(pair, []).append(row.number)
    except UnreadableFile as error:
        raise TaskFileError(f"task file {path} {error}") from None
    if not file.tasks and not file.mistakes:
        raise TaskFileError(f"task file {path} holds no task")
    file.doubts.extend(
        f"{replace(row, number=rows[0]).place_in(path)}: is the field `{name}` meant to be "
        f"`{ours}`? It is kept as one of your own"
        f"{f' (so in {len(rows)} {row.unit}s)' if len(rows) > 1 else ''}"
        for (name, ours), rows in near.items()
    )
    return file


def _task(row: Row) -> TaskLine:
    """The task of a row. Raises ValueError."""
    if row.problem is not None:
        raise ValueError(row.problem)
    return parse_task(row.fields, row.number)


def _unknown_names(
    fields: Mapping[str, Any], known: Mapping[str, Collection[str] | None]
) -> Iterator[str]:
    """What a row names that is not there. Names that cannot be read are told with the row."""
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
