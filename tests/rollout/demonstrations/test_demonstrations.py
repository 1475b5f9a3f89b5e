"""What a demonstration trains: exactly what a model would have sampled, in every layout."""

import json
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from agentrl.databases.token_tree import TokenTree
from agentrl.databases.tree_file import TreeFile, TreeFileError, remove_unfinished
from agentrl.rollout.chat import ChatRenderer
from agentrl.rollout.demonstrations import Demonstration, demonstrated_tree, read_demonstration
from agentrl.rollout.demonstrations.prepare import Preparation, UnusableRows, prepare_rows

DEMO = Path(__file__).parents[3] / "assets" / "demo" / "model"
TOKENIZER = AutoTokenizer.from_pretrained(DEMO)
QUESTION = {"role": "user", "content": "bin 3?"}
FUNCTION = {"name": "stock", "arguments": '{"bin": "R5"}'}
CALL = {"function": FUNCTION}
STOCK = {"name": "stock", "parameters": {"type": "object", "properties": {}}}
CALLED_TEXT = '<tool_call>\n{"name": "stock", "arguments": {"bin": "R5"}}\n</tool_call><|im_end|>'
ANSWER = {"role": "assistant", "content": "7"}
# A process that prepares rows with two others; its arguments are file, folder and model.
PREPARE = """
import sys
from pathlib import Path
from agentrl.rollout.demonstrations.prepare import Preparation, prepare_rows
file, out, model = map(Path, sys.argv[1:])
prepare_rows(file, out, Preparation(model, {}, 384), workers=2)
"""
# A template that drops the thoughts of earlier turns, as Qwen3's and DeepSeek's do.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def trained(tree: TokenTree) -> str:
    """The text that the tree trains, path by path."""
    return str(TOKENIZER.decode(tree["ids"][tree["mask"] == 1]))


def prepared(tmp_path: Path, rows: list[Any], model: Path = DEMO, **flags: Any) -> TreeFile:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TreeFile(
        prepare_rows(file, tmp_path / "out", Preparation(model, {}, 384), **flags).folder
    )


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": [QUESTION, {"role": "assistant", "content": "7"}]}, "7<|im_end|>"),
        (
            {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "8"}]},
            "8<|im_end|>",
        ),
        (
            {"prompt": [QUESTION], "completion": [{"role": "assistant", "content": "9"}]},
            "9<|im_end|>",
        ),
        ({"prompt": "one", "completion": " two"}, " two<|im_end|>"),
        ({"text": "all of it"}, "all of it<|im_end|>"),
        ({"messages": json.dumps([QUESTION, ANSWER])}, "7<|im_end|>"),
        ({"prompt": json.dumps([QUESTION]), "completion": json.dumps([ANSWER])}, "7<|im_end|>"),
        ({"text": json.dumps([QUESTION, ANSWER])}, json.dumps([QUESTION, ANSWER]) + "<|im_end|>"),
        (
            {"prompt": [QUESTION], "completion": "9"},
            "9<|im_end|>",
        ),
        (
            {
                "messages": [
                    QUESTION, {"role": "assistant", "content": None, "function_call": FUNCTION},
                    {"role": "function", "name": "stock", "content": "46"},
                    {"role": "assistant", "content": "46"},
                ],
                "functions": [STOCK],
            },
            CALLED_TEXT + "46<|im_end|>",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "?"},
                    {"from": "function_call", "value": json.dumps(FUNCTION)},
                    {"from": "observation", "value": "46"},
                    {"from": "gpt", "value": "46"},
                ],
                "system": "Count.",
                "tools": json.dumps([STOCK]),
            },
            CALLED_TEXT + "46<|im_end|>",
        ),
        (
            {
                "messages": [
                    QUESTION, {"role": "assistant", "content": "no", "weight": 0},
                    QUESTION, {"role": "assistant", "content": "nor this", "loss_mask": 0},
                    QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]},
                ]
            },
            "yes<|im_end|>",
        ),
        (
            {
                "messages": [
                    QUESTION, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "content": "46"}, {"role": "assistant", "content": "46"},
                    {"role": "user", "content": "thanks"},
                ]
            },
            CALLED_TEXT + "46<|im_end|>",
        ),
    ],
)  # fmt: skip
def test_what_the_model_has_to_say_is_trained_and_nothing_else(
    tmp_path: Path, row: dict[str, Any], text: str
) -> None:
    [tree] = prepared(tmp_path, [row])
    assert trained(tree) == text


