"""Models that attend over trees compute there what they compute on sequences."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from agentrl.databases.token_tree import TokenTree
from agentrl.training.attention import has_tree_attention, tree_attention, use_tree_attention
from agentrl.training.data.batch import MicroBatch, collate_forest
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.logprobs import attach_logprobs, token_logprobs

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 256,
    "initializer_range": 0.2, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
TREES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **EXPERTS),
    "llama": lambda: LlamaConfig(**SIZES),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "deepseek": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
    ),
}


def make(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    use_tree_attention(model)
    attach_logprobs(model)
    return model


def sequences() -> list[TrainingSequence]:
    """Three on one prompt, longer than any window."""
    generator = np.random.default_rng(0)
    prompt = generator.integers(2, 64, 40)
    return [
        TrainingSequence(
            TokenTree.line(
                np.concatenate([prompt, generator.integers(2, 64, 12)]),
                mask=np.arange(52) >= 38,
                advantages=1.0,
            ),
            temperature=1.0,
            row_tokens=14,
        )
        for _ in range(3)
    ]


def logprobs_of(model: PreTrainedModel, batch: MicroBatch) -> torch.Tensor:
    logprobs, _ = token_logprobs(model, batch, 64)
    return logprobs[batch.prediction]


def plain_logprobs(model: PreTrainedModel) -> torch.Tensor:
    """By the model's own forward, one sequence at a time."""
    found = []
    for one in sequences():
        ids = torch.from_numpy(one.tokens["ids"]).long()
        log_p = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0], -1)
        found += [log_p[t - 1, ids[t]] for t in one.trained]
    return torch.stack(found)


@pytest.mark.parametrize("name", TREES)
def test_a_model_that_can_gives_on_a_tree_what_it_gives_on_sequences(name: str) -> None:
    model = make(TREES[name]())
    assert has_tree_attention(model)
    batch = collate_forest(sequences(), [0, 1, 2])
    assert batch.tree is not None and len(batch.tree.spans) == 1
    torch.testing.assert_close(
        logprobs_of(model, batch), plain_logprobs(model), atol=2e-5, rtol=1e-4
    )


def test_the_last_layer_does_not_attend_for_tokens_before_the_first_prediction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queries = []

    def recording(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
        queries.append(q.shape[2])
        return tree_attention(q, k, v, *args)

    monkeypatch.setattr("agentrl.training.attention.models.tree_attention", recording)
    batch = collate_forest(sequences(), [0, 1, 2])
    token_logprobs(make(TREES["qwen3"]()), batch, 64)
    tokens = batch.input_ids.shape[1]
    assert queries == [tokens, tokens - 37]  # the token at 37 predicts the first that is trained


def test_a_window_that_the_configuration_hides_is_refused_in_the_forward_pass() -> None:
    model = make(TREES["qwen3"]())
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 16
    with pytest.raises(ValueError, match="sliding window"):
        token_logprobs(model, collate_forest(sequences(), [0, 1, 2]), 64)


def test_a_model_that_drops_the_tree_on_the_way_is_refused() -> None:
    model = make(TREES["qwen3"]())
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.forward = lambda *args, tree, forward=attention.forward, **kw: forward(
            *args, **kw
        )
    with pytest.raises(ValueError, match="did not pass the tree on"):
        token_logprobs(model, collate_forest(sequences(), [0, 1, 2]), 64)


def test_a_layer_that_hands_on_a_tensor_that_trees_do_not_have_is_refused() -> None:
    model = make(TREES["qwen3"]())
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.forward = lambda *args, forward=attention.forward, **kw: forward(
            *args, **kw, block_indices=torch.zeros(1, dtype=torch.long)
        )
    with pytest.raises(ValueError, match="asks for block_indices"):
        token_logprobs(model, collate_forest(sequences(), [0, 1, 2]), 64)
