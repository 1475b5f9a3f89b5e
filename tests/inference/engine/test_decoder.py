"""The decoder in few operators computes what transformers' own forward does."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from agentrl.inference.engine.config import EngineConfig
from agentrl.inference.engine.decoder import Decoder
from agentrl.inference.engine.kv_cache import PrefillChunk
from agentrl.inference.engine.model_runner import ModelRunner
from agentrl.inference.engine.weights import copy_weights

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.3,
}  # fmt: skip
LLAMA_3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
JOINED = [
    LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    LlamaConfig(**SIZES, rope_parameters=LLAMA_3_ROPE, tie_word_embeddings=True),
    Qwen2Config(**SIZES),
    Qwen3Config(**SIZES, head_dim=16),
]
OTHERS = [
    Olmo2Config(**SIZES),
    LlamaConfig(**SIZES, rope_parameters=DYNAMIC_ROPE),
]


def served(
    config: PreTrainedConfig, folder: Path, context_length: int | None = None
) -> ModelRunner:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # also norms and biases, which begin as ones and zeros
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return ModelRunner(EngineConfig(folder, max_running_requests=2, context_length=context_length))


def error(runner: ModelRunner, folder: Path) -> float:
    """The largest difference of a decode and a prefill step's logits from transformers' own."""
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    plain.load_state_dict(runner.model.state_dict())
    ids = torch.randint(50, (3, 20))
    first, second, third = ids.tolist()
    chunks = [PrefillChunk(row, 0, 12) for row in range(3)]
    runner.step([], [], chunks, [first[:12], second[:12], third[:12]], [False, False, True])
    logits = runner.step(
        [first[12], second[12]], [12, 12], [PrefillChunk(2, 12, 20)], [third[12:]], [True]
    )
    with torch.inference_mode():
        expected = plain(ids).logits[[0, 1, 2], [12, 12, 19]]
    return float((logits - expected).abs().max())


@pytest.mark.parametrize("config", JOINED, ids=lambda config: config.model_type)
def test_logits_are_those_of_transformers_also_after_updates_and_a_release(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    runner = served(config, tmp_path)
    assert Decoder.fits(runner.model)
    assert error(runner, tmp_path) < 1e-4
    state = runner.model.state_dict()
    copy_weights(runner.model, {name: torch.randn_like(old) / 4 for name, old in state.items()})
    assert error(runner, tmp_path) < 1e-4
    runner.release_memory()
    copy_weights(runner.model, {name: torch.randn_like(old) / 4 for name, old in state.items()})
    runner.resume_memory()
    assert error(runner, tmp_path) < 1e-4
    copy_weights(runner.model, {name: torch.randn_like(old) / 4 for name, old in state.items()})
    assert error(runner, tmp_path) < 1e-4


@pytest.mark.parametrize("config", OTHERS, ids=lambda config: config.model_type)
def test_other_models_run_transformers_own_forward(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    runner = served(config, tmp_path)
    assert not Decoder.fits(runner.model)
    assert error(runner, tmp_path) < 1e-4


LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 4, "long_factor": [3.0] * 4,
}  # fmt: skip
OF_LENGTH = [
    MistralConfig(**SIZES, sliding_window=32),
    Phi3Config(
        **SIZES, rope_parameters=LONG_ROPE, pad_token_id=0, original_max_position_embeddings=32
    ),
]


@pytest.mark.parametrize("config", OF_LENGTH, ids=lambda config: config.model_type)
def test_a_model_that_changes_with_the_length_is_served_up_to_there_only(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="lower the context length of 64 to that"):
        served(config, tmp_path)
    assert error(served(config, tmp_path, context_length=32), tmp_path) < 1e-4


def test_a_model_with_latent_attention_is_refused(tmp_path: Path) -> None:
    sizes = {
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 12, "n_routed_experts": 4, "moe_intermediate_size": 24, "n_group": 1,
        "topk_group": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="latent attention: use SGLang"):
        served(DeepseekV3Config(**{**SIZES, **sizes}), tmp_path)


@pytest.mark.parametrize("config", [JOINED[2], OTHERS[0]], ids=lambda config: config.model_type)
def test_a_head_in_float32_has_logits_that_bfloat16_does_not_round(
    config: PreTrainedConfig, tmp_path: Path
) -> None:
    served(config, tmp_path)

    def runner_of(fp32_head: bool) -> ModelRunner:
        return ModelRunner(
            EngineConfig(tmp_path, max_running_requests=2, dtype="bfloat16", fp32_head=fp32_head)
        )

    def logits_of(runner: ModelRunner) -> torch.Tensor:
        return runner.step([], [], [PrefillChunk(0, 0, 9)], [list(range(9))], [True])

    runner = runner_of(True)
    ours, rounded = logits_of(runner), logits_of(runner_of(False))
    assert rounded.dtype == torch.bfloat16 and ours.dtype == torch.float32
    assert not torch.equal(ours, ours.bfloat16().float())
    torch.testing.assert_close(ours, rounded.float(), atol=0.02, rtol=0.01)
    # the weights are bfloat16 still, and updates reach them
    head = runner.model.get_output_embeddings().weight
    assert head.dtype == torch.bfloat16
    copy_weights(runner.model, {"lm_head.weight": torch.zeros_like(head)})
    assert logits_of(runner).abs().max() == 0


def test_an_adapted_layer_is_not_taken_for_a_plain_one(tmp_path: Path) -> None:
    model = served(Qwen3Config(**SIZES), tmp_path).model
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model)
    assert not Decoder.fits(model)
