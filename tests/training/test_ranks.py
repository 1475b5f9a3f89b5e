"""One process and two FSDP2 processes are the same training."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM


def results(folder: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())
    return read


def test_each_step_has_the_same_loss_and_gradient_norm(
    launched: dict[int, Path],
) -> None:
    for one, two in zip(results(launched[1]), results(launched[2]), strict=True):
        del one["n_micro_batches"], two["n_micro_batches"]
        assert one.pop("staleness_histogram") == two.pop("staleness_histogram")
        assert one.pop("grad_norms") == pytest.approx(two.pop("grad_norms"), rel=2e-4, abs=1e-6)
        assert _figures(one) == pytest.approx(_figures(two), rel=2e-4, abs=1e-6)


def _figures(result: dict[str, Any]) -> dict[str, float]:
    """Without what such a step does not have."""
    return {name: value for name, value in result.items() if value is not None}


def test_a_rank_without_rows_still_takes_part(launched: dict[int, Path]) -> None:
    single_row = results(launched[2])[1]
    assert single_row["n_micro_batches"] == 1
    assert single_row["grad_norm"] > 0


def test_the_weights_are_the_same_after_three_steps(launched: dict[int, Path]) -> None:
    models = [AutoModelForCausalLM.from_pretrained(launched[n] / "weights") for n in (1, 2)]
    start = AutoModelForCausalLM.from_pretrained(launched[1] / "base")
    moved = 0.0
    for (name, one), two, base in zip(
        models[0].named_parameters(), models[1].parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(one, two, atol=2e-4, rtol=1e-3, msg=f"{name} differs")
        moved = max(moved, (one - base).abs().max().item())
    assert moved > 5e-3, "they have moved"
