"""Small models of families whose names differ between memory and folder, as their folders are."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
)

_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 512,
    "initializer_range": 0.2,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _qwen3_moe() -> PreTrainedConfig:
    return Qwen3MoeConfig(**_SIZES, **_EXPERTS, head_dim=8, num_experts=4)


def _glm4_moe() -> PreTrainedConfig:
    return Glm4MoeConfig(
        **_SIZES, **_EXPERTS, head_dim=8, n_routed_experts=4, first_k_dense_replace=1,
        n_shared_experts=1, n_group=1, topk_group=1,
    )  # fmt: skip


def _deepseek_v3() -> PreTrainedConfig:
    return DeepseekV3Config(
        **(_SIZES | {"num_key_value_heads": 4}), **_EXPERTS, n_routed_experts=4,
        first_k_dense_replace=1, n_shared_experts=1, n_group=2, topk_group=1, q_lora_rank=16,
        kv_lora_rank=256, qk_nope_head_dim=16, qk_rope_head_dim=32, v_head_dim=16,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        # In the folders on the hub; SGLang reads them, transformers does not.
        moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc",
    )  # fmt: skip


def _gpt_oss() -> PreTrainedConfig:
    return GptOssConfig(**_SIZES, num_experts_per_tok=2, num_local_experts=4, head_dim=8)


def _qwen3_5() -> PreTrainedConfig:
    text = {
        **_SIZES, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "full_attention_interval": 2,  # which SGLang reads instead
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 32,
        "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16,
    }  # fmt: skip
    return Qwen3_5Config(text_config=text, vision_config=vision)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "qwen3_5": _qwen3_5,
}
# What their files hold in float32 beside bfloat16, and what they hold beside the trained model.
_WIDE = ("e_score_correction_bias", "A_log")
_BESIDE = {
    "glm4_moe": ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.gate.weight"],
    "deepseek_v3": ["model.layers.2.enorm.weight"],
    "qwen3_5": ["mtp.fc.weight"],
}
_PIXELS = {
    "patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor",
}  # fmt: skip
_PROCESSORS = {
    "qwen3_5": {
        "preprocessor_config.json": _PIXELS
        | {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": {"longest_edge": 2**24, "shortest_edge": 2**16},
        },
        "video_preprocessor_config.json": _PIXELS
        | {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "size": {"longest_edge": 2**24, "shortest_edge": 2**12},
        },
    }
}


def write_family(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a folder in bfloat16 with random weights, laid out as the family's on the hub."""
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    make = Qwen3_5ForConditionalGeneration if family == "qwen3_5" else None
    model: PreTrainedModel = make(config) if make else AutoModelForCausalLM.from_config(config)
    model = model.to(torch.bfloat16)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.ndim == 1 or name.endswith("bias"):  # which are equal before
            tensor.data += 0.1 * torch.randn(tensor.shape).to(tensor.dtype)
        if name.endswith(_WIDE):
            tensor.data = torch.randn(tensor.shape) / 3  # which bfloat16 does not hold
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    beside = {name: torch.randn(8, 4).bfloat16() for name in _BESIDE.get(family, [])}
    save_file(load_file(file) | beside, file, metadata={"format": "pt"})
    for name, content in _PROCESSORS.get(family, {}).items():
        (folder / name).write_text(json.dumps(content))
    return folder


def beside(family: str, names: set[str]) -> set[str]:
    """Those of a folder's tensors that the trained model has not."""
    return {name for name in names if "visual" in name or name in _BESIDE.get(family, [])}
