"""The benchmark of staleness: the age of its tokens, its resuming, and the page made from it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from sorting_task import (
    DOWN,
    END,
    EQUALS,
    UP,
    ZERO,
    answer,
    held_out,
    make_start_model,
    score,
    training_prompts,
)
from stale_run import Length, configuration, run
from staleness import LOSSES
from staleness_page import PAGE, lines, page, recommended

from agentrl.configs import ConfigError

ROOT = Path(__file__).parents[2]
SHORT = Length(tokens=4_000, curve_steps=4, final=1)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("start")
    make_start_model(folder, steps=20)
    yield folder
    torch.set_num_threads(threads)


def test_the_answer_is_the_digits_in_the_order_that_the_prompt_names() -> None:
    three, one = ZERO + 3, ZERO + 1
    assert answer((UP, three, one, EQUALS)) == [one, three, END]
    assert answer((DOWN, one, three, EQUALS)) == [three, one, END]
    assert answer((UP, three, one, EQUALS), "unsorted") == [three, one, END]
    assert answer((UP, three, one, EQUALS), "other_direction") == [three, one, END]
    assert score((UP, three, one, EQUALS), [one, three, END]) == 1
    assert score((UP, three, one, EQUALS), [one, three]) == 0


def test_no_held_out_prompt_is_trained() -> None:
    drawn = training_prompts("train 0")
    assert not set(held_out()) & {next(drawn) for _ in range(50_000)}


def test_every_token_is_as_old_as_the_staleness_says(start: Path) -> None:
    of_age = {k: run(start, LOSSES["GRPO"], k, 0, SHORT) for k in (0, 3)}
    for k, found in of_age.items():
        ages = [min(step, k) for step in range(found["steps"])]
        assert found["staleness_mean"] == pytest.approx(sum(ages) / len(ages), abs=1e-4)
        assert found["tokens"] >= SHORT.tokens
    # The engine's logprobs are the learner's own where both have the same weights.
    assert of_age[0]["mismatch_kl"] == pytest.approx(0, abs=1e-5)


def test_staleness_is_what_takes_the_policies_apart(start: Path) -> None:
    flags = (*LOSSES["GRPO"], "--learning_rate", "1e-3")
    on, off = (run(start, flags, k, 0, SHORT) for k in (0, 3))
    assert on["effective_sample_size_min"] > 0.999 > off["effective_sample_size_min"]
    assert on["mismatch_kl"] < 1e-5 < 1e-4 < off["mismatch_kl"]
    assert on["success"] == run(start, flags, 0, 0, SHORT)["success"]


def test_the_losses_are_configurations_that_a_run_accepts() -> None:
    for flags in LOSSES.values():
        assert configuration(flags, 4).staleness_bound == 4
    with pytest.raises(ConfigError, match="rollout_is"):
        configuration(("--loss_calculator", "GRPO", "--rollout_is", "token"), 4)


@pytest.mark.slow
def test_started_again_it_makes_the_runs_that_are_missing(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"

    def start_it() -> tuple[dict[str, object], str]:
        command = [sys.executable, str(ROOT / "benchmarks" / "staleness.py"), "--quick"]
        done = subprocess.run(
            [*command, "--runs", str(file)], capture_output=True, text=True, check=True
        )
        result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
        return result, done.stderr

    first, said = start_it()
    made = file.read_text().splitlines()
    # Of each loss two runs that choose its rate, and two of the grid.
    assert said.count(", seed ") == len(made) == 4 * len(LOSSES)
    file.write_text("\n".join(made[:-3]) + "\n")
    again, said = start_it()
    assert said.count(", seed ") == 3
    assert again == first
    file.write_text(made[0] + "\n{\n")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        start_it()
    assert "line 2 is no finished run" in failed.value.stderr


def _losses(**success: tuple[float, float]) -> dict[str, object]:
    return {
        loss: {"staleness": {"0": {"success": at_0}, "4": {"success": at_4}}}
        for loss, (at_0, at_4) in success.items()
    }


def test_the_recommended_loss_is_near_and_best() -> None:
    near_and_low, far_and_high = (0.80, 0.79), (0.99, 0.95)
    assert recommended(_losses(low=near_and_low, high=far_and_high)) == "low"
    assert recommended(_losses(low=near_and_low, high=(0.95, 0.94))) == "high"
    assert recommended(_losses(high=far_and_high)) is None


def test_the_page_has_the_figures_of_the_saved_results() -> None:
    result = json.loads((ROOT / "benchmarks" / "results" / "staleness.json").read_text())
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, result) == text
    assert recommended(result["losses"]) is None or "is **" in "\n".join(lines(result))
