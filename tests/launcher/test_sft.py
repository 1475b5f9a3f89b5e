"""`agentrl sft` as people call it: a model that learns, goes on where it stopped, is exported."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from supervised_command import metrics, runs, said, start
from transformers import AutoModelForCausalLM

from agentrl.cli import main
from agentrl.training.checkpoint.layout import list_checkpoints

DEMO = Path(__file__).parents[2] / "assets" / "demo" / "model"


def talks(file: Path, count: int = 48) -> Path:
    """Conversations that all end in the same answer."""
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"How many parts are in bin R{number % 10}?"},
                {"role": "assistant", "content": "<answer>7</answer>", "id": f"m{number}"},
            ]
        }
        for number in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def sft(tmp_path: Path, *flags: str, processes: int = 1) -> subprocess.Popen[str]:
    """Start the command in `tmp_path`."""
    return start("sft", tmp_path, tmp_path / "talks.jsonl", *flags, processes=processes)


def until(there: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_bad_input_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}\n')
    given = ["sft", "--model", str(DEMO), "--train_file"]
    assert main([*given, "none.jsonl"]) == 2
    assert (
        "--train_file none.jsonl cannot be read: No such file or directory"
        in capsys.readouterr().err
    )
    assert main([*given, "rows.jsonl"]) == 2
    assert "none of its 1 rows can be trained; rows.jsonl:1 has none of" in capsys.readouterr().err
    assert not (tmp_path / "output").exists()  # nothing was begun
    assert main([*given, "rows.jsonl", "--num_generations", "8"]) == 2
    assert "unknown flag --num_generations" in capsys.readouterr().err


def test_what_the_user_may_not_expect_of_rows_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = {"role": "assistant", "content": "7", "reasoning_content": "hm"}
    row = {"messages": [{"role": "user", "content": "?"}, answer]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 2)
    (tmp_path / "none.jsonl").write_text('{"question": "?"}\n')  # ends the command before training
    given = ["--train_file", "rows.jsonl", "--eval_file", "none.jsonl"]
    assert main(["sft", "--model", str(DEMO), *given]) == 2
    told = "thoughts that the chat template does not write are trained before the turn (2 rows)"
    assert told in capsys.readouterr().out


@pytest.mark.slow
def test_it_learns_and_its_model_is_a_folder_that_transformers_loads(tmp_path: Path) -> None:
    talks(tmp_path / "talks.jsonl")
    text = said(sft(tmp_path, "--num_train_epochs", "2"))
    assert "48 rows" in text
    assert "fields of messages that are not read: id (48 rows)" in text
    lines = metrics(tmp_path, "sft")
    assert [line["step"] for line in lines] == [*range(1, 13)]
    assert lines[-1]["loss"] < 0.1 * lines[0]["loss"]
    assert lines[-1]["eval_loss"] < 0.1
    AutoModelForCausalLM.from_pretrained(tmp_path / "output" / "sft" / "model")
    again = said(sft(tmp_path, "--num_train_epochs", "2"))  # nothing is left to do
    assert "nothing to do: output/sft is finished after step 12; another --run_name" in again
    assert "wrote" not in again
    # A flag that would have no effect is no success.
    other = said(sft(tmp_path, "--num_train_epochs", "2", "--learning_rate", "5e-4"), status=2)
    assert "finished after step 12, and flags differ (--learning_rate 1e-3 → 5e-4" in other
    assert "wrote" not in other
    [row] = [line for line in runs(tmp_path) if line.startswith("sft ")]
    assert row.split()[1:3] == ["finished", "12/12"]
    # With another model alone, the model is named.
    trained = str(tmp_path / "output" / "sft" / "model")
    moved = said(sft(tmp_path, "--num_train_epochs", "2", "--model", trained), status=2)
    assert f"--model {trained}: output/sft/checkpoint-12 was trained from another model" in moved
    assert "--train_file" not in moved


@pytest.mark.slow
def test_a_stop_and_a_start_on_two_processes_end_like_one_run(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        talks(folder / "talks.jsonl")
    flags = ("--max_steps", "12", "--lr_scheduler_type", "constant", "--learning_rate", "1e-4")
    said(sft(whole, *flags))
    said(sft(parts, *flags, "--max_steps", "5"))
    # 2 processes of 4 rows each make the steps that one of 8 makes.
    halves = (*flags, "--per_device_train_batch_size", "4")
    said(sft(parts, *halves, processes=2))
    before, after = metrics(whole, "sft"), metrics(parts, "sft")
    assert [line["step"] for line in after] == [*range(1, 13)]
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in after] == pytest.approx(
            [line[name] for line in before], rel=1e-3
        )


@pytest.mark.slow
def test_a_signal_stops_it_after_a_step_with_a_checkpoint(tmp_path: Path) -> None:
    talks(tmp_path / "talks.jsonl")
    started = sft(tmp_path, "--max_steps", "100000")
    folder = tmp_path / "output" / "sft"
    until((folder / "metrics.jsonl").exists)
    started.send_signal(signal.SIGTERM)
    text = said(started)
    assert "stopped after step" in text
    assert list_checkpoints(folder), text


@pytest.mark.slow
def test_a_killed_command_takes_its_trainer_along_and_the_same_one_goes_on(tmp_path: Path) -> None:
    talks(tmp_path / "talks.jsonl")
    folder = tmp_path / "output" / "sft"
    flags = ("--max_steps", "40", "--save_steps", "10")
    started = sft(tmp_path, *flags)
    until((folder / "metrics.jsonl").exists)
    started.kill()
    told = started.communicate(timeout=60)[0]  # until the trainer, which has the pipe too, ended
    assert "stopped after step" in told
    reached = len(metrics(tmp_path, "sft"))
    text = said(sft(tmp_path, *flags))
    assert 0 < reached < 40 and f"going on from output/sft/checkpoint-{reached}" in text
    assert [line["step"] for line in metrics(tmp_path, "sft")] == [*range(1, 41)]
    assert not list(folder.glob("*superseded*"))
    # As if the command that made the last checkpoint had been killed before it wrote the folder.
    old = list_checkpoints(folder)[-1].stat().st_mtime - 60
    os.utime(folder / "model", (old, old))
    assert "wrote output/sft/model, the weights of step 40" in said(sft(tmp_path, *flags))
    assert "wrote" not in said(sft(tmp_path, *flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "status", "told"),
    [
        (1, 137, "was ended by SIGKILL, as the system does when memory runs out"),
        (2, 1, "failed, as said above"),
    ],
)
def test_a_trainer_that_is_killed_is_told_with_the_way_on(
    tmp_path: Path, processes: int, status: int, told: str
) -> None:
    talks(tmp_path / "talks.jsonl")
    flags = ("--max_steps", "100000", "--save_steps", "1", "--per_device_train_batch_size", "4")
    started = sft(tmp_path, *flags, processes=processes)
    until(lambda: list_checkpoints(tmp_path / "output" / "sft"))
    trainers = [  # behind those that started them
        process
        for process in psutil.Process(started.pid).children(recursive=True)
        if "agentrl.training.supervised.process" in process.cmdline()
    ]
    trainers[-1].kill()
    last = said(started, status=status).splitlines()[-1]
    reached = list_checkpoints(tmp_path / "output" / "sft")[-1].name
    assert last == f"the trainer {told}; the same command resumes from {reached}"


@pytest.mark.slow
def test_a_run_that_the_trainer_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    talks(tmp_path / "talks.jsonl")
    flags = ("--lora_rank", "4", "--lora_target_modules", "q_projection")
    assert "no linear layer q_projection" in said(sft(tmp_path, *flags), status=2)
    assert [each.name for each in tmp_path.iterdir()] == ["talks.jsonl"]
    said(sft(tmp_path, "--max_steps", "1"))
    said(sft(tmp_path, "--max_steps", "2", *flags), status=2)
    assert list_checkpoints(tmp_path / "output" / "sft")  # of a run that had begun


@pytest.mark.slow
def test_other_rows_are_refused_unless_the_data_may_change(tmp_path: Path) -> None:
    talks(tmp_path / "talks.jsonl")
    text = said(sft(tmp_path, "--max_steps", "2"))
    script = text.partition("MODEL=output/sft/model ")[2].split()[0]
    assert (tmp_path / script).is_file() and script.endswith("grpo_example.sh")
    talks(tmp_path / "talks.jsonl", count=50)
    refused = said(sft(tmp_path, "--max_steps", "3"), status=2)
    assert f"--train_file {tmp_path / 'talks.jsonl'}: output/sft/checkpoint-2 was" in refused
    assert "other rows" in refused and "rows-" not in refused
    said(sft(tmp_path, "--max_steps", "3", "--change_data", "true"))
