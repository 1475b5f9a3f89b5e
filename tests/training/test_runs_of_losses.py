"""Whole runs of the trainer with each kind of loss and of model: a real mongod, rows put in by
hand, real processes where there are several."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny import linear_rows, make_row, tiny_model
from trainer_run import Run
from transformers import AutoModelForCausalLM

from agentrl.databases.documents import DBRecordData, RowStatus
from agentrl.training.checkpoint.layout import list_checkpoints
from agentrl.training.model.export import export_checkpoint
from agentrl.training.trainer import main

CONFIG = Path(__file__).parents[2] / "assets" / "fsdp2_cpu.yml"
FIGURES = (
    "loss", "grad_norm", "ratio_max", "clip_fraction", "mismatch_kl", "reference_kl", "value_loss",
    "value_mean", "explained_variance", "critic_grad_norm", "n_rows", "reward_mean",
)  # fmt: skip
TREE = [(0, 12, -1), (12, 24, 0), (24, 34, 1), (34, 48, 1), (48, 60, 0)]
PPO = ("--loss_calculator", "PPO", "--critic_learning_rate", "1e-3", "--gae_lambda", "0.95")


def rows_of(count: int) -> list[DBRecordData]:
    """Linear ones, and each fourth a tree."""
    rows = linear_rows(count)
    for index in range(3, count, 4):
        rows[index] = make_row(f"row-{index:03d}", index, TREE, reward=float(index % 2))
    return rows


def trained(run: Run, *flags: str) -> list[dict[str, Any]]:
    """The metrics of two steps, the run's end, and, gone on with more rows, two more steps."""
    rows = rows_of(16)
    for part in (rows[:8], rows[8:]):
        run.add(part)
        assert main(run.flags("--enable_sampling", "false", *flags)) == 0
    assert {row["status"] for row in run.rows()} == {RowStatus.TRAINED}
    assert list_checkpoints(run.output)[-1].name == "checkpoint-4"
    lines = run.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    return lines


@pytest.mark.parametrize("loss", ["GSPO", pytest.param("KL-Cov", marks=pytest.mark.slow)])
def test_a_loss_of_sequences_or_of_the_batch_trains_in_micro_batches(run: Run, loss: str) -> None:
    lines = trained(run, "--loss_calculator", loss, "--micro_batch_tokens", "40")
    assert all(line["grad_norm"] > 0 and line["n_micro_batches"] > 1 for line in lines)


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param((), id="model"),
        pytest.param(("--lora_rank", "4"), id="adapter", marks=pytest.mark.slow),
    ],
)
def test_the_reference_is_the_start_also_after_a_resume(run: Run, lora: tuple[str, ...]) -> None:
    lines = trained(run, "--beta", "0.1", *lora)
    divergences = [line["reference_kl"] for line in lines]
    assert divergences[0] == pytest.approx(0, abs=1e-6)
    assert 1e-6 < divergences[1] < divergences[2] < divergences[3]


def test_another_reference_can_be_given(run: Run, tmp_path: Path) -> None:
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    other = ("--reference_model_name_or_path", str(tmp_path / "other"))
    assert trained(run, "--beta", "0.1", *other)[0]["reference_kl"] > 0.1


@pytest.mark.parametrize(
    "flags",
    [
        ["--beta", "0.1", "--reference_model_name_or_path", "/no/such"],
        [*PPO, "--critic_model_name_or_path", "/no/such"],
    ],
)
def test_a_model_that_is_not_there_is_named_with_its_flag(
    run: Run, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run.flags("--enable_sampling", "false", *flags)) == 2
    assert (
        f"agentrl train: {flags[-2]} /no/such: there is no such folder" in capsys.readouterr().err
    )


def test_ppo_trains_policy_and_critic_and_goes_on_with_both(run: Run, tmp_path: Path) -> None:
    lines = trained(run, *PPO, "--critic_warmup_steps", "1")
    assert [line["grad_norm"] > 0 for line in lines] == [False, True, True, True]
    assert lines[0]["value_mean"] == lines[0]["explained_variance"] == 0
    assert all(line["value_mean"] != 0 for line in lines[1:]), "it does not start anew"
    assert all(line["critic_grad_norm"] > 0 for line in lines)
    assert all(line["return_mean"] == pytest.approx(0.5, abs=0.3) for line in lines)
    export_checkpoint(run.output / "checkpoint-4", run.model, tmp_path / "policy")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "policy").state_dict()
    assert exported.keys() == tiny_model().state_dict().keys()


def test_ppo_does_not_go_on_from_a_checkpoint_without_a_critic(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.add(linear_rows(8))
    assert main(run.flags("--enable_sampling", "false")) == 0
    assert main(run.flags("--enable_sampling", "false", *PPO)) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "agentrl train:" in line]
    assert len(said) == 1 and "checkpoint-2 was saved with GRPO and has no critic" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "devices"),
    [
        ([*PPO, "--beta", "0.05"], ["--tp_size", "2"]),
        (["--loss_calculator", "GSPO", "--micro_batch_tokens", "40"], ["--cp_size", "2"]),
        ([*PPO, "--beta", "0.05", "--lora_rank", "4", "--micro_batch_tokens", "80"], []),
    ],
    ids=["ppo-tp", "gspo-cp", "ppo-lora-dp"],
)
def test_two_processes_train_like_one(run: Run, flags: list[str], devices: list[str]) -> None:
    run.add(rows_of(9))  # the last step has one row, which leaves a data-parallel process without
    common = run.flags("--enable_sampling", "false", *flags)
    if not devices:
        common[common.index("--per_device_train_batch_size") + 1] = "2"
    command = [
        sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG),
        "--num_processes", "2", "--main_process_port", "0", "-m", "agentrl.training.trainer",
    ]  # fmt: skip
    done = subprocess.run(
        [*command, *common, *devices], env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    two = run.metrics()
    common[common.index("--per_device_train_batch_size") + 1] = "4"
    assert main([*common, "--resume_from_checkpoint", "false"]) == 0
    one = run.metrics()
    assert len(one) == len(two) == 3
    for ours, theirs in zip(one, two, strict=True):
        for name in FIGURES:
            if ours[name] is None:
                assert theirs[name] is None
            else:
                assert ours[name] == pytest.approx(theirs[name], rel=2e-3, abs=1e-5), name
