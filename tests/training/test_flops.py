"""Operations and utilisation, counted by hand and as others publish them."""

import pytest
import torch
from published_models import MODELS
from transformers import AutoModelForCausalLM

from agentrl.training.data.flops import FlopsModel, peak_flops

H100 = 989e12


def test_utilisation_counted_by_hand() -> None:
    # 2 tokens of 100 operations, 3 pairs of 14, of which 2 are computed again, 1 prediction of 50:
    # 200 + 3 * 12 + 50 = 286 operations, in 2 s of 1000 each
    costs = FlopsModel(token=100.0, pair=14.0, prediction=50.0)
    assert costs.total(2, 3, 1) == 292.0
    assert costs.mfu(2, 3, 1, seconds=2.0, peak=1000.0) == pytest.approx(0.143)


@pytest.mark.parametrize(
    ("tokens", "tokens_per_s", "mfu"), [(16_384, 11_900, 0.111), (65_536, 10_150, 0.268)]
)
def test_utilisation_is_that_of_prime_rl(tokens: int, tokens_per_s: float, mfu: float) -> None:
    """Its published rates of Qwen3-0.6B on one H100 are its published shares of the peak."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MODELS["Qwen3-0.6B"])
    pairs = tokens * (tokens + 1) / 2
    found = FlopsModel.of(model).mfu(tokens, pairs, tokens, tokens / tokens_per_s, H100)
    assert found == pytest.approx(mfu, abs=0.001)


def test_a_device_is_known_by_what_it_calls_itself() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == peak_flops("NVIDIA GH200 480GB") == H100
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("cpu") is None
