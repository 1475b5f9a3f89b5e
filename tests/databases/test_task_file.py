"""Task files: what is taken of which format and layout, and how all mistakes are told at once."""

import asyncio
import json
import os
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentrl.databases.task_file import (
    TaskCheck,
    TaskFileError,
    TaskLine,
    checked_by,
    go_on,
    keep_check,
    known_check,
    known_digest,
    open_tasks,
    read_tasks,
    reader,
    scan_tasks,
    task_rows,
)
from agentrl.file_digest import file_digest

SCORERS, SCHEMAS, AGENTS = {"agentcpm", "math"}, {"answer", "boxed"}, {"tool_agent"}

# As verl's script for GSM8K with a tool agent writes them, through a table: every row has the keys
# of all rows.
TOOL_AGENT_ROWS: list[dict[str, Any]] = [
    {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [
            {"role": "system", "content": "You are a math expert."},
            {"role": "user", "content": "Natalia sold 48 clips, then half as many. How many?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}},
        },
    },
    {
        "data_source": "openai/gsm8k",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": "And 2 * 500?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1,000"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "need_tools_kwargs": True,
            "tools_kwargs": {"shell": {"create_kwargs": {"files": {"a": "b"}}}},
        },
    },
]


def write(folder: Path, *lines: str, name: str = "tasks.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_table(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path = folder / "tasks.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read(path: Path) -> list[TaskLine]:
    return scan_tasks(path, SCORERS, SCHEMAS, AGENTS).without_mistakes()


def read_one(folder: Path, row: Mapping[str, Any]) -> TaskLine:
    (task,) = read(write(folder, json.dumps(row)))
    return task


def test_a_line_keeps_what_it_holds(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"query": "q\u2028?", "answer": 7}',
        "",
        '{"id": 5, "query": "r", "scorer": "math", "answer_schema": "boxed", "level": 3}',
    )
    first, second = read(path)
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
        '{"query": "q", "agent_name": "nobody"}',
    )
    with pytest.raises(TaskFileError) as error:
        read(path)
    lines = str(error.value).split("\n")
    assert [line.split(":")[1] for line in lines] == ["2", "3", "4", "5", "6", "7", "8", "9"]
    assert "no `query`" in lines[1] and "already in line 1" in lines[2]
    assert "known: agentcpm, math" in lines[3] and "known: answer, boxed" in lines[4]
    assert "unknown agent_name 'nobody'; known: tool_agent" in lines[7]


