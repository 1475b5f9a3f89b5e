"""The values that flags have in the original AgentRL if they are not given.

Its scripts leave many flags out and mean these. `src/main.py` and `src/sampling.py`, which run
them, start from `original_layer`; the other commands have the defaults of the flags' groups, which
are those that we recommend (docs/design/2026-11-24-flags-of-others.md).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.configs.familiar.familiar_flag import Value
from agentrl.configs.flags import FLAGS

ORIGIN = "default of AgentRL"

_LOSSES = ("GRPO", "GSPO", "MINIRL")
_AGENT_CONFIG = "assets/agent_config.yml"

# Of its configuration class. None: not set.
ORIGINAL_DEFAULTS: Mapping[str, Value | None] = {
    "trainer": "QwenTrainer", "train_file": None, "max_pixels": 1920 * 1080,
    "remove_experience": False, "drop_zero_advantage": True, "shift_labels": True,
    "db_connection_string": "", "oss_connection_string": "", "enable_oss": False,
    "skip_non_positive_advantage": False, "model_name_or_path": None,
    "attention_implementation": "sdpa", "output_router_logits": False, "trust_remote_code": True,
    "cpu_ram_efficient_loading": False, "torch_dtype": "bfloat16", "tp_size": 1, "pp_size": 1,
    "ep_size": 1, "cp_size": 1, "pad_to_multiple_of": 1, "bypass_causal_mask_check": False,
    "enable_loss_parallel": True, "loss_seq_chunk_size": None, "activation_offloading": False,
    "decoder_sparse_step": None, "remove_unused_columns": False, "pad_to_maximum": False,
    "dynamic_batching": False, "learning_rate": 1e-6, "epsilon": 0.2, "epsilon_higher": 0.1,
    "beta1": None, "beta2": None, "tune_vision": True, "adv_scaling": 1.0, "max_tokens": 65536,
    "balance_sample": True, "token_level_loss": True, "out_of_date_decay": None,
    "importance_weight_cap_ratio": 4.0, "strict_in_bound": False, "log_entropy": False,
    "skip_length_normalization": False, "loss_calculater": "GRPO", "max_trained_count": 1,
    "retrained_interval": 1, "minimal_advantage": None, "enable_sampling": True,
    "sync_sampling": False, "max_new_tokens": 8196, "max_prompt_tokens": 5120000,
    "num_generations": 8, "tool_call_parser": "qwen25", "model_name": "train-model",
    "inf_tp_size": 1, "inf_ep_size": 1, "max_concurrent_samples_per_process": 1,
    "target_concurrency": 1, "inf_mem_ratio": 0.5, "top_k": 1, "presence_penalty": None,
    "frequency_penalty": None,
    "preferred_sampling_params": '{"temperature": 1, "top_p": 1, "min_p": 0, "top_k": -1}',
    "resample_error_records": False, "mcp_server_name": "all",
    "mcp_manager_url": "http://localhost:9876/mcpapi", "mcp_auth_token": None, "max_turns": 25,
    "min_turns": 1, "repetition_early_stop_times": -1, "enable_repetition_compress": False,
    "new_context": "disabled", "agent_config_path": _AGENT_CONFIG,
    "reserve_context_error_count": 0, "efficient_rewarding": False,
}  # fmt: skip

# Of transformers.TrainingArguments, for the flags that have its names here.
TRANSFORMERS_DEFAULTS: Mapping[str, Value | None] = {
    "output_dir": None, "per_device_train_batch_size": 8, "num_train_epochs": 3.0, "max_steps": -1,
    "lr_scheduler_type": "linear", "lr_scheduler_kwargs": None, "warmup_steps": 0,
    "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "gradient_accumulation_steps": 1, "max_grad_norm": 1.0, "bf16": False, "tf32": None,
    "gradient_checkpointing": None, "logging_steps": 500, "report_to": "none", "run_name": None,
    "eval_steps": None, "save_steps": 500, "save_total_limit": None, "seed": 42,
    "use_cpu": False, "ddp_timeout": 1800, "resume_from_checkpoint": None,
}  # fmt: skip

# Flags whose value here, if none is given, does the same or better, with the reason.
KEPT: Mapping[str, str] = {
    "attention_implementation": "the same attention, computed once for what rows share",
    "loss_seq_chunk_size": "the same loss, in less memory",
    "inf_mem_ratio": "a launch plans it from the model and the GPU",
    "mcp_server_name": "the same, all servers",
    "max_prompt_tokens": "the same, no bound below `--max_tokens`",
    "resample_error_records": "its tool sampler tries a failed record again in any case",
    "db_connection_string": "a launch starts a MongoDB",
    "bf16": "the weights of its `--torch_dtype` are in bfloat16 in any case",
}

# What a flag does otherwise, although it is taken with its meaning.
DIFFERS: Mapping[str, str] = {
    "drop_zero_advantage": "for records, and there for turns",
    "minimal_advantage": "for records, and there for turns",
    "learning_rate": "weights have float32 masters here, so begin with a smaller one",
}

# What a value that is not set there is here.
NOT_SET: Mapping[str, Value] = {"save_total_limit": 0}

# What its tasks and losses have, without a flag there.
_OF_ITS_TASKS: Mapping[str, Value] = {"answer_schema": "answer"}
_OF_ITS_LOSSES: Mapping[str, Value] = {
    "advantage": "leave_one_out_clipped",
    "min_score_spread": 0.1,
}
_LOSS_FLAGS = (
    "epsilon", "epsilon_higher", "importance_weight_cap_ratio", "strict_in_bound",
    "token_level_loss", "skip_length_normalization",
)  # fmt: skip


def original_layer(given: Mapping[str, Any]) -> dict[str, Value]:
    """Return the flags that a script of the original AgentRL means by leaving them out.

    `given`: the flags that it gives, under the names of this trainer. A loss of its own gets its
    clip range, band, normalisation and advantage; another loss keeps those of its paper. Flags
    that are not set there and here are left out.
    """
    loss = given.get("loss_calculator", "GRPO")
    values: dict[str, Value] = {
        name: value
        for name, value in {**TRANSFORMERS_DEFAULTS, **ORIGINAL_DEFAULTS, **NOT_SET}.items()
        if name in FLAGS and name not in KEPT and value not in (None, FLAGS[name].default)
    }
    values |= {"bf16": True, **_OF_ITS_TASKS, **_OF_ITS_LOSSES}
    if "clip_ratio_high" in given:
        del values["epsilon_higher"]  # both say where the clip range ends
    if loss == "MINIRL":
        values["rollout_is_threshold"] = 0.0  # its weight has no bound
    if loss not in _LOSSES:
        values = {n: v for n, v in values.items() if n not in (*_LOSS_FLAGS, *_OF_ITS_LOSSES)}
    if not Path(_AGENT_CONFIG).is_file():
        values.pop("agent_config_path", None)
    return {name: value for name, value in values.items() if name not in given}
