"""Probes each causal language model of transformers, tiny: `python scripts/models_page.py`.

Writes the table of docs/reference/models.md: in which form each class is trained, or why not. Each
model has random weights and is probed in a process of its own. Nothing is downloaded.
"""

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from difflib import unified_diff
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from flags_page import rewritten
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from agentrl.configs import ComputeConfig
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import make_mesh
from agentrl.training.step.probe import probe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
MARKER = "<!-- From here on written by scripts/models_page.py -->\n"
END = "<!-- Until here written by scripts/models_page.py -->\n"
LONGEST_ROW = 65536  # tokens, the default of --max_tokens
SPREAD = 0.15  # standard deviation of the weights: with smaller ones all logprobs are alike

# Sizes by the names that configurations have for them. Windows and positions stay as they are.
SIZES: Mapping[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "d_model": 32, "n_embd": 32, "n_layer": 4, "n_layers": 4, "n_head": 4, "n_heads": 4,
    "n_inner": 48, "n_positions": 512, "ffn_dim": 48, "ffn_hidden_size": 48, "dff": 48, "d_ff": 48,
    "d_inner": 32, "emb_dim": 32, "num_layers": 4, "num_heads": 4, "rotary_dim": 8,
    "word_embed_proj_dim": 32, "embedding_size": 32, "decoder_layers": 4,
    "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "encoder_layers": 1,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "moe_k": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "expert_ffn_size": 24,
    "moe_topk": 2, "num_shared_experts": 1, "intermediate_size_mlp": 48,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 2048,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_d_ssm": 32, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_d_state": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8,
    "state_size": 8, "mamba_chunk_size": 16, "chunk_size": 16, "lru_width": 32,
    "attention_window_size": 16, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# Sizes that depend on each other, by model type.
SIZES_OF: Mapping[str, Mapping[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
    "kimi_linear": {"num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 2},
    # As the published one, whose layers choose blocks of keys; by default none does.
    "minimax_m3_vl_text": {
        "num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["sparse"] * 2,
        "head_dim": 8, "rotary_dim": 8, "index_n_heads": 2, "index_head_dim": 8,
        "index_block_size": 16, "index_topk_blocks": 4,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """What the probe says of a class."""

    form: str
    reason: str


def findings(names: Iterable[str]) -> Iterator[tuple[str, Finding]]:
    """The finding for each model type."""
    context = get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), context, max_tasks_per_child=None) as pool:
        futures: dict[str, Future[Finding]] = {name: pool.submit(find, name) for name in names}
        for name, future in futures.items():
            yield name, future.result()


def find(name: str) -> Finding:
    """Make the model of type `name` tiny and probe it."""
    try:
        model = tiny_model(name)
        with torch.no_grad():  # sizes that do not fit together are no finding about the class
            model(input_ids=torch.arange(3, 40)[None], use_cache=False)
    except Exception as error:  # the table says which classes were not tried, and why
        return Finding("not tried", f"it cannot be made tiny: {_first_line(error)}")
    mesh = make_mesh(Accelerator(cpu=True))
    try:
        prepare_model(model, mesh, ComputeConfig())
    except Exception as error:
        return Finding("refused", _first_line(error))
    verdict = probe(model, mesh, ComputeConfig(), LONGEST_ROW, trees=True)
    reasons = [trial.reason for trial in verdict.failed]
    if verdict.difference is None:
        return Finding("refused", _without_numbers(reasons[-1]))
    return Finding(str(verdict.form), _without_numbers(reasons[0]) if reasons else "")


def tiny_model(name: str) -> PreTrainedModel:
    """The model with small sizes and random weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        tiny_config(name), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif 0 < (spread := float(parameter.std())) < SPREAD:
                parameter.mul_(SPREAD / spread)
    return model


def tiny_config(name: str) -> PreTrainedConfig:
    kind: type[PreTrainedConfig] = CONFIG_MAPPING[name]
    return kind(**{**_sizes(kind().to_dict()), **SIZES_OF.get(name, {})})


def _sizes(default: Mapping[str, Any]) -> dict[str, Any]:
    sizes = {key: value for key, value in SIZES.items() if key in default}
    if "qk_rope_head_dim" in sizes:
        sizes.pop("head_dim", None)  # latent attention: derived from the other widths
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for key, value in default.items():
        if isinstance(value, dict) and key.endswith("_config"):
            sizes[key] = _sizes(value)
    return sizes


def _without_numbers(reason: str) -> str:
    """The reason without differences, whose last digits are those of a machine."""
    reason = re.sub(r"logprobs differ by .* of their norm", "logprobs or gradients differ", reason)
    return re.sub(r",? by (?:[0-9.e+-]+|inf|nan) nats", "", reason)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def models_table() -> Iterator[str]:
    """The lines of the table, by class."""
    logging.set_verbosity_error()
    found: dict[str, Finding] = {}
    classes = {name: str(kind) for name, kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    first = {kind: name for name, kind in reversed(classes.items())}
    for name, finding in findings(first.values()):
        found[classes[name]] = finding
    yield "| class | trained as | why not in a cheaper form |"
    yield "| --- | --- | --- |"
    for kind in sorted(found):
        reason = found[kind].reason.replace("|", "\\|").replace("<", "&lt;")
        yield f"| `{kind}` | {found[kind].form} | {reason} |"


def main() -> None:
    parser = ArgumentParser(description="Writes the table of docs/reference/models.md.")
    parser.add_argument("--check", action="store_true", help="write nothing, fail if it differs")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    again = rewritten(page, models_table(), MARKER, END)
    if check:
        differences = unified_diff(page.splitlines(), again.splitlines(), lineterm="", n=0)
        sys.exit("\n".join(differences) or None)
    PAGE.write_text(again, encoding="utf-8")


if __name__ == "__main__":
    main()
