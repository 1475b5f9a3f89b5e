"""What placement and throughput figures read of a model, for classes of other people's."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from agentrl.configs import parse_config
from agentrl.launcher.model_sizes import sizes_of
from agentrl.training.data.flops import FlopsModel
from agentrl.training.model.text_sizes import TextSizes

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "num_experts": 4,
    "moe_intermediate_size": 16, "max_position_embeddings": 64, "head_dim": 8,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "top_k_experts": 2}
# By name: further fields; query heads, key heads, units, experts, those of a token.
SIZES: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int]]] = {
    "llama": ({}, (4, 2, 48, 0, 1)),
    "gpt2": ({}, (4, 4, 128, 0, 1)),
    "gpt_neox": ({}, (4, 4, 48, 0, 1)),
    "opt": ({"ffn_dim": 40, "word_embed_proj_dim": 32}, (4, 4, 40, 0, 1)),
    "falcon": ({"ffn_hidden_size": 96}, (4, 4, 96, 0, 1)),
    "bloom": ({}, (4, 4, 128, 0, 1)),
    "mamba2": ({"num_heads": 4, "head_dim": 16}, (0, 0, 128, 0, 1)),
    "qwen3_5_moe_text": ({"num_experts_per_tok": 2}, (4, 2, 0, 4, 2)),
    "aria_text": ({"moe_num_experts": 4, "moe_topk": 2}, (4, 2, 48, 4, 2)),
    "gemma4_text": (EXPERTS, (4, 2, 48, 4, 2)),
}


def empty_model(name: str, further: dict[str, Any]) -> PreTrainedModel:
    kind = CONFIG_MAPPING[name]
    known = kind().to_dict()
    sizes = {key: value for key, value in SMALL.items() if key in {*known, *kind.attribute_map}}
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(kind(**{**sizes, **further}))
    return model


@pytest.mark.parametrize("name", SIZES)
def test_a_model_s_sizes_are_read_by_the_names_that_its_configuration_has(name: str) -> None:
    further, expected = SIZES[name]
    model = empty_model(name, further)
    found = TextSizes.of(model.config)
    assert (
        found.heads, found.key_heads, found.feed_forward, found.experts, found.experts_per_token
    ) == expected  # fmt: skip
    flops = FlopsModel.of(model)
    assert flops.token > 0 and (flops.pair > 0) == (found.heads > 0)
    sizes = sizes_of(model, parse_config(["--run_name", "r"]), 4096)
    assert (1, 1, 1) in sizes.degrees
    assert (2, 1, 1) not in sizes.degrees or found.heads % 2 == 0
