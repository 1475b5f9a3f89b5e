"""What a row of preferences trains: both answers behind one prompt, in every layout."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from transformers import AutoTokenizer

from agentrl.databases.tree_file import TreeFile
from agentrl.rollout.demonstrations.layouts import PlainText
from agentrl.rollout.demonstrations.preferences import read_preference
from agentrl.rollout.demonstrations.prepare import Preparation, PreparedRows, prepare_rows

DEMO = Path(__file__).parents[3] / "assets" / "demo" / "model"
TOKENIZER = AutoTokenizer.from_pretrained(DEMO)
QUESTION = {"role": "user", "content": "bin 3?"}
PARAMETERS = {"type": "object", "properties": {"bin": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "stock", "parameters": PARAMETERS}}]
CALLED = [
    {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "stock", "arguments": '{"bin": "R5"}'}}],
    },
    {"role": "tool", "content": "46"},
    {"role": "assistant", "content": "46"},
]
GUESSED = [{"role": "assistant", "content": "7"}]
EXPLICIT = {"prompt": [QUESTION], "chosen": CALLED, "rejected": GUESSED, "tools": TOOLS}
IMPLICIT = {
    "chosen": [QUESTION, *CALLED], "rejected": [QUESTION, *GUESSED], "tools": json.dumps(TOOLS),
}  # fmt: skip


def prepared(file: Path, longest: int = 384) -> PreparedRows:
    preparation = Preparation(DEMO, {}, longest, pairs=True)
    return prepare_rows(file, file.parent / "out", preparation)


def written(folder: Path, *rows: Any) -> Path:
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def sides(rows: PreparedRows, number: int = 0) -> dict[float, str]:
    """The text that a row trains, by its sign."""
    tree = TreeFile(rows.folder)[number]
    return {sign: TOKENIZER.decode(tree["ids"][tree["advantages"] == sign]) for sign in (1.0, -1.0)}


def test_every_layout_of_messages_gives_the_same_pair(tmp_path: Path) -> None:
    rows = prepared(written(tmp_path, EXPLICIT, IMPLICIT, {**IMPLICIT, "prompt": "bin 3?"}))
    trees = TreeFile(rows.folder)
    assert trees[0] == trees[1] == trees[2]
    of_chosen, of_rejected = sides(rows)[1.0], sides(rows)[-1.0]
    assert of_chosen.endswith("46<|im_end|>") and "stock" in of_chosen
    assert of_chosen.count("46") == 1, "the tool's result is context"
    assert of_rejected == "7<|im_end|>"
    assert trees[0].parents.count(-1) == 1, "the prompt is stored once"


def as_json(row: dict[str, Any]) -> dict[str, Any]:
    """The row in a table of texts."""
    return {n: v if isinstance(v, str) else json.dumps(v) for n, v in row.items()}


def test_messages_may_be_texts_with_their_json(tmp_path: Path) -> None:
    one = {"prompt": [QUESTION], "chosen": {"from": "gpt", "value": "46"}, "rejected": GUESSED[0]}
    texts = {"prompt": json.dumps([QUESTION]), "chosen": "46", "rejected": "7"}
    given = [EXPLICIT, as_json(EXPLICIT), as_json(IMPLICIT), one, as_json(one), texts]
    rows = prepared(written(tmp_path, *given))
    assert rows.left_out == {}
    trees = TreeFile(rows.folder)
    assert trees[0] == trees[1] == trees[2]
    assert trees[3] == trees[4] == trees[5]


def test_an_answer_in_json_that_is_no_message_stays_a_text() -> None:
    trip, listed = '{"from": "A", "content": "B"}', '[{"role": "cook"}]'
    chosen, rejected = read_preference({"prompt": "Which?", "chosen": trip, "rejected": listed})
    assert (chosen, rejected) == (PlainText("Which?", trip), PlainText("Which?", listed))


def test_an_answer_that_begins_with_its_prompt_has_it_once(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Count."}
    asked = {"from": "human", "value": "bin 3?"}
    plain = {"prompt": [system, QUESTION], "chosen": CALLED, "rejected": GUESSED}
    whole = {**plain, "chosen": [system, QUESTION, *CALLED], "rejected": [asked, *GUESSED]}
    rows = prepared(written(tmp_path, plain, whole))
    first, other = TreeFile(rows.folder)
    assert first == other


def test_what_a_prompt_of_messages_says_may_stand_beside_it(tmp_path: Path) -> None:
    beside = {"question": "bin 3?", "messages": IMPLICIT["chosen"]}
    rows = prepared(written(tmp_path, IMPLICIT, {**IMPLICIT, **beside}, {**EXPLICIT, **beside}))
    trees = TreeFile(rows.folder)
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.parametrize("end", ["46", "7"])
def test_a_prompt_that_ends_in_one_of_the_answers_is_asked_without_it(
    tmp_path: Path, end: str
) -> None:
    chosen, rejected = {"from": "gpt", "value": "46"}, {"from": "gpt", "value": "7"}
    ended = {"conversations": [QUESTION, {"from": "gpt", "value": end}]}
    row = {**ended, "chosen": chosen, "rejected": rejected}
    beside = {"prompt": [QUESTION], **row, "chosen": "46", "rejected": "7"}
    rows = prepared(written(tmp_path, *ASKED, row, beside))
    assert rows.left_out == {}
    trees = TreeFile(rows.folder)
    assert trees[0] == trees[1] == trees[2]


def test_users_may_go_on_differently_behind_an_answer(tmp_path: Path) -> None:
    talk = [QUESTION, {"role": "assistant", "content": "46"}]
    chosen = [{"role": "user", "content": "thanks"}, {"role": "assistant", "content": "!"}]
    rejected = [{"role": "user", "content": "sure?"}, {"role": "assistant", "content": "?"}]
    implicit = {"chosen": [*talk, *chosen], "rejected": [*talk, *rejected]}
    rows = prepared(written(tmp_path, implicit))
    assert sides(rows) == {1.0: "!<|im_end|>", -1.0: "?<|im_end|>"}


@pytest.mark.parametrize("row", [EXPLICIT, IMPLICIT])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("conversations", [{"from": "human", "value": "bin 4?"}]),
        ("messages", [*GUESSED, QUESTION]),
        ("question", "What is in bin 4?"),
        ("question", "Answer as a pirate. bin 3?"),
        ("history", [["a", "b"]]),
    ],
)
def test_other_messages_beside_those_that_are_read_are_refused(
    row: dict[str, Any], name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=f"has `{name}`"):
        read_preference({**row, name: value})


def test_texts_may_say_where_they_are_from() -> None:
    about = {"id": "a", "prompt_id": "b", "source": "c", "chosen_model": "d", "score": 1.5}
    chosen, rejected = read_preference({"chosen": "It is 46", "rejected": "It is 7", **about})
    assert (chosen, rejected) == (PlainText("It is", " 46"), PlainText("It is", " 7"))


def test_texts_keep_what_both_begin_with_as_the_prompt(tmp_path: Path) -> None:
    explicit = {"prompt": "bin 3:", "chosen": " 46", "rejected": " 7"}
    implicit = {"chosen": "bin 3: 46", "rejected": "bin 3: 7"}
    rows = prepared(written(tmp_path, explicit, implicit))
    trees = TreeFile(rows.folder)
    assert trees[0] == trees[1]
    assert sides(rows) == {1.0: " 46<|im_end|>", -1.0: " 7<|im_end|>"}


ASKED = [{"prompt": [QUESTION], "chosen": [{"role": "assistant", "content": "46"}],
          "rejected": GUESSED}]  # fmt: skip


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [QUESTION], "chosen": "46", "rejected": "7"},
        {"question": "bin 3?", "chosen": "46", "rejected": "7", "system": ""},
        {"instruction": "bin 3?", "input": "", "chosen": "46", "rejected": "7"},
        {"input": "bin 3?", "chosen": "46", "rejected": "7", "labelling_model": "a judge"},
        {
            "conversations": [{"from": "human", "value": "bin 3?"}],
            "chosen": {"from": "gpt", "value": "46"},
            "rejected": {"from": "gpt", "value": "7"},
        },
    ],
)
def test_text_answers_to_a_question_are_the_assistants(tmp_path: Path, row: Any) -> None:
    rows = prepared(written(tmp_path, *ASKED, row))
    assert rows.left_out == {}
    first, other = TreeFile(rows.folder)
    assert first == other


def test_a_question_has_its_system_prompt_and_its_input(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Count."}
    answers = {"chosen": "46", "rejected": "7"}
    rows = prepared(
        written(
            tmp_path,
            {"prompt": [system, {"role": "user", "content": "bin 3?\nnow"}], **answers},
            {"instruction": "bin 3?", "input": "now", "system": "Count.", **answers},
        )
    )
    first, other = TreeFile(rows.folder)
    assert first == other


def test_a_table_gives_the_same_pairs_as_lines(tmp_path: Path) -> None:
    plain = {"prompt": [QUESTION], "chosen": [{"role": "assistant", "content": "46"}]}
    row = {**plain, "rejected": GUESSED}
    parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "pairs.parquet")
    of_table = TreeFile(prepared(tmp_path / "pairs.parquet").folder)
    of_lines = TreeFile(prepared(written(tmp_path, row)).folder)
    assert of_table[0] == of_lines[0]


def test_a_file_of_pairs_and_one_of_demonstrations_are_prepared_apart(tmp_path: Path) -> None:
    file = written(tmp_path, EXPLICIT)
    both = (Preparation(DEMO, {}, 384, pairs=pairs).digest(file) for pairs in (True, False))
    assert len({*both}) == 2


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": [QUESTION], "chosen": CALLED}, "has not chosen and rejected"),
        ({"chosen": "46", "rejected": GUESSED}, "has not chosen and rejected"),
        ({"chosen": "46", "rejected": "7"}, "has no prompt, and `chosen` and `rejected` begin"),
        ({"chosen": CALLED, "rejected": GUESSED}, "has no prompt, and"),
        (
            {"prompt": [QUESTION], "chosen": "46", "rejected": GUESSED},
            "'chosen' (a str), 'rejected' (a list)",
        ),
        (
            {"prompt": "bin 3?", "chosen": CALLED, "rejected": GUESSED},
            "has `prompt` as a str beside messages that do not begin with it",
        ),
        (
            {**IMPLICIT, "prompt": "Answer as a pirate. bin 3?"},
            "has `prompt` as a str beside messages that do not begin with it",
        ),
        (
            {**IMPLICIT, "prompt": QUESTION},
            "has `prompt` as a dict beside messages that do not begin with it",
        ),
        ({"prompt": QUESTION, "chosen": "46", "rejected": "7"}, "'prompt' (a dict)"),
        (
            {"query": "bin 3?", "chosen": "It is 46", "rejected": "It is 7"},
            "has no `prompt`, and `query`, of which nothing is known",
        ),
        (
            {"question": "?", "input": "bin 3", "chosen": "46", "rejected": "7"},
            "has no `prompt`, and no form of a question",
        ),
        (
            {"instruction": "?", "history": [["a", "b"]], "chosen": "46", "rejected": "7"},
            "has `history`, which is not read",
        ),
        (
            {"prompt": "?", "system": "Count.", "chosen": "46", "rejected": "7"},
            "has `system` beside a prompt that is a text",
        ),
        (
            {"prompt": "?", "chosen": str(CALLED), "rejected": "7"},
            "has `chosen` like messages in a text, but no JSON: Expecting property name",
        ),
        (
            {"prompt": "?", "chosen": json.dumps(CALLED)[:-1], "rejected": "7"},
            "has `chosen` like messages in a text, but no JSON: Expecting ',' delimiter",
        ),
        (
            {**EXPLICIT, "prompt": [QUESTION, {"role": "assistant", "content": "8"}]},
            "has a prompt that ends in another answer than those of the row",
        ),
        (
            {**EXPLICIT, "prompt": [QUESTION, {"role": "?", "content": ""}]},
            "in `chosen`: message 2: role '?' is none of",
        ),
        ({**EXPLICIT, "train": False}, "says that it is not to be trained (`train` or `weight`)"),
        ({**EXPLICIT, "images": ["a.png"]}, "has `images`, and only text is trained"),
        ({"chosen": [QUESTION, *CALLED], "rejected": [QUESTION, *CALLED]}, "that are the same"),
        ({"chosen": "It is 46", "rejected": "It is 46"}, "that are the same"),
        (
            {"chosen": [QUESTION, *CALLED], "rejected": [QUESTION]},
            "has no prompt, and one of its answers is how the other begins",
        ),
        (
            {"prompt": [QUESTION], "chosen": GUESSED, "rejected": [{"role": "?", "content": ""}]},
            "in `rejected`: message 2: role '?' is none of",
        ),
    ],
)
def test_a_row_that_is_no_pair_says_why(row: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_preference(row)
    assert why in str(refused.value)


def test_pairs_that_cannot_be_trained_are_left_out_and_named(tmp_path: Path) -> None:
    same = {**EXPLICIT, "rejected": CALLED}
    long = {"prompt": "bin", "chosen": " 3" * 400, "rejected": " 4"}
    rows = prepared(written(tmp_path, EXPLICIT, same, long))
    reasons = list(rows.left_out.values())
    assert reasons[0] == "has a chosen and a rejected answer that are the same"
    assert "more than --max_tokens 384" in reasons[1]
    assert len(TreeFile(rows.folder)) == 1