def line_with(field: str, levels: int) -> str:
    """A line with lists in lists."""
    return f'{{"query": "q", "{field}": {"[" * levels + "]" * levels}}}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"query": "a\\ud800b"}', "`query` holds half a character"),
        ('{"query": "q", "answer": "\\udfff"}', "`answer` holds half a character"),
        ('{"query": "q", "id": "\\ud800"}', "`id` holds half a character"),
        ('{"query": "q", "own": [{"a": {"\\ud800": 1}}]}', "`own` holds half a character"),
        ('{"query": "q", "\\ud800": 1}', "`\\ud800` holds half a character"),
        ('{"query": "%s"}' % ("q" * 12_100_000), "has 12.1 MB, more than the 12 MB"),
        ('{"query": "q", "own": [{"n": 1180591620717411303424}]}',
         "`own` holds a whole number beyond 64 bits (1180591620717411303424): write it as a text"),
        ('{"query": "q", "own": {"a\\u0000b": 1}}', "`own` holds a key with a NUL character"),
        ('{"query": "q", "a\\u0000b": 1}', "holds a field with a NUL character in its name"),
        (line_with("scorer", 101), "`scorer` nests deeper than 100 levels"),
        (line_with("own", 900), "`own` nests deeper than 100 levels"),
        (line_with("own", 100_000), "nests deeper than 100 levels"),
        ('{"query": "q", "id": %s}' % ("9" * 5000), "holds a whole number of 5000 digits"),
        ('{"query": "q", "answer": NaN}', "holds NaN, which is not a JSON number"),
        ('{"query": "q", "own": [-Infinity]}', "holds -Infinity, which is not a JSON number"),
        ('{"query": "q", "answer": 1e999}',
         "holds 1e999, more than a number can hold: write it as a text"),
        ('{"query": "q", "own": {"a": [-1E400]}}', "holds -1E400, more than a number can hold"),
        ('{"query": "q", "query": "p"}',
         "holds the key 'query' 2 times in one object: keep one of them"),
        ('{"query": "q", "own": [{"a": 1, "b": 2, "a": 1}]}', "holds the key 'a' 2 times"),
        ('{"query": "q", "own": {"\\ud800": 1, "\\ud800": 1}}', "holds the key '\\ud800' 2 times"),
        ('{"query": "q", "id": ""}', "`id` is empty: give it a text, or leave it out"),
        ('{"query": "q", "id": " \\t"}', "`id` is empty: give it a text, or leave it out"),
        ('{"query": "q", "id": true}', "`id` is a bool, not a text or a whole number"),
    ],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_what_no_database_keeps_is_a_mistake_of_its_line(
    tmp_path: Path, line: str, said: str
) -> None:
    good = line_with("own", 99).replace('"q"', '"\\ud83d\\ude00"')
    file = scan_tasks(write(tmp_path, good, line, good))
    (mistake,) = file.mistakes
    assert mistake.startswith(f"{file.path}:2: {said}") and mistake.isprintable()
    assert [task.query for task in file.tasks] == ["\U0001f600"] * 2


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[NaN]", f"[{'9' * 5000}]", "[1e400]", '[{"a": 1, "a": 2}]'],
    ids=lambda text: text[:5],
)
def test_a_list_that_no_database_keeps_is_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(
        TaskFileError, match=r"nests deeper|holds NaN|of 5000 digits|holds 1e400|holds the key 'a'"
    ):
        read(write(tmp_path, text))


@pytest.mark.parametrize("text", ['{"query": "q"}', '[{"query": "q"}]'])
def test_the_mark_that_an_editor_put_before_the_text_is_no_part_of_it(
    tmp_path: Path, text: str
) -> None:
    (task,) = read(write(tmp_path, "\ufeff" + text))
    assert task.query == "q"


def test_all_that_is_wrong_in_one_line_is_told(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"id": [1], "question": "q", "answer": [2], "scorer": "vibes", "agent_name": "nobody"}',
        '{"query": "q", "reward_model": "rule", "scorer": "math+"}',
    )
    with pytest.raises(TaskFileError) as error:
        read(path)
    first, second = str(error.value).split("\n")
    assert first == (
        f"{path}:1: has no `query` (a text that is not empty) and no `prompt`; it has `id`, "
        "`question`, `answer`, `scorer`, `agent_name`; `answer` is a list, not a text or a number; "
        "`id` is a list, not a text or a whole number; unknown scorer 'vibes'; known: agentcpm, "
        "math; unknown agent_name 'nobody'; known: tool_agent"
    )
    assert "`reward_model` is a str, not an object; scorer 'math+' is neither" in second
    assert second.count("reward_model") == 1


def test_only_so_many_mistakes_are_told_in_full(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError) as error:
        read(write(tmp_path, *["{not json"] * 25))
    lines = str(error.value).split("\n")
    assert len(lines) == 21 and lines[-1] == "... and 5 more"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("anwser", "answer"),
        ("answers", "answer"),
        ("Answer", "answer"),
        ("scorers", "scorer"),
        ("answer-schema", "answer_schema"),
        ("answerSchema", "answer_schema"),
        ("agent name", "agent_name"),
        ("ID", "id"),
        ("tool_kwargs", "tools_kwargs"),
    ],
)
def test_a_field_near_one_that_the_row_has_not_is_pointed_out_once_and_kept(
    tmp_path: Path, name: str, ours: str
) -> None:
    row = {"query": "q", name: "x"}
    file = scan_tasks(write(tmp_path, '{"query": "q"}', *[json.dumps(row)] * 3))
    assert not file.mistakes
    assert file.doubts == [
        f"{file.path}:2: is the field `{name}` meant to be `{ours}`? It is kept as one of your own "
        "(so in 3 lines)"
    ]
    assert file.tasks[1].fields == {name: "x"}


