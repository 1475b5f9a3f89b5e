"""However processes share the work, it is the same training: loss, norm, gradients, weights and
kept logprobs."""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from forked import ForkedRanks
from parallel_cases import ARRANGEMENTS, CASES, run

from agentrl.training.parallel import make_mesh

HERE = Path(__file__).parent


@cache
def alone(case: str) -> dict[str, Any]:
    """What one process makes of a case."""
    return asdict(run(CASES[case], make_mesh(Accelerator(cpu=True))))


def launch(processes: int, out: Path, *names: str) -> Path:
    """The folder of what so many processes make of their arrangements, or of those named."""
    log = out / "log"
    ranks = ForkedRanks(processes, log, [str(HERE / "parallel_worker.py"), str(out), *names])
    assert ranks.wait(timeout=540) == 0, log.read_text()[-5000:]
    return out


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Launches so many processes once, when they are first asked for."""
    return cache(lambda processes: launch(processes, tmp_path_factory.mktemp(str(processes))))


def test_two_processes_that_share_matrices_lines_or_experts_train_what_one_trains(
    tmp_path: Path,
) -> None:
    names = ("tp2-trees", "allgather2-trees", "ep2-qwen3_moe", "dp2-dpo")
    launch(2, tmp_path, *names)
    for name in names:
        assert_equal(torch.load(tmp_path / f"{name}.pt"), name.split("-")[1])


@pytest.mark.slow
def test_two_processes_sum_the_gradients_of_weights_that_a_plan_forgot(tmp_path: Path) -> None:
    cases = ("glm4_moe", "phi", "apertus", "phi_ppo")
    launch(2, tmp_path, *(f"tp2-{case}" for case in cases))
    for case in cases:
        ours = torch.load(tmp_path / f"tp2-{case}.pt")
        assert_equal(ours, case)
        expected = alone(case)["gradients"]
        largest = max(gradient.norm() for gradient in expected.values())
        for name, gradient in expected.items():
            difference = (ours["gradients"][name] - gradient).norm()
            assert difference <= 1e-5 * (gradient.norm() + 1e-2 * largest), name


@pytest.mark.slow
def test_a_model_whose_processes_have_different_gradients_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = ForkedRanks(2, log, [str(HERE / "refused_worker.py"), str(tmp_path)])
    assert ranks.wait(timeout=100) == 0, log.read_text()[-5000:]
    sentence = (tmp_path / "sentence").read_text()
    assert "--tp_size 2: its processes get different gradients of weights" in sentence
    assert "model.layers.0.self_attn.kv_a_proj_with_mqa.weight" in sentence
    assert "use data or context parallelism instead" in sentence


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("processes", "arrangement", "case"),
    [
        (processes, arrangement, case)
        for processes, arrangements in ARRANGEMENTS.items()
        for arrangement, (_, cases) in arrangements.items()
        for case in cases
    ],
)
def test_an_arrangement_of_processes_trains_what_one_process_trains(
    processes: int, arrangement: str, case: str, launched: Callable[[int], Path]
) -> None:
    assert_equal(torch.load(launched(processes) / f"{arrangement}-{case}.pt"), case)


def assert_equal(ours: dict[str, Any], case: str) -> None:
    """An outcome is what one process makes of the case."""
    expected = alone(case)
    # A reward is a difference of two sums of logprobs, of some hundred nats each in float32, and
    # begins at 0: what is left of it then is their rounding.
    least = 5e-5 if case == "dpo" else 1e-6
    for step, reference in zip(ours["statistics"], expected["statistics"], strict=True):
        assert step == pytest.approx(reference, rel=1e-4, abs=least)
    assert expected["statistics"][0]["grad_norm"] > 1, "it is clipped"
    assert len(expected["logprobs"]) == len(CASES[case].rows)
    for what, tolerance in (("gradients", 2e-5), ("weights", 5e-4), ("logprobs", 1e-3)):
        assert ours[what].keys() == expected[what].keys()
        for name, tensor in expected[what].items():
            torch.testing.assert_close(
                ours[what][name], tensor, atol=tolerance, rtol=1e-3,
                msg=lambda message, name=name, what=what: f"{what} of {name}: {message}",
            )  # fmt: skip
