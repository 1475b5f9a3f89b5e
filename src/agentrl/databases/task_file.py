"""Task files: JSONL, one task a line, checked as a whole before anything is stored.

    {"id": "a1", "query": "...", "answer": "...", "scorer": "math", "answer_schema": "boxed"}

`query` is required. `id` defaults to the line number. Further fields are kept with the task.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.databases.scorer_notation import parse_scorer, write_scorer

DEFAULT_SCORER = "agentcpm"
_OWN_FIELDS = ("id", "query", "answer", "scorer", "answer_schema")
_SHOWN_ERRORS = 20


class TaskFileError(ValueError):
    """A task file cannot be used. The message names each bad line."""


@dataclass(frozen=True)
class TaskLine:
    """One line of a task file."""

    id: str
    query: str
    answer: str | None = None
    scorer: str = DEFAULT_SCORER
    answer_schema: str | None = None
    fields: dict[str, Any] = field(default_factory=dict)


def read_tasks(
    path: Path,
    known_scorers: Collection[str] | None = None,
    known_schemas: Collection[str] | None = None,
) -> list[TaskLine]:
    """All tasks of a file, in its order.

    Scorers and schemas are names of the samplers' side; None leaves them unchecked.

    Raises `TaskFileError` with every bad line at once: not JSON, no `query`, an `id` twice, an
    unknown scorer or schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TaskFileError(f"task file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise TaskFileError(f"task file {path} is not UTF-8 text: {error}") from None
    tasks: list[TaskLine] = []
    errors: list[str] = []
    first_line: dict[str, int] = {}
    # Not splitlines(): U+2028 and its like may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            task = _parse(line, number, known_scorers, known_schemas)
        except ValueError as error:
            errors.append(f"{path}:{number}: {error}")
            continue
        if task.id in first_line:
            errors.append(
                f"{path}:{number}: id {task.id!r} stands already in line {first_line[task.id]}"
            )
            continue
        first_line[task.id] = number
        tasks.append(task)
    if errors:
        more = len(errors) - _SHOWN_ERRORS
        shown = errors[:_SHOWN_ERRORS] + ([f"... and {more} more"] if more > 0 else [])
        raise TaskFileError("\n".join(shown))
    if not tasks:
        raise TaskFileError(f"task file {path} holds no task")
    return tasks


def _parse(
    line: str,
    number: int,
    known_scorers: Collection[str] | None,
    known_schemas: Collection[str] | None,
) -> TaskLine:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"not a JSON object but a {type(fields).__name__}")
    query = fields.get("query")
    if not isinstance(query, str) or not query.strip():
        raise ValueError("has no `query` (a text that is not empty)")
    scorer = write_scorer(fields.get("scorer", DEFAULT_SCORER))
    for name in parse_scorer(scorer):
        if known_scorers is not None and name not in known_scorers:
            raise ValueError(f"unknown scorer {name!r}; known: {', '.join(sorted(known_scorers))}")
    schema = fields.get("answer_schema")
    if schema is not None and known_schemas is not None and schema not in known_schemas:
        raise ValueError(
            f"unknown answer_schema {schema!r}; known: {', '.join(sorted(known_schemas))}"
        )
    answer = fields.get("answer")
    if answer is not None and not isinstance(answer, str | int | float):
        raise ValueError(f"`answer` is a {type(answer).__name__}, not a text")
    return TaskLine(
        id=str(fields.get("id", number)),
        query=query,
        answer=None if answer is None else str(answer),
        scorer=scorer,
        answer_schema=schema,
        fields={key: value for key, value in fields.items() if key not in _OWN_FIELDS},
    )
