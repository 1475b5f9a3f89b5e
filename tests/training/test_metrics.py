"""What is written about a step, and where."""

import json
from pathlib import Path

import pytest
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl.configs import Config, ConfigError, parse_config, trackers_of
from agentrl.databases.row_ledger import RowCounts, RowHeader
from agentrl.training.run.metrics import MetricsWriter, StepTimes, step_metrics
from agentrl.training.run.rollout_table import VIEW_URL
from agentrl.training.step.train_step import StepStatistics

STATISTICS = StepStatistics(
    loss=0.5, grad_norm=2.0, learning_rate=1e-3, ratio_mean=1.0, ratio_min=0.5, ratio_max=2.0,
    clip_fraction=0.25, clip_fraction_low=0.05, clip_fraction_high=0.2, truncated_fraction=0.0,
    left_out_fraction=0.1, mismatch_kl=0.01, mismatch_kl_k1=0.02, effective_sample_size=0.9,
    entropy=None, negative_logprob=0.7, reference_kl=None, staleness_mean=0.5, staleness_max=1,
    staleness_histogram=(20, 20, 0, 0, 0, 0, 0, 0), n_train_tokens=40, n_micro_batches=2,
    grad_norms={"model.layers.0": 1.5, "lm_head": 0.5},
)  # fmt: skip
TIMES = StepTimes(
    step_seconds=2.0, train_seconds=1.0, wait_seconds=0.5, publish_seconds=0.25, save_seconds=0.05,
    stall_seconds=0.1,
)  # fmt: skip
ROWS = [
    RowHeader(
        id=str(index), group_order=index, n_tokens=30, n_train_tokens=20, cost=30.0, prefix_hash="",
        reward=float(index), n_continuations=3, n_drifts=index,
    )
    for index in range(2)
]  # fmt: skip

COUNTS = RowCounts(ready=3, evicted=2)


def writer(output: Path, step: int = 0, *flags: str) -> MetricsWriter:
    config: Config = parse_config(["--output_dir", str(output), *flags])
    return MetricsWriter(output, Accelerator(cpu=True), config, step)


def lines(output: Path) -> list[dict[str, float]]:
    text = (output / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_each_step_is_one_json_line_with_what_a_run_is_watched_by(tmp_path: Path) -> None:
    metrics = writer(tmp_path)
    for step in (1, 2):
        metrics.write(step_metrics(step, step - 1, STATISTICS, ROWS, 1.0, TIMES, COUNTS, 0))
    metrics.close()
    first, second = lines(tmp_path)
    assert (first["step"], second["step"], second["version"]) == (1, 2, 1)
    assert (first["reward_mean"], first["reward_std"]) == (0.5, 0.5)
    assert (first["n_rows"], first["n_tokens"], first["n_train_tokens"]) == (2, 60, 40)
    assert (first["wait_seconds"], first["rows_ready"]) == (0.5, 3)
    assert first["rows_evicted"] == 2
    assert (first["n_continuations"], first["n_drifts"]) == (6, 1)
    assert first["entropy"] is None
    assert first["grad_norms"] == {"model.layers.0": 1.5, "lm_head": 0.5}
    assert first["staleness_histogram"][:3] == [20, 20, 0]


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    metrics = writer(tmp_path, 0, "--report_to", "tensorboard", "--run_name", "board")
    metrics.write(step_metrics(1, 0, STATISTICS, ROWS, 1.0, TIMES, COUNTS, 0))
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "board"))
    events.Reload()
    (loss,) = events.Scalars("loss")
    assert (loss.step, loss.value) == (1, 0.5)
    assert "reward_mean" in events.Tags()["scalars"]
    (layer,) = events.Scalars("grad_norms/model.layers.0")
    (stale,) = events.Scalars("staleness_histogram/1")
    assert (layer.value, stale.value) == (1.5, 20)


def test_going_on_from_a_step_sets_later_lines_aside(tmp_path: Path) -> None:
    metrics = writer(tmp_path)
    for step in (1, 2, 3):
        metrics.write(step_metrics(step, step - 1, STATISTICS, ROWS, 1.0, TIMES, COUNTS, 0))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "vers')  # a crash in the middle of a line
    again = writer(tmp_path, 2)
    again.write(step_metrics(3, 5, STATISTICS, ROWS, 1.0, TIMES, COUNTS, 0))
    assert [(line["step"], line["version"]) for line in lines(tmp_path)] == [(1, 0), (2, 1), (3, 5)]
    aside = (tmp_path / "metrics.superseded.jsonl").read_text().splitlines()
    assert json.loads(aside[0])["step"] == 3
    assert len(aside) == 2


def test_trackers_are_those_that_are_named_or_all_that_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trackers_of("none") == []
    assert trackers_of("tensorboard") == ["tensorboard"]
    assert trackers_of("all") == ["tensorboard"]  # the others are not in requirements-dev.txt
    with pytest.raises(ConfigError, match="package swanlab is not installed"):
        trackers_of("tensorboard,swanlab")
    (tmp_path / "wandb").mkdir()  # of a run that wrote offline, where a launch is started
    monkeypatch.syspath_prepend(tmp_path)
    assert trackers_of("all") == ["tensorboard"]
    with pytest.raises(ConfigError, match="pip install mlflow-skinny pandas, or leave"):
        trackers_of("mlflow")


def test_a_tracker_that_refuses_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("a file where its folder should be")
    with pytest.raises(ConfigError, match=r"^--report_to tensorboard: tensorboard: .*leave the"):
        writer(tmp_path, 0, "--report_to", "tensorboard")


def test_the_address_of_the_pages_is_one_without_a_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, told in (
        ("host:8265", "give the address of `agentrl view`"),
        ("http://host:8265/?token=abc", "give the address without the token"),
    ):
        monkeypatch.setenv(VIEW_URL, address)
        with pytest.raises(ConfigError, match=told) as refused:
            writer(tmp_path, 0, "--report_to", "tensorboard")
        assert "abc" not in str(refused.value)
