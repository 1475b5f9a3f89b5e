"""Task files: what is taken, and how all mistakes are told at once."""

from pathlib import Path

import pytest

from agentrl.databases.task_file import TaskFileError, read_tasks

SCORERS, SCHEMAS = {"agentcpm", "math"}, {"answer", "boxed"}


def write(folder: Path, *lines: str) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_a_line_keeps_what_it_holds(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"query": "q\u2028?", "answer": 7}',
        "",
        '{"id": 5, "query": "r", "scorer": "math", "answer_schema": "boxed", "level": 3}',
    )
    first, second = read_tasks(path, SCORERS, SCHEMAS)
    assert (first.id, first.query, first.answer, first.scorer) == ("1", "q\u2028?", "7", "agentcpm")
    assert (second.id, second.answer, second.fields) == ("5", None, {"level": 3})


def test_all_bad_lines_are_named_with_their_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"id": "a", "query": "fine"}',
        "{not json",
        '{"id": "b"}',
        '{"id": "a", "query": "again"}',
        '{"query": "q", "scorer": "vibes"}',
        '{"query": "q", "answer_schema": "xml"}',
        "[1]",
        '{"query": "q", "answer": {"x": 1}}',
    )
    with pytest.raises(TaskFileError) as error:
        read_tasks(path, SCORERS, SCHEMAS)
    lines = str(error.value).split("\n")
    assert [line.split(":")[1] for line in lines] == ["2", "3", "4", "5", "6", "7", "8"]
    assert "no `query`" in lines[1] and "already in line 1" in lines[2]
    assert "known: agentcpm, math" in lines[3] and "known: answer, boxed" in lines[4]


def test_a_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="cannot be read"):
        read_tasks(tmp_path / "none.jsonl", SCORERS, SCHEMAS)
    with pytest.raises(TaskFileError, match="holds no task"):
        read_tasks(write(tmp_path, ""), SCORERS, SCHEMAS)