def test_where_the_template_rewrites_a_turn_the_conversation_is_a_tree(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(FORGETFUL)
    talk = [
        QUESTION, {"role": "assistant", "content": "A", "reasoning_content": "hm"},
        QUESTION, {"role": "assistant", "content": "B", "reasoning_content": "ah"},
    ]  # fmt: skip
    [tree] = prepared(tmp_path, [{"messages": talk}], folder)
    head = "<|im_start|>user\nbin 3?<|im_end|>\n<|im_start|>assistant\n"
    paths = [str(TOKENIZER.decode(tree["ids"][tree.places(path)])) for path in tree.paths()]
    assert paths == [
        head + "<think>hm</think>A<|im_end|>",
        head + "A<|im_end|>\n" + head + "<think>ah</think>B<|im_end|>",
    ]
    assert trained(tree) == "<think>hm</think>A<|im_end|><think>ah</think>B<|im_end|>"


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def with_template(tmp_path: Path, template: str) -> Path:
    """The demo's model with another chat template."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_call_is_trained_also_where_the_content_has_its_name(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "Let me check the stock of R5.", "tool_calls": [CALL]}
    model = with_template(tmp_path, CHATML)
    [tree] = prepared(tmp_path, [{"messages": [QUESTION, said]}], model)
    assert trained(tree) == f"{said['content']}\n{CALLED_TEXT}"


def test_of_calls_to_one_tool_none_is_left_out_unseen(tmp_path: Path) -> None:
    template = (DEMO / "chat_template.jinja").read_text()
    first = template.replace("message.tool_calls or []", "(message.tool_calls or [])[:1]")
    calls = [CALL, {"function": {"name": "stock", "arguments": {"bin": "M1"}}}]
    row = {"messages": [QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]}
    assert first != template
    with pytest.raises(UnusableRows, match="message 2: the chat template leaves out 'stock'"):
        prepared(tmp_path, [row], with_template(tmp_path, first))


def test_content_beside_a_call_that_has_it_is_not_left_out_unseen(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{ m.content }}",
        "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}"
        "{% else %}{{ m.content }}{% endif %}",
    )
    said = {"role": "assistant", "content": "stock", "tool_calls": [CALL]}
    with pytest.raises(UnusableRows, match="message 2: the chat template leaves out 'stock'"):
        prepared(tmp_path, [{"messages": [QUESTION, said]}], with_template(tmp_path, template))


@pytest.mark.parametrize("thought", ["7", "it is 7"])
def test_a_thought_is_trained_also_where_the_answer_has_it(tmp_path: Path, thought: str) -> None:
    said = {"role": "assistant", "content": "<answer>7</answer>", "reasoning_content": thought}
    [tree] = prepared(tmp_path, [{"messages": [QUESTION, said]}])
    assert trained(tree) == f"<think>\n{thought}\n</think><answer>7</answer><|im_end|>"


def test_a_message_that_the_template_leaves_out_is_named() -> None:
    silent = FORGETFUL.replace(
        "{{ m.content if", "{{ '' if m.role == 'assistant' else m.content if"
    )
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = FORGETFUL
    renderer = ChatRenderer(tokenizer)
    tokenizer.chat_template = silent
    talk = read_demonstration({"messages": [QUESTION, {"role": "assistant", "content": "lost"}]})
    assert isinstance(talk, Demonstration)
    with pytest.raises(ValueError, match="message 2: the chat template leaves out 'lost'"):
        demonstrated_tree(renderer, talk)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "?"}, "has none of messages, prompt and completion, text, or conversations"),
        ({"messages": [QUESTION]}, "has no message of the assistant that is trained"),
        ({"messages": [{"role": "assistant", "content": "7"}]}, "answers nothing"),
        ({"messages": [{"role": "robot", "content": "7"}]}, "message 1: role 'robot' is none of"),
        ({"messages": ["7"]}, "message 1: is not an object but a str"),
        (
            {"messages": [{**QUESTION, "train": True}, {"role": "assistant", "content": "7"}]},
            "message 1: only the assistant's messages are trained, not user",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": "7", "weight": 0.5}]},
            "message 2: `weight` is 0.5, and neither 0 nor 1",
        ),
        (
            {"messages": [QUESTION, {**ANSWER, "training": False}]},
            "message 2: has `training` False, which is not followed: name it `train`",
        ),
        ({"messages": [QUESTION, {**ANSWER, "loss_scale": 0}]}, "message 2: has `loss_scale` 0"),
        (
            {
                "messages": [
                    QUESTION,
                    {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]},
                ]
            },
            "message 2: the arguments of f are no JSON object",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": [{"type": "image"}]}]},
            "message 2: its content is no text",
        ),
        (
            {"messages": [QUESTION, {"role": "assistant", "text": "46"}]},
            "message 2: says nothing; its fields are role, text",
        ),
        (
            {"messages": "bin 3?"},
            "prompt and completion, text, or conversations; its fields are 'messages' (a str)",
        ),
        (
            {"prompt": "?", "completion": [ANSWER]},
            "its fields are 'prompt' (a str), 'completion' (a list)",
        ),
        (
            {"prompt": "?", "completion": "7", "label": False},
            "has `label` False: it is an answer to",
        ),
        ({"prompt": "?", "completion": "7", "label": 0}, "has `label` 0"),
        ({"prompt": "?", "completion": "7", "label": -1}, "has `label` -1"),
        ({"prompt": "?", "completion": "7", "label": "rejected"}, "has `label` 'rejected'"),
        ({"messages": [QUESTION, ANSWER], "kto_tag": "False"}, "has `kto_tag` 'False'"),
        ({"messages": [QUESTION, ANSWER], "train": False}, "says that it is not to be trained"),
        ({"text": "no", "weight": 0}, "says that it is not to be trained (`train` or `weight`)"),
        ({"text": "no", "weight": 0.5}, "`weight` is 0.5, and neither 0 nor 1"),
        (
            {"messages": [QUESTION, ANSWER], "prompt": "bin 4?", "completion": "8"},
            "has `prompt` that says something else than `messages`: leave one out",
        ),
        (
            {"messages": [QUESTION, ANSWER], "prompt": "bin 3?", "completion": "8"},
            "has `completion` that says something else than `messages`",
        ),
        (
            {
                "conversations": [QUESTION, ANSWER],
                "prompt": [{"role": "user", "content": "bin 4?"}],
            },
            "has `prompt` that says something else than `conversations`",
        ),
        ({"text": "7", "prompt": "bin 3?"}, "has `prompt` that says something else than `text`"),
        ({"text": "7", "prompt": [QUESTION]}, "has `prompt` that says something else than `text`"),
        (
            {"prompt": "bin 3?", "completion": "7", "text": "bin 3? 8"},
            "has `text` that says something else than `prompt` and `completion`",
        ),
        (
            {"messages": [QUESTION, ANSWER], "history": [["a", "b"]]},
            "has `history` beside messages",
        ),
        (
            {"messages": [QUESTION, ANSWER], "tools": [STOCK], "functions": [{"name": "f"}]},
            "has `tools` and `functions`, which differ",
        ),
        (
            {"conversations": [QUESTION, ANSWER, QUESTION], "chosen": ANSWER, "rejected": ANSWER},
            "is a pair of answers to its messages, which `agentrl dpo` trains",
        ),
        ({"messages": [QUESTION, ANSWER], "images": ["a.png"]}, "has `images`, and only text"),
        ({"text": "<image>", "image": "a.png"}, "has `image`, and only text is trained"),
        (
            {"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": False}},
            "has `chat_template_kwargs`, which are given for the whole file",
        ),
        (
            {"messages": [{"role": "system", "content": "A"}, QUESTION, ANSWER], "system": "B"},
            "has a system prompt beside a system message that says something else",
        ),
        ({"messages": [QUESTION, ANSWER], "system": ["A"]}, "has a system prompt that is no text"),
        (
            {"prompt": "?", "completion": "7", "system": "Count."},
            "has `system` beside a prompt that is a text without a chat template",
        ),
        ({"prompt": "?", "completion": "7", "tools": [{"name": "f"}]}, "has `tools` beside"),
        ({"messages": [QUESTION, ANSWER], "tools": ["f"]}, "has `tools` that are no JSON"),
        (
            {"messages": [QUESTION, ANSWER], "tools": [{"parameters": {}}]},
            "has a tool without a name",
        ),
        ({"text": "word " * 400}, "more than --max_tokens 384"),
        ({"text": ""}, "has an empty text to train"),
    ],
)
def test_a_row_that_cannot_be_trained_is_left_out_with_its_reason(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n" + json.dumps({"text": "good"}) + "\n")
    rows = prepare_rows(file, tmp_path / "out", Preparation(DEMO, {}, 384))
    assert [*rows.left_out] == [f"{file}:1"]
    assert reason in rows.left_out[f"{file}:1"]
    assert len(TreeFile(rows.folder)) == 1
    with pytest.raises(UnusableRows, match="none of its 1 rows can be trained"):
        prepared(tmp_path, [row])


def test_a_layout_that_repeats_the_one_that_is_read_may_stand_beside_it() -> None:
    read = {"messages": [QUESTION, ANSWER], "prompt_id": "a", "prompt": 3, "weight": 1.0}
    beside = {
        "conversations": [{"from": "human", "value": "bin 3?"}, {"from": "gpt", "value": "7"}],
        "prompt": "bin 3? ",
        "completion": ANSWER,
        "text": "<user>bin 3?<assistant>7",
    }
    assert read_demonstration(read) == read_demonstration({**read, **beside})
    texts = {"prompt": "bin 3? ", "completion": "7"}
    assert read_demonstration({**texts, "text": "bin 3? 7"}) == read_demonstration(texts)


@pytest.mark.parametrize("field", ["system", "system_prompt"])
def test_a_system_prompt_beside_the_messages_stands_before_them(tmp_path: Path, field: str) -> None:
    system = {"role": "system", "content": "Count."}
    turns = [{"from": "human", "value": "bin 3?"}, {"from": "gpt", "value": "7"}]
    rows = [
        {"messages": [system, QUESTION, ANSWER]},
        {"messages": [QUESTION, ANSWER], field: "Count."},
        {"messages": [system, QUESTION, ANSWER], field: "Count."},
        {"conversations": turns, field: "Count."},
        {"prompt": [QUESTION], "completion": [ANSWER], field: "Count."},
    ]
    assert len({str(TOKENIZER.decode(tree["ids"])) for tree in prepared(tmp_path, rows)}) == 1
    without = [{"messages": [QUESTION, ANSWER], field: nothing} for nothing in ("", None)]
    [first, other] = prepared(tmp_path, without)
    assert first == other and "Count." not in str(TOKENIZER.decode(first["ids"]))


def test_a_prompt_of_messages_is_context_whatever_they_say_of_themselves() -> None:
    talk = read_demonstration({"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]})
    assert isinstance(talk, Demonstration)
    assert talk.trained == (False, False, False, True)


def test_tools_may_be_under_both_names() -> None:
    row = {"messages": [QUESTION, ANSWER], "tools": json.dumps([STOCK]), "functions": [STOCK]}
    talk = read_demonstration(row)
    assert isinstance(talk, Demonstration)
    assert talk.tools == ({"type": "function", "function": STOCK},)


def test_fields_of_messages_that_are_not_read_are_told_with_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    answer: dict[str, Any] = {
        **ANSWER,
        "id": 2,
        "prefix": False,
        "note": "",
        "parts": [],
        "of": {},
        "by": None,
    }
    row = {"messages": [{**QUESTION, "id": 1}, answer], "source": "a"}
    file.write_text((json.dumps(row) + "\n") * 2 + json.dumps({"text": "good"}) + "\n")
    for _ in range(2):  # made, and found again
        rows = prepare_rows(file, tmp_path / "out", Preparation(DEMO, {}, 384))
        assert rows.unread == {"id": 2, "prefix": 2} and rows.left_out == {}
    notes = rows.folder.with_suffix(".json")
    notes.write_text("{}")  # as an earlier version wrote them
    assert prepare_rows(file, tmp_path / "out", Preparation(DEMO, {}, 384)) == rows


@pytest.mark.parametrize("n_rows", [1, 12])
def test_a_row_has_its_place_in_the_file(tmp_path: Path, n_rows: int) -> None:
    trees = prepared(tmp_path, [{"text": "a"}] * n_rows)
    places = list(map(trees.place, range(len(trees))))
    assert places == [f"{tmp_path / 'rows.jsonl'}:{number}" for number in range(1, n_rows + 1)]


def test_rows_are_made_once_and_anew_for_other_data(tmp_path: Path) -> None:
    seen: list[int] = []
    prepared(tmp_path, [{"text": "a"}], report=seen.append)
    prepared(tmp_path, [{"text": "a"}], report=seen.append)
    assert seen == [1]
    prepared(tmp_path, [{"text": "a"}, {"text": "b"}], report=seen.append)
    assert seen == [1, 1, 2]


def test_several_processes_make_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    rows = [{"prompt": f"row {n} ", "completion": str(n)} for n in range(700)]
    (tmp_path / "alone").mkdir()
    alone = prepared(tmp_path / "alone", rows)
    (tmp_path / "both").mkdir()
    both = prepared(tmp_path / "both", rows, workers=2)
    assert [*both] == [*alone]


def test_preparing_processes_end_with_the_one_that_wants_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = json.dumps({"prompt": "row ", "completion": "word " * 50}) + "\n"
    file.write_text(row * 50_000)
    preparing = psutil.Popen([sys.executable, "-c", PREPARE, file, tmp_path / "out", DEMO])
    workers: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while len(workers := preparing.children()) < 2:
            assert preparing.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # they are at work
        preparing.terminate()
        preparing.wait(10)
        _, left = psutil.wait_procs(workers, 10)
        assert left == []
    finally:
        for process in (preparing, *workers):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def test_a_folder_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TreeFileError, match="holds no prepared rows"):
        TreeFile(tmp_path)


def test_what_a_killed_preparation_left_is_removed_and_rows_are_not(tmp_path: Path) -> None:
    rows = prepared(tmp_path, [{"text": "a"}]).folder
    partial = rows.with_name(f"{rows.name}.1.partial")
    shutil.copytree(rows, partial)
    remove_unfinished(rows.parent)
    assert not partial.exists() and len(TreeFile(rows)) == 1
    remove_unfinished(tmp_path / "none")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": json.dumps([STOCK])},
        {"tools": [json.dumps(STOCK)]},
        {"functions": json.dumps([json.dumps(STOCK)]), "tools": "[]"},
    ],
)
def test_tools_may_be_json_as_a_whole_or_each(fields: dict[str, Any]) -> None:
    shown = read_demonstration({"messages": [QUESTION, ANSWER], **fields})
    assert isinstance(shown, Demonstration)
    assert shown.tools == ({"type": "function", "function": STOCK},)


@pytest.mark.parametrize("nothing", ["null", "[]", " [ ] "])
def test_fields_with_the_json_of_nothing_are_empty(nothing: str) -> None:
    row = {"messages": [QUESTION, ANSWER], "tools": nothing, "images": nothing}
    shown = read_demonstration(row)
    assert isinstance(shown, Demonstration) and shown.tools == ()
    read_demonstration({"prompt": "a", "completion": "b", "tools": nothing})


def with_own_tool(name: str, **arguments: Any) -> dict[str, Any]:
    """A row with a call of its own tool."""
    function = {"name": name, "arguments": arguments}
    types = {key: {"type": "integer", "enum": [1, None]} for key in arguments}
    tool = {"name": name, "description": "d", "parameters": {"properties": types}}
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}
    return {"messages": [QUESTION, called], "tools": [tool]}


def test_a_table_trains_the_arguments_and_schemas_that_its_rows_had(tmp_path: Path) -> None:
    row = with_own_tool
    rows = [row("stock", bin=1), row("add", x=1, y=[{"a": 1}, {"b": 2}]), row("now")]
    [*lines] = prepared(tmp_path, rows)
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    of_table = prepare_rows(table, tmp_path / "out", Preparation(DEMO, {}, 384))
    assert [*TreeFile(of_table.folder)] == lines
    assert trained(lines[0]).startswith('<tool_call>\n{"name": "stock", "arguments": {"bin": 1}}')
    [(said, n_rows)] = of_table.remarks.items()
    assert said.startswith("null in arguments of calls and in tools is taken for") and n_rows == 3

    # The table as text, as `datasets` writes it: its schemas tell.
    text = tmp_path / "table.jsonl"
    Dataset.from_list(rows).to_json(text)
    assert '"x":null' in text.read_text().splitlines()[0]
    of_text = prepare_rows(text, tmp_path / "out", Preparation(DEMO, {}, 384))
    assert [*TreeFile(of_text.folder)] == lines
    assert of_text.remarks == of_table.remarks


def test_nulls_of_a_text_that_is_no_table_are_trained_and_told(tmp_path: Path) -> None:
    row = with_own_tool("stock", bin=None)
    parameters = row["tools"][0]["parameters"]
    parameters["properties"] = {"bin": True, "properties": {"type": "integer", "default": None}}
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in (row, with_own_tool("a", b=1))))
    made = prepare_rows(file, tmp_path / "out", Preparation(DEMO, {}, 384))
    assert '{"bin": null}' in trained(TreeFile(made.folder)[0])
    told = "null in arguments of calls is trained as it is given: only in tables it is a field"
    assert made.remarks == {f"{told} left out": 1}


def test_a_thought_that_the_template_does_not_write_is_told(tmp_path: Path) -> None:
    said = {"role": "assistant", "content": "A", "reasoning_content": "hm"}
    file = tmp_path / "rows.jsonl"
    rows = [{"messages": [QUESTION, said, QUESTION, said]}, {"messages": [QUESTION, ANSWER]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):  # made, and found again
        made = prepare_rows(file, tmp_path / "out", Preparation(DEMO, {}, 384))
        assert made.remarks == {
            "thoughts that the chat template does not write are trained before the turn": 1
        }
    writing = with_template(tmp_path, FORGETFUL)
    assert not prepare_rows(file, tmp_path / "out", Preparation(writing, {}, 384)).remarks
