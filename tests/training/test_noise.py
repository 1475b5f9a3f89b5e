"""Models whose configurations ask for dropout or jitter in training."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MixtralConfig,
    OPTConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    StableLmConfig,
)

from agentrl.configs import ComputeConfig
from agentrl.training.attention import has_tree_attention
from agentrl.training.model.noise import remove_noise
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import make_mesh

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
NOISY: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, attention_dropout=0.5),
    "gpt2": lambda: GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.5
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES, hidden_dropout=0.5, attention_dropout=0.5),
    "opt": lambda: OPTConfig(
        vocab_size=64, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.5, layerdrop=0.5,
    ),
    "phi": lambda: PhiConfig(**SIZES, resid_pdrop=0.5, embd_pdrop=0.5),
    "falcon": lambda: FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        hidden_dropout=0.5, attention_dropout=0.5,
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, router_jitter_noise=0.5),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16,
        attention_dropout=0.5,
    ),
    "phimoe": lambda: PhimoeConfig(
        **SIZES, num_local_experts=4, router_jitter_noise=0.2, input_jitter_noise=0.5
    ),
    "stablelm": lambda: StableLmConfig(**SIZES, hidden_dropout=0.5),
    "bamba": lambda: BambaConfig(
        **SIZES, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, attn_layer_indices=[1],
        attention_dropout=0.5,
    ),
}  # fmt: skip


def made(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(NOISY[name](), dtype=torch.float32)
    return model.train()


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(torch.arange(2, 42)[None]).logits)


@pytest.mark.parametrize("name", NOISY)
def test_a_model_in_training_computes_what_it_computes_in_evaluation(name: str) -> None:
    model = made(name)
    assert not torch.equal(logits(model), logits(model)), "the configuration's noise is live"
    assert remove_noise(model)
    assert torch.equal(logits(model), logits(model))
    torch.testing.assert_close(logits(model), logits(made(name).eval()))
    assert remove_noise(model) == []


def test_a_model_with_attention_dropout_is_trained_as_a_tree() -> None:
    model = made("llama")
    prepare_model(model, make_mesh(Accelerator(cpu=True)), ComputeConfig())
    assert has_tree_attention(model)
