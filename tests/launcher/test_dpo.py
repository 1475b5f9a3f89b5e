"""`agentrl dpo` as people call it: it learns the order, goes on where it stopped, is exported."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from supervised_command import DEMO, metrics, said, start
from transformers import AutoModelForCausalLM

from agentrl.cli import main
from agentrl.launcher.run_pairs import pairs_of_groups


def pairs(file: Path, count: int = 24) -> Path:
    """Pairs of which the same answer is always the right one."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"How many parts are in bin R{number % 10}?"}],
            "chosen": [{"role": "assistant", "content": "<answer>7</answer>"}],
            "rejected": [{"role": "assistant", "content": f"<answer>{number + 10}</answer>"}],
        }
        for number in range(count)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def dpo(folder: Path, *flags: str, processes: int = 1) -> subprocess.Popen[str]:
    return start("dpo", folder, pairs(folder / "pairs.jsonl"), *flags, processes=processes)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--train_file", "rows.jsonl"], "none of its 1 rows can be trained; rows.jsonl:1 has not"),
        (["--train_file", "rows.jsonl", "--loss_type", "kto"], "--loss_type kto: is none of"),
        (["--train_file", "rows.jsonl", "--beta", "0"], "--beta 0: must be above 0"),
        (["--train_file", "rows.jsonl", "--label_smoothing", "0.1"], "only robust; leave it out"),
        (["--train_file", "rows.jsonl", "--margin", "1"], "--margin is between trajectories of"),
        (["--from_run", "nobody", "--margin", "-1"], "--margin -1: must be above 0"),
        (["--from_run", "nobody"], "run 'nobody' has no database"),
        (["--train_file", "rows.jsonl", "--kl_estimator", "k1"], "unknown flag --kl_estimator"),
    ],
)
def test_bad_input_is_one_sentence(
    flags: list[str],
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DB_URL", raising=False)
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}\n')
    assert main(["dpo", "--model", str(DEMO), *flags]) == 2
    assert sentence in capsys.readouterr().err


def record(id: str, task: str, score: float | None) -> dict[str, Any]:
    return {"_id": id, "task": task, "score": score}


def test_a_group_gives_its_best_against_its_worst() -> None:
    records = [
        record("b3", "b", 1.0), record("a1", "a", 0.5), record("a2", "a", 0.0),
        record("a3", "a", 1.0), record("a4", "a", 1.0), record("b1", "b", 1.0),
        record("c1", "c", 0.0), record("c2", "c", None), record("d1", "d", 0.25),
        record("d2", "d", 0.0),
    ]  # fmt: skip
    found, left_out = pairs_of_groups(records, None)
    assert found == {"a": ("a3", "a2"), "d": ("d1", "d2")}
    assert left_out == {
        "b": "has equal scores only",
        "c": "has 1 finished trajectories with a score, and a pair two",
    }
    found, left_out = pairs_of_groups(records, 0.5)
    assert found == {"a": ("a3", "a2")}
    assert left_out["d"] == "has scores that differ by 0.25, less than --margin 0.5"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_it_learns_the_order_and_its_model_is_a_folder_that_transformers_loads(
    tmp_path: Path,
) -> None:
    text = said(dpo(tmp_path, "--num_train_epochs", "3", "--loss_type", "ipo"))
    assert "24 pairs" in text
    assert "held-out accuracy 1.00" in text
    lines = metrics(tmp_path, "dpo")
    assert [line["step"] for line in lines] == [*range(1, 10)]
    assert lines[0]["rewards"]["margins"] == pytest.approx(0.0, abs=1e-5)
    assert lines[-1]["rewards"]["margins"] > 0.1
    assert lines[-1]["eval_loss"] < lines[0]["loss"]
    assert lines[-1]["eval_rewards"]["accuracies"] == 1.0
    assert lines[-1]["eval_rewards"].keys() == {"chosen", "rejected", "accuracies", "margins"}
    AutoModelForCausalLM.from_pretrained(tmp_path / "output" / "dpo" / "model")


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_a_stop_and_a_start_on_two_processes_end_like_one_run(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    flags = ("--max_steps", "5", "--lr_scheduler_type", "constant", "--learning_rate", "1e-4")
    said(dpo(whole, *flags))
    said(dpo(parts, *flags, "--max_steps", "2"))
    # 2 processes of 4 pairs each make the steps that one of 8 makes, to the same reference.
    text = said(dpo(parts, *flags, "--per_device_train_batch_size", "4", processes=2))
    assert "going on from" in text
    before, after = metrics(whole, "dpo"), metrics(parts, "dpo")
    assert [line["step"] for line in after] == [*range(1, 6)]
    for name in ("loss", "grad_norm", "eval_loss"):
        assert [line[name] or 0 for line in after[2:]] == pytest.approx(
            [line[name] or 0 for line in before[2:]], rel=1e-3
        )
    assert after[-1]["rewards"] == pytest.approx(before[-1]["rewards"], rel=1e-3)
