"""`agentrl export-data` and `agentrl import`: files for Hugging Face datasets, there and back."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import datasets
import pyarrow.parquet as parquet
import pytest
from demo_launch import demo_lines

from agentrl.cli import main
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DBRecordData
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.row_ledger import RowLedger
from agentrl.launcher.deployment import REPOSITORY

DEMO = REPOSITORY / "assets" / "demo"
MODEL = str(DEMO / "model")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "stock",
            "description": "Parts in a bin.",
            "parameters": {"type": "object", "properties": {"bin": {"type": "string"}}},
        },
    }
]


def call(bin: Any) -> dict[str, Any]:
    function = {"name": "stock", "arguments": {"bin": bin}}
    return {"type": "function", "function": function}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mongod: EmbeddedMongod) -> Iterator[str]:
    """The name of a run of a test, in its MongoDB."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DB_URL", mongod.url)
    yield f"test-{uuid4().hex[:12]}"


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def exported(run: str, format: str, to: str = "jsonl") -> Path:
    out = Path(f"{uuid4().hex}.{to}")
    assert main(["export-data", run, "--format", format, "--out", str(out), "--model", MODEL]) == 0
    return out


def imported(run: str, rows: list[dict[str, Any]]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["import", "rows.jsonl", "--run_name", run]) == 0


# The tree of the docstring of `TokenTree`, as two segments: the second shares three tokens.
FIRST = {
    "input_ids": [1, 2, 3, 10, 11, 20, 21, 12, 13],
    "loss_mask": [0, 0, 0, 1, 1, 0, 0, 1, 1],
    "logprobs": [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -1.0, -0.125],
    "versions": [-1, -1, -1, 4, 4, -1, -1, 4, 5],
    "advantages": [0.0, 0.0, 0.0, 0.5, 0.5, 0.0, 0.0, -0.25, -0.25],
    "reward": 1.0, "segment": 0, "parent_turn": None, "shared": 0,
    "turns": [
        {"turn": 0, "start": 3, "end": 5, "status": "completed", "finish_reason": "stop",
         "text": "ab", "messages": [{"role": "user", "content": "how many?"}],
         "tool_calls": [{"name": "stock", "arguments": {"bin": 5}, "result": "46",
                         "is_error": False}], "rewrite": None},
        {"turn": 1, "start": 7, "end": 9, "status": "formaterror", "finish_reason": "stop",
         "text": "cd", "messages": [{"role": "tool", "content": "46"}], "tool_calls": [],
         "rewrite": None},
    ],
}  # fmt: skip
SECOND = {
    "input_ids": [1, 2, 3, 30, 14], "loss_mask": [0, 0, 0, 0, 1],
    "logprobs": [0.0, 0.0, 0.0, 0.0, -2.0], "versions": [-1, -1, -1, -1, 5],
    "advantages": [0.0, 0.0, 0.0, 0.0, 0.5], "reward": 1.0, "segment": 1, "parent_turn": 0,
    "shared": 3,
    "turns": [
        {"turn": 2, "start": 4, "end": 5, "status": "completed", "finish_reason": "length",
         "text": "e", "messages": [], "tool_calls": [], "rewrite": "agent"},
    ],
}  # fmt: skip
OF_RECORD = {
    "temperature": 0.7, "trained": True, "tools": TOOLS, "record": "train-0-x-t1-a0",
    "task": "train-0-x", "task_id": "x", "rollout": 1, "query": "how many?", "answer": "46",
    "scorer": "exact_match",
    "final_answer": "46", "stop_reason": "answered", "score": 1.0, "scores": {"exact_match": 1.0},
    "advantage": 0.5,
}  # fmt: skip


