"""All tasks of a file, checked: every bad row is told at once, with its place."""

from collections.abc import Collection, Mapping
from pathlib import Path

from agentrl.databases.scorer_notation import parse_scorer
from agentrl.databases.task_file.rows import Row, UnreadableFile, read_rows
from agentrl.databases.task_file.task_line import TaskLine, parse_task

_SHOWN_ERRORS = 20


class TaskFileError(ValueError):
    """A task file cannot be used. The message names each bad row."""


def read_tasks(
    path: Path,
    known_scorers: Collection[str] | None = None,
    known_schemas: Collection[str] | None = None,
    known_agents: Collection[str] | None = None,
) -> list[TaskLine]:
    """All tasks of a JSONL, JSON or Parquet file, in its order.

    Scorers, schemas and agents are names of the samplers' side; None leaves them unchecked.

    Raises `TaskFileError` with every bad row at once: not JSON, no `query`, an `id` twice, a field
    of the wrong type, an unknown scorer, schema or agent.
    """
    known = {"scorer": known_scorers, "answer_schema": known_schemas, "agent_name": known_agents}
    tasks: list[TaskLine] = []
    errors: list[str] = []
    first_places: dict[str, str] = {}
    try:
        for row in read_rows(path):
            try:
                task = _task(row, known)
                place = f"{row.unit} {row.number}"
                if first_places.setdefault(task.id, place) != place:
                    raise ValueError(f"id {task.id!r} stands already in {first_places[task.id]}")
            except ValueError as error:
                errors.append(f"{row.place_in(path)}: {error}")
            else:
                tasks.append(task)
    except UnreadableFile as error:
        raise TaskFileError(f"task file {path} {error}") from None
    if errors:
        more = len(errors) - _SHOWN_ERRORS
        shown = errors[:_SHOWN_ERRORS] + ([f"... and {more} more"] if more > 0 else [])
        raise TaskFileError("\n".join(shown))
    if not tasks:
        raise TaskFileError(f"task file {path} holds no task")
    return tasks


def _task(row: Row, known: Mapping[str, Collection[str] | None]) -> TaskLine:
    """The task of a row, with names that are known. Raises ValueError."""
    if row.problem is not None:
        raise ValueError(row.problem)
    task = parse_task(row.fields, row.number)
    used = (
        *(("scorer", name) for name in parse_scorer(task.scorer)),
        ("answer_schema", task.answer_schema),
        ("agent_name", task.agent_name),
    )
    for field, name in used:
        names = known[field]
        if name is not None and names is not None and name not in names:
            raise ValueError(f"unknown {field} {name!r}; known: {', '.join(sorted(names))}")
    return task
