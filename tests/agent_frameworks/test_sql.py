"""The program of examples/sql: what its script makes, and two steps from a short warm-up."""

import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from example_run import EXAMPLES, PACKAGES, assert_exact, trained

pytestmark = pytest.mark.timeout(580)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's files."""
    folder = tmp_path_factory.mktemp("sql")
    make = [sys.executable, str(EXAMPLES / "sql" / "make.py"), "--output_dir", str(folder)]
    path = {**os.environ, "PYTHONPATH": str(PACKAGES)}
    subprocess.run(make, check=True, capture_output=True, timeout=300, env=path)
    return folder


def tasks_of(made: Path, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (made / f"{split}.jsonl").read_text().splitlines()]


def test_held_out_questions_name_what_no_training_question_names(made: Path) -> None:
    def named(split: str) -> set[tuple[str, str]]:
        """Names, which are in quotes, and numbers, by schema."""
        return {
            (task["schema"], word)
            for task in tasks_of(made, split)
            for word in task["query"].replace("?", "").split()
            if word.isdigit() or word.startswith("'")
        }

    assert len(named("train")) > 100 and len(named("heldout")) > 30
    assert not named("train") & named("heldout")
    assert {task["schema"] for task in tasks_of(made, "heldout")} == {
        "medical", "library", "shop", "school",
    }  # fmt: skip


def test_each_reference_gives_rows_in_both_databases_and_other_rows_in_each(made: Path) -> None:
    differ = 0
    for task in tasks_of(made, "train"):
        file = Path(task["database"])
        found = []
        for path in (file, file.with_stem(f"{file.stem}-other")):
            with closing(sqlite3.connect(path)) as connection:
                found.append(connection.execute(task["answer"]).fetchall())
        assert found[0], task
        differ += found[0] != found[1]
    # Some counts agree by chance; a wrong query that is right in one database must fail in most.
    assert differ > 0.9 * len(tasks_of(made, "train"))


def test_the_sql_agent_trains_on_what_was_sampled_and_is_paid_for_right_results(
    made: Path, tmp_path: Path
) -> None:
    some = made / "some.jsonl"
    some.write_text("\n".join((made / "demonstrations.jsonl").read_text().splitlines()[:640]))
    warmup = [
        sys.executable, "-m", "agentrl.cli", "sft", "--model", str(made / "untrained"),
        "--train_file", str(some), "--output_dir", str(tmp_path / "warmup"), "--max_steps", "40",
        "--per_device_train_batch_size", "16", "--max_tokens", "384", "--learning_rate", "3e-3",
        "--use_cpu",
    ]  # fmt: skip
    subprocess.run(warmup, check=True, capture_output=True, timeout=300)
    model = tmp_path / "warmup" / "model"
    with trained(
        tmp_path, "--config", str(EXAMPLES / "sql" / "grpo.yml"),
        "--agent_entry", f"{EXAMPLES / 'sql' / 'agent.py'}:run",
        "--model_name_or_path", str(model), "--train_file", str(made / "train.jsonl"),
        "--eval_file", str(made / "heldout.jsonl"),
    ) as database:  # fmt: skip
        assert_exact(database, model)
        answers = {task["id"]: task for task in tasks_of(made, "train")}
        for record in database["records"].find({"status": "ready"}):
            task = database["tasks"].find_one({"_id": record["task"]})
            assert task is not None
            line = answers[task["task_id"]]
            assert record["scores"]["reward"] == record["score"]
            with closing(sqlite3.connect(line["database"])) as connection:
                wanted = connection.execute(line["answer"]).fetchall()
                try:
                    given = connection.execute(record["final_answer"] or "").fetchall()
                except sqlite3.Error:
                    given = None
            if record["score"]:
                assert given is not None and Counter(given) == Counter(wanted)