async def test_tokens_come_back_as_the_tree_they_were_and_go_out_byte_by_byte_the_same(
    run: str, database: RunDatabase
) -> None:
    rows = [{**FIRST, **OF_RECORD}, {**SECOND, **OF_RECORD}]
    imports = asyncio.to_thread(imported, database.name, rows)
    await imports
    [document] = await database.rows.find().to_list()
    row = DBRecordData.from_mongo(document)
    assert [tuple(node) for node in row.tree.nodes] == [(0, 3, -1), (3, 9, 0), (9, 11, 0)]
    assert row.tree["ids"].tolist() == [1, 2, 3, 10, 11, 20, 21, 12, 13, 30, 14]
    assert row.tree["mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]
    assert row.tree["advantages"].tolist() == [0, 0, 0, 0.5, 0.5, 0, 0, -0.25, -0.25, 0, 0.5]
    assert row.tree["capped"][row.tree["mask"] == 1].tolist() == [0, 0, 1, 1, 0]
    assert (row.reward, row.temperature, row.policy_versions) == (1.0, 0.7, [4, 5])
    again = await asyncio.to_thread(exported, database.name, "tokens")
    assert rows_of(again) == rows
    table = await asyncio.to_thread(exported, database.name, "tokens", "parquet")
    second = f"{database.name[:30]}-b"
    await asyncio.to_thread(main, ["import", str(table), "--run_name", second])
    twice = await asyncio.to_thread(exported, second, "tokens")
    assert twice.read_bytes() == again.read_bytes()
    same = await asyncio.to_thread(exported, second, "tokens", "parquet")
    assert parquet.read_table(same).equals(parquet.read_table(table))
    await database.client.drop_database(second)
    # A trainer leases it, of whichever version it is.
    ledger = RowLedger(database, "trainer", 1, 1, 1)
    assert await ledger.ready(1) == 1


MESSAGES = [
    {
        "messages": [
            {"role": "user", "content": "How many in R5?"},
            {"role": "assistant", "content": "<tool_call>oops", "train": False},
            {"role": "tool", "content": "Error: no call"},
            {"role": "assistant", "content": "", "reasoning_content": "look",
             "tool_calls": [call("R5"), call(5)]},
            {"role": "tool", "content": "46", "name": "stock"},
            {"role": "tool", "content": "none", "name": "stock"},
            {"role": "assistant", "content": "<answer>46</answer>"},
        ],
        "tools": TOOLS, "conversation": 0,
        **{k: v for k, v in OF_RECORD.items() if k not in ("temperature", "trained", "tools")},
    },
]  # fmt: skip


def test_messages_come_back_and_are_read_by_datasets_with_their_tools_and_arguments(
    run: str, tmp_path: Path
) -> None:
    imported(run, MESSAGES)
    assert rows_of(exported(run, "messages")) == MESSAGES
    table = exported(run, "messages", "parquet")
    loaded = datasets.load_dataset(
        "parquet", data_files=str(table), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded[0]["tools"] == TOOLS
    thought = loaded[0]["messages"][3]
    assert [each["function"]["arguments"] for each in thought["tool_calls"]] == [
        {"bin": "R5"}, {"bin": 5},
    ]  # fmt: skip
    assert loaded[0]["scores"] == {"exact_match": 1.0}
    # They have no tokens, and are not made any.
    assert main(["export-data", run, "--format", "tokens"]) == 1


def test_preferences_come_back_and_files_of_others_are_taken(run: str) -> None:
    question = [{"role": "system", "content": "s"}, {"role": "user", "content": "?"}]
    of_others = [
        {"prompt": question, "chosen": [{"role": "assistant", "content": answer}],
         "rejected": [{"role": "assistant", "content": "no"}]}
        for answer in ("yes", "sure")
    ]  # fmt: skip
    imported(run, of_others)
    first = exported(run, "preferences")
    rows = rows_of(first)
    assert [{name: row[name] for name in of_others[0]} for row in rows] == of_others
    assert [(row["chosen_score"], row["rejected_score"]) for row in rows] == [(1.0, 0.0)] * 2
    again = f"{run[:30]}-b"
    assert main(["import", str(first), "--run_name", again]) == 0
    assert exported(again, "preferences").read_bytes() == first.read_bytes()


def test_what_a_row_of_others_says_is_kept_in_all_that_is_made_of_the_run(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def named(id: str, bin: str) -> dict[str, Any]:
        return {**call(bin), "id": id}

    rows = [
        {
            "system": "Be brief.",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "R5 and K7?"}]},
                {"role": "assistant", "content": "bad", "weight": 0},
                {"role": "user", "content": "look"},
                {"role": "assistant", "thinking": "hm",
                 "tool_calls": [named("a", "R5"), named("b", "K7")], "latency": 3},
                {"role": "tool", "tool_call_id": "b", "content": "K7 has 2"},
                {"role": "tool", "tool_call_id": "a", "content": "R5 has 1"},
                {"role": "assistant", "content": "1 and 2", "loss_mask": 1},
            ],
            "tools": json.dumps(TOOLS),
        },
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "46"}],
         "source": "a set"},
        {"prompt": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "no"},
                    {"role": "user", "content": "sure?"}], "completion": "yes"},
    ]  # fmt: skip
    imported(run, rows)
    said = capsys.readouterr().out
    assert "fields of rows that are not kept: source (1 rows)" in said
    assert "fields of messages that are not kept: latency (1 rows)" in said
    back = exported(run, "messages")
    assert [(row["messages"], row["tools"]) for row in rows_of(back)] == [
        ([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "R5 and K7?"},
            {"role": "assistant", "content": "bad", "train": False},
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": "", "reasoning_content": "hm",
             "tool_calls": [call("R5"), call("K7")]},
            {"role": "tool", "content": "R5 has 1", "name": "stock"},
            {"role": "tool", "content": "K7 has 2", "name": "stock"},
            {"role": "assistant", "content": "1 and 2"},
        ], TOOLS),
        ([{"role": "user", "content": "?"}, {"role": "assistant", "content": "46"}], None),
        ([{"role": "user", "content": "?"},
          {"role": "assistant", "content": "no", "train": False},
          {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes"}], None),
    ]  # fmt: skip
    capsys.readouterr()
    assert main(["show", run, "train-0-row-0000000-t0-a0"]) == 0
    told = capsys.readouterr().out
    assert "not trained" in told and "formaterror" not in told
    assert "stock(bin='R5')  ⇒  R5 has 1" in told and "stock(bin='K7')  ⇒  K7 has 2" in told
    # There is nothing of tokens to train, and that is what is said.
    words = ["--from_run", run, "--where", "n_turns>=1", "--output_dir", "out", "--use_cpu"]
    assert main(["sft", "--model", MODEL, *words]) == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert "has turns without tokens: `agentrl export-data --format messages`" in refused
    again = f"{run[:30]}-b"
    assert main(["import", str(back), "--run_name", again]) == 0
    assert "not kept" not in capsys.readouterr().out
    assert exported(again, "messages").read_bytes() == back.read_bytes()


def test_a_table_holds_no_arguments_that_its_calls_lack(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(**arguments: str) -> dict[str, Any]:
        function = {"name": "stock", "arguments": arguments}
        return {"messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "46"},
            {"role": "assistant", "content": "46"},
        ]}  # fmt: skip

    datasets.Dataset.from_list([row(bin="R5"), row(shelf="2")]).to_parquet("rows.parquet")
    assert main(["import", "rows.parquet", "--run_name", run]) == 0
    assert "a field that the table's row lacks (2 rows)" in capsys.readouterr().out
    assert [
        message["tool_calls"][0]["function"]["arguments"]
        for one in rows_of(exported(run, "messages"))
        for message in one["messages"]
        if "tool_calls" in message
    ] == [{"bin": "R5"}, {"shelf": "2"}]


def test_a_null_that_a_call_has_comes_back_from_a_table_that_export_wrote(run: str) -> None:
    asked = {"role": "user", "content": "?"}
    called = {"role": "assistant", "content": "", "tool_calls": [call(None)]}
    imported(run, [{"messages": [asked, called]}])
    again = f"{run[:30]}-b"
    table = exported(run, "messages", "parquet")
    assert main(["import", str(table), "--run_name", again]) == 0
    [row] = rows_of(exported(again, "messages"))
    assert row["messages"] == [asked, called]


def test_turns_before_a_pair_and_those_without_training_stay_so(run: str) -> None:
    def said(content: str, **marks: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": content, **marks}

    asked = {"role": "user", "content": "?"}
    row = {
        "prompt": [asked, said("hello"), asked],
        "chosen": [said("a guess", train=False), asked, said("46")],
        "rejected": [said("7")],
    }
    imported(run, [row])
    first = exported(run, "preferences")
    [back] = rows_of(first)
    assert {name: back[name] for name in row} == row
    again = f"{run[:30]}-b"
    assert main(["import", str(first), "--run_name", again]) == 0
    assert exported(again, "preferences").read_bytes() == first.read_bytes()


def test_what_cannot_be_imported_is_said_in_one_sentence(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*rows: dict[str, Any], status: int = 2) -> str:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main(["import", "rows.jsonl", "--run_name", run]) == status
        [line] = capsys.readouterr().err.splitlines()
        return line

    assert main(["import", "nothing.jsonl", "--run_name", run]) == 2
    assert "there is no such file" in capsys.readouterr().err
    assert "rows.jsonl:1 has none of messages, prompt and completion" in said({"a": "b"})
    assert "rows.jsonl:1 is a text without a chat template" in said({"text": "a"})
    assert "has no row" in said()
    ends = {"messages": [{"role": role, "content": "?"} for role in ("assistant", "user")]}
    assert "rows.jsonl:1 does not end with a message of the assistant" in said(ends)
    uneven = {**FIRST, **OF_RECORD, "logprobs": [0.0]}
    assert "has columns of different lengths" in said(uneven)
    assert "of which segment 0 is missing" in said({**SECOND, **OF_RECORD})
    assert "which cannot be" in said(
        {**FIRST, **OF_RECORD, "turns": [{"turn": 0, "start": 3, "end": 99}]}
    )
    assert "lacks 'loss_mask'" in said({**OF_RECORD, "input_ids": [1]})
    first, many = FIRST["input_ids"], len(FIRST["input_ids"])
    for column, values, why in (
        ("input_ids", [-1, *first[1:]], "-1 in `input_ids`, which is no token"),
        ("input_ids", [2**40, *first[1:]], "in `input_ids`, which is kept as int32"),
        ("input_ids", [1.5, *first[1:]], "1.5 in `input_ids`, which is kept as int32"),
        ("input_ids", ["a"] * many, "no `input_ids` as a list of numbers"),
        ("loss_mask", [2] * many, "2 in `loss_mask`, which is 0 or 1"),
    ):
        assert why in said({**FIRST, **OF_RECORD, column: values})
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
    for fields, why in (
        ({"task_id": [1]}, "[1] as `task_id`, which must be a text"),
        ({"rollout": -1}, "-1 as `rollout`, which must be a number from 0"),
        ({"score": "high"}, "'high' as `score`: input should be a valid number"),
        ({"tools": "x"}, "has `tools` that are no JSON"),
        ({"scores": "x"}, "'x' where JSON should be"),
        ({"messages": ["?"]}, "message 1: is not an object but a str"),
        ({"train": False}, "says that it is not to be trained"),
    ):
        assert why in said({"messages": talk, **fields})
    pair = {"prompt": "?", "chosen": "a", "rejected": "b"}
    assert "is a text without a chat template" in said(pair)
    scored = {"prompt": talk[:1], "chosen_score": 0.0, "rejected_score": 1.0}
    assert "0.0 as `chosen_score`, which is not above 1.0" in said({**pair, **scored})
    imported(run, MESSAGES)
    capsys.readouterr()
    other = {"messages": [{"role": "assistant", "content": "another"}]}
    assert "has other trajectories" in said(other)
    assert main(["export-data", run, "--format", "messages", "--out", "rows.txt"]) == 2
    assert "must end in .parquet or .jsonl" in capsys.readouterr().err
    assert main(["export-data", run, "--format", "messages", "--out", "rows.jsonl"]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_runs_files_are_what_trl_trains_on_and_a_run_made_of_them_is_trained(
    tmp_path: Path,
) -> None:
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}

    def agentrl(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "agentrl.cli", *words], cwd=tmp_path, text=True,
            env={**environment, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True, timeout=400,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (tmp_path / "tasks.jsonl").write_text("\n".join(demo_lines(24)) + "\n")
    agentrl(
        "sample", "--model", MODEL, "--tasks", "tasks.jsonl", "--num_generations", "4",
        "--mcp_manager_url", f"{DEMO / 'warehouse_tools.py'}:server", "--max_turns", "6",
        "--max_tokens", "384", "--max_new_tokens", "48",
    )  # fmt: skip
    for run in ("sample", "again"):
        if run == "again":
            agentrl("import", "sample-tokens.jsonl", "--run_name", "again")
        agentrl("export-data", run, "--format", "tokens", "--to", "jsonl")
        agentrl("export-data", run, "--format", "messages", "--to", "jsonl", "--model", MODEL)
    for name in ("tokens.jsonl", "messages.jsonl"):
        files = [tmp_path / f"{run}-{name}" for run in ("sample", "again")]
        assert files[0].read_bytes() == files[1].read_bytes()
    agentrl("import", "sample-messages.jsonl", "--run_name", "texts")
    agentrl("export-data", "texts", "--format", "messages", "--to", "jsonl")
    files = [rows_of(tmp_path / f"{run}-messages.jsonl") for run in ("sample", "texts")]
    assert files[0] == files[1]
    n_rows = sum(row["trained"] for row in rows_of(tmp_path / "again-tokens.jsonl"))
    for format in ("messages", "preferences"):
        agentrl("export-data", "sample", "--format", format)

    # One step of TRL's trainers on each file, which render and encode it by themselves.
    program = """
import sys
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
model, folder = sys.argv[1:]
common = dict(output_dir=folder, max_steps=1, per_device_train_batch_size=4, use_cpu=True,
              report_to="none", save_strategy="no", bf16=False)
for file, trainer, config in (("sample-messages.parquet", SFTTrainer, SFTConfig),
                              ("sample-preferences.parquet", DPOTrainer, DPOConfig)):
    rows = load_dataset("parquet", data_files=file, split="train", cache_dir=folder)
    trained = trainer(model=model, args=config(**common), train_dataset=rows).train()
    print(trainer.__name__, trained.training_loss)
"""
    trl = subprocess.run(
        [sys.executable, "-c", program, MODEL, str(tmp_path / "trl")], cwd=tmp_path, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}, capture_output=True,
        timeout=300,
    )  # fmt: skip
    assert trl.returncode == 0, trl.stderr[-3000:]
    assert "SFTTrainer" in trl.stdout and "DPOTrainer" in trl.stdout

    # A trainer of ours takes the imported rows.
    agentrl(
        "launch", "grpo", "again", "--model_name_or_path", MODEL, "--enable_sampling", "false",
        "--per_device_train_batch_size", "512", "--max_tokens", "384", "--use_cpu",
    )  # fmt: skip
    [line] = (tmp_path / "output" / "again" / "metrics.jsonl").read_text().splitlines()
    step = json.loads(line)
    assert step["n_rows"] == n_rows > 30 and step["grad_norm"] > 0
    # Its model is the one that sampled them: no importance ratio is far from 1.
    assert step["mismatch_kl"] < 1e-3