@pytest.mark.parametrize("name", ["idx", "level", "answer_type", "question", "data_source"])
def test_a_field_of_the_user_s_own_is_no_doubt(tmp_path: Path, name: str) -> None:
    assert scan_tasks(write(tmp_path, json.dumps({"query": "q", name: "x"}))).doubts == []


def test_a_field_near_one_that_is_there_is_no_doubt(tmp_path: Path) -> None:
    row = {"query": "q", "answer": "a", "answers": ["a", "A"]}
    null = {"query": "q", "answer": None, "answers": None}
    assert scan_tasks(write(tmp_path, json.dumps(row), json.dumps(null))).doubts == []


def test_a_misspelt_query_is_pointed_out_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="no `prompt`: is `Query` meant to be it\\?"):
        read(write(tmp_path, '{"Query": "q"}'))


def test_a_file_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(TaskFileError, match="cannot be read: No such file"):
            read(tmp_path / name)
    for text in ("", " \n", "[]"):
        with pytest.raises(TaskFileError, match="holds no task"):
            read(write(tmp_path, text))


def test_a_json_list_and_a_table_are_read_like_lines(tmp_path: Path) -> None:
    rows = [{"id": "a", "query": "q", "answer": "1"}, {"id": "b", "query": "r", "answer": None}]
    lines = read(write(tmp_path, *map(json.dumps, rows)))
    as_list = read(write(tmp_path, "", json.dumps(rows, indent=1), name="tasks.json"))
    as_table = read(write_table(tmp_path, rows))
    assert lines == as_list == as_table
    assert [(task.id, task.answer) for task in lines] == [("a", "1"), ("b", None)]


def test_data_of_a_tool_agent_in_verls_layout_is_read_as_it_is(tmp_path: Path) -> None:
    tables = read(write_table(tmp_path, TOOL_AGENT_ROWS))
    assert tables == read(write(tmp_path, *map(json.dumps, TOOL_AGENT_ROWS)))
    first, second = tables
    assert first.messages == TOOL_AGENT_ROWS[0]["prompt"]
    assert first.query == "Natalia sold 48 clips, then half as many. How many?"
    assert (first.id, first.answer, first.scorer) == ("1", "72", "math")
    assert (first.agent_name, first.answer_schema) == ("tool_agent", None)
    # A tool that this row does not use, and arguments of other rows, are not there.
    given = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "72"}}}
    assert first.fields["tools_kwargs"] == given
    assert first.fields["extra_info"] == {"split": "train", "index": 0, "need_tools_kwargs": True}
    assert first.fields["data_source"] == "openai/gsm8k"
    assert (second.id, second.answer, second.scorer) == ("2", "1,000", "math")
    assert second.fields["tools_kwargs"] == {"shell": {"create_kwargs": {"files": {"a": "b"}}}}


@pytest.mark.parametrize(
    ("row", "scorer"),
    [
        ({"reward_model": {"ground_truth": "-3.5"}}, "math"),
        ({"reward_model": {"ground_truth": "\\frac{1}{2}"}, "ability": "math"}, "math"),
        ({"reward_model": {"ground_truth": "Paris"}}, "agentcpm"),
        ({"reward_model": {"ground_truth": "72", "style": "model"}}, "agentcpm"),
        ({"reward_model": {"ground_truth": "72"}, "scorer": "agentcpm"}, "agentcpm"),
        ({"reward_model": {"ground_truth": "72"}, "scorer": None}, "math"),
        ({"answer": "72"}, "agentcpm"),
    ],
)
def test_a_row_without_scorer_gets_math_where_a_rule_and_mathematics_are_meant(
    tmp_path: Path, row: dict[str, Any], scorer: str
) -> None:
    assert read_one(tmp_path, {"query": "q", **row}).scorer == scorer


def test_our_own_fields_come_before_verls(tmp_path: Path) -> None:
    task = read_one(tmp_path, {"query": "mine", "answer": 1, **TOOL_AGENT_ROWS[0]})
    assert (task.query, task.answer) == ("mine", "1")
    assert task.messages == TOOL_AGENT_ROWS[0]["prompt"]
    assert read_one(tmp_path, {"prompt": "a text"}).messages is None


def test_messages_keep_what_they_say_and_their_text_parts_are_put_together(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    task = read_one(
        tmp_path,
        {
            "prompt": [
                {"role": "user", "content": parts, "name": None},
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "content": "", "name": "f"},
                {"role": "user", "content": "now?"},
            ]
        },
    )
    assert task.messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "", "name": "f"},
        {"role": "user", "content": "now?"},
    ]
    assert task.query == "now?"


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": []}, "`prompt` does not end with a message of role `user`"),
        ({"prompt": [USER, {"role": "system", "content": "s"}]}, "`prompt` does not end with"),
        (
            {"prompt": [{"role": "human", "content": "q"}]},
            "`prompt[0]` is not a message with a",
        ),
        ({"prompt": [USER, "q"]}, "`prompt[1]` is not a message"),
        ({"prompt": [{"role": "user", "content": " "}]}, "`prompt[0]`: its `content` is empty"),
        ({"prompt": [{"role": "user"}]}, "`prompt[0]`: its `content` is a NoneType, not a text"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            "`prompt[0]`: its `content` has parts that are not of type `text`",
        ),
        ({"prompt": {"q": 1}}, "`prompt` is a dict, not a text"),
        ({"query": 3}, "`query` is a int, not a text"),
        ({"query": "q", "id": [1]}, "`id` is a list"),
        ({"query": "q", "agent_name": 1}, "`agent_name` is a int, not a text"),
        ({"query": "q", "answer": ["a"]}, "`answer` is a list, not a text or a number"),
        (
            {"query": "q", "reward_model": {"ground_truth": {"target": ["a"]}}},
            "`reward_model.ground_truth` is a dict, not a text or a number",
        ),
        ({"query": "q", "reward_model": "rule"}, "`reward_model` is a str, not an object"),
        ({"query": "q", "extra_info": [1]}, "`extra_info` is a list, not an object"),
        (
            {"query": "q", "extra_info": {"tools_kwargs": "all"}},
            "`tools_kwargs` is a str, not an object",
        ),
        ({"query": "q", "big": 1 << 70}, "`big` holds a whole number beyond 64 bits"),
    ],
)
def test_what_cannot_be_used_is_told_with_its_row_and_field(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    good = {"id": "good", "query": "q"}
    for name, text, place in (
        ("tasks.jsonl", f"{json.dumps(good)}\n{json.dumps(row)}", ":2: "),
        ("tasks.json", json.dumps([good, row]), " row 2: "),
    ):
        path = write(tmp_path, text, name=name)
        with pytest.raises(TaskFileError) as error:
            read(path)
        assert str(error.value).startswith(f"{path}{place}{message}")


def test_a_table_that_is_none_or_holds_bad_rows_says_so(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match=r"tasks\.parquet is not a readable Parquet file"):
        read(write(tmp_path, "not a table", name="tasks.parquet"))
    path = write_table(tmp_path, [{"id": "a", "query": "q"}, {"id": "a", "query": "r"}])
    with pytest.raises(TaskFileError) as error:
        read(path)
    assert str(error.value) == f"{path} row 2: id 'a' is already in row 1"
    with pytest.raises(TaskFileError, match="begins like a JSON list but is not one"):
        read(write(tmp_path, '[{"query": "q"},', name="tasks.json"))


def test_a_large_table_is_not_held_beside_its_tasks(tmp_path: Path) -> None:
    """Rows are dropped as they are read: at the peak there is little more than what is kept."""
    rows = [{"id": str(n), "query": "q", "noise": f"{n:0>2000}"} for n in range(5000)]
    path = write_table(tmp_path, rows)
    del rows
    read(path)  # what is loaded once
    tracemalloc.start()
    try:
        tasks = read(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tasks) == 5000
    assert peak < 1.5 * kept


def contents(rows: Sequence[TaskLine]) -> list[TaskLine]:
    return [rows[number] for number in reversed(range(len(rows)))][::-1]


BOM = "\ufeff"


@pytest.mark.parametrize("layout", ["lines", "lines for Windows", "list", "table"])
def test_any_row_is_read_without_the_others_and_is_what_a_whole_reading_gives(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_rows, "CHUNK", 64)  # several pieces, lines across their borders
    rows = [{"id": f"a{n}", "query": f"q{n} \u2028é" * (n % 5 + 1), "n": n} for n in range(40)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    lines[7:7] = ["", "   \t", "\u3000", "\u00a0 "]
    path = {
        "lines": lambda: write(tmp_path, *lines),
        "lines for Windows": lambda: write(tmp_path, BOM + lines[0] + "\r", *lines[1:], "\r"),
        "list": lambda: write(tmp_path, json.dumps(rows)),
        "table": lambda: write_table(tmp_path, rows),
    }[layout]()
    whole = list(read_tasks(path))
    folder = tmp_path / "tasks"
    assert contents(open_tasks(path, folder)) == whole and len(whole) == 40
    os.utime(path, (1, 1))
    assert contents(open_tasks(path, folder)) == whole
    digest = known_digest(path, folder)
    assert digest == file_digest(path)

    def never(*_: object) -> Any:
        raise AssertionError("the file was read again")

    # a run that goes on knows the file by its size and times
    for module, name in (
        (task_rows, "file_digest"), (task_rows, "_find_lines"), (reader, "read_rows"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, never)
    assert known_digest(path, folder) == digest
    assert contents(open_tasks(path, folder)) == whole


def test_a_row_that_is_no_task_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    good = '{"query": "q"}'
    path = write(tmp_path, good, "", "{", good)
    path.write_bytes(path.read_bytes() + b'\n{"query": "\xff"}\n')
    rows = open_tasks(path, tmp_path / "tasks")
    assert (len(rows), rows[0].id, rows[2].id) == (4, "1", "4")
    with pytest.raises(TaskFileError, match=r"tasks.jsonl:3: not JSON"):
        rows[1]
    with pytest.raises(TaskFileError, match=r"tasks.jsonl:5: not UTF-8 text"):
        rows[3]
    path.write_text(good)
    with pytest.raises(TaskFileError, match="was changed while the run reads it"):
        rows[0]


def test_a_file_of_any_size_is_checked_a_piece_at_a_time_and_only_once(tmp_path: Path) -> None:
    lines = [json.dumps({"query": "q", "answer": "1", "scorer": "math", "anwser": "2"})] * 500
    path = write(tmp_path, *lines, json.dumps({"query": "q"}))
    os.utime(path, (1, 1))
    folder = tmp_path / "tasks"
    folder.mkdir()
    check = TaskCheck(path, SCORERS, SCHEMAS, AGENTS)
    assert not check.advance(0) and check.found.n_tasks == 1
    found = asyncio.run(go_on(check))
    assert [kind.rows for kind in found.kinds] == [500, 1]
    assert found.kinds[1].places == [(501, "line 501 (id 501)")]
    by = checked_by(SCORERS, SCHEMAS, AGENTS)
    assert known_check(path, folder) is None
    keep_check(found, folder, by)
    known = known_check(path, folder, by)
    assert known is not None and known_check(path, folder) == known
    assert (known.kinds, known.doubts, known.n_tasks) == (found.kinds, found.doubts, 501)
    assert known_check(path, folder, checked_by(["vibes"])) is None, "other names, another check"
    path.write_text(lines[0])
    assert known_check(path, folder, by) is None, "other content"


def test_an_id_twice_is_found_at_the_end_of_a_check_in_pieces(tmp_path: Path) -> None:
    rows = [json.dumps({"id": f"a{n % 300}", "query": "q"}) for n in range(301)]
    check = TaskCheck(write(tmp_path, *rows))
    while not check.advance(0):
        assert not check.found.mistakes
    (mistake,) = check.found.mistakes
    assert mistake.endswith("tasks.jsonl:301: id 'a0' is already in line 1")
