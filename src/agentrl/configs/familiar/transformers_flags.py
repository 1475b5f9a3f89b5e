"""The flags of transformers.TrainingArguments that no flag of this trainer has the name of.

Those of transformers 5, and those of the 4.x releases that scripts still give.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.configs.familiar.familiar_flag import (
    FamiliarFlag,
    Value,
    idle,
    named,
    refused,
    translated,
    truth,
)

_LOGGING_STEPS = 500  # there, steps between two evaluations if only --eval_strategy steps is given

_NO = ("no", "false")  # YAML reads no as false

_LOADER = "rows come from the database, read ahead in the background; there is no DataLoader"
_COLUMNS = "rows have fixed columns; there is no dataset whose columns could be chosen"
_EVALUATION = (
    "a run is evaluated by sampled answers (--eval_rollouts), and `agentrl sft` by the loss of "
    "rows that are packed by tokens"
)
_LOG = (
    "metrics.jsonl has a line for every --logging_steps steps, and each part of a run its own log"
)
_SHARDS = (
    "parameters are always sharded, by FSDP2 (docs/reference/parallelism.md), and there is no "
    "DistributedDataParallel"
)
_HUB = "nothing is uploaded by a run"
_BEST = "no checkpoint is chosen by a metric: `agentrl eval` compares checkpoints"
_SCRIPT = "a run trains; `agentrl eval` evaluates"
_PRECISION = "an evaluation is sampled by the inference services, in their own dtype"
_OTHER_DEVICES = "this trainer computes on NVIDIA GPUs or, with --use_cpu, on the CPU"


def _adam_arguments(text: str, given: Mapping[str, Any]) -> dict[str, Value]:
    """`beta1=0.9,beta2=0.98` as AdamW's flags."""
    flags = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
    values: dict[str, Value] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, equals, number = part.partition("=")
        if name not in flags or not equals:
            raise ValueError(f"must be {'=…,'.join(flags)}=…, separated by commas")
        values[flags[name]] = number
    return values


def _warmup_share(text: str, given: Mapping[str, Any]) -> dict[str, Value]:
    """`--warmup_ratio`; a number of steps takes precedence, as there."""
    share = float(text)
    if not 0 <= share < 1:
        raise ValueError("must be at least 0 and below 1")
    return {} if float(given.get("warmup_steps", 0)) > 0 else {"warmup_steps": text}


def _when_evaluated(text: str, given: Mapping[str, Any]) -> dict[str, Value]:
    if text in _NO:
        return {"eval_steps": "0"}
    if text == "steps":
        steps = given.get("eval_steps", given.get("logging_steps", _LOGGING_STEPS))
        return {"eval_steps": str(steps)}
    raise ValueError("must be no or steps; give the steps of an epoch as --eval_steps")


def _when_saved(text: str, given: Mapping[str, Any]) -> dict[str, Value]:
    if text in _NO:
        return {"save_steps": "0"}
    if text == "steps":
        return {}
    raise ValueError(
        "must be no or steps; give the steps of an epoch as --save_steps, and choose the best "
        "checkpoint with `agentrl eval`"
    )


def _first_line(text: str, given: Mapping[str, Any]) -> dict[str, Value]:
    if truth(text) and int(given.get("logging_steps", 1)) != 1:
        raise ValueError("the first line is that of step --logging_steps; give --logging_steps 1")
    return {}


TRANSFORMERS_FLAGS: Mapping[str, FamiliarFlag] = {
    # the optimizer
    "optim": refused(
        "AdamW is the only optimizer here; for its memory use --param_offload true or --lora_rank",
        "adamw_torch", "adamw_torch_fused", "adamw_hf",
    ),
    "optim_args": translated(
        "`--adam_beta1 --adam_beta2 --adam_epsilon`; transformers ignores it for AdamW",
        _adam_arguments,
    ),
    "optim_target_modules": refused(
        "GaLore and APOLLO are not here; for the optimizer's memory use --param_offload true or "
        "--lora_rank",
        several=True,
    ),
    "adafactor": refused(
        "AdamW is the only optimizer here; for its memory use --param_offload true", "false"
    ),
    "warmup_ratio": translated("`--warmup_steps` below 1", _warmup_share),
    "average_tokens_across_devices": idle(
        "a loss is always normalised over the rows of all processes of a step"
    ),
    "label_smoothing_factor": refused(
        "labels are the tokens themselves, without smoothing; give --entropy_coef to keep the "
        "entropy of a policy",
        "0",
    ),
    "neftune_noise_alpha": refused(
        "no noise is added to embeddings, because the ratio to the sampler's policy would have it; "
        "leave it out"
    ),
    # precision and memory
    "fp16": refused("float16 needs a scaled loss and is not here; give --bf16", "false"),
    "fp16_opt_level": idle("there is no Apex; --bf16 computes in bfloat16"),
    "fp16_backend": idle("there is no Apex; --bf16 computes in bfloat16"),
    "half_precision_backend": idle("there is no Apex; --bf16 computes in bfloat16"),
    "bf16_full_eval": idle(_PRECISION),
    "fp16_full_eval": idle(_PRECISION),
    "activation_checkpointing": named("gradient_checkpointing"),
    "activation_checkpointing_kwargs": idle(
        "--gradient_checkpointing recomputes whole layers, never reentrantly"
    ),
    "gradient_checkpointing_kwargs": idle(
        "--gradient_checkpointing recomputes whole layers, never reentrantly"
    ),
    "torch_compile": named("compile"),
    "torch_compile_backend": refused("--compile has torch.compile's own backend", "inductor"),
    "torch_compile_mode": refused("--compile has torch.compile's own mode", "default"),
    "use_liger_kernel": idle(
        "logits are computed --loss_seq_chunk_size tokens at a time, so that they never exist as a "
        "whole"
    ),
    "liger_kernel_config": idle(
        "logits are computed --loss_seq_chunk_size tokens at a time, so that they never exist as a "
        "whole"
    ),
    "use_cache": idle("a forward pass of training has no cache"),
    "torch_empty_cache_steps": idle(
        "micro-batches have one size, so that memory does not fragment"
    ),
    "auto_find_batch_size": refused(
        "micro-batches are filled by tokens: give --micro_batch_tokens, which `agentrl memory` "
        "finds",
        "false",
    ),
    # logging
    "logging_strategy": refused(
        "metrics are written by steps: give --logging_steps", "steps"
    ),
    "logging_first_step": translated(
        "nothing with `--logging_steps 1`, and is refused with more", _first_line
    ),
    "logging_dir": idle("TensorBoard's files are in the run's folder, in tensorboard/"),
    "log_on_each_node": idle(_LOG),
    "logging_nan_inf_filter": idle(
        "a step whose gradient is not finite changes no weights, and its rows are found and "
        "quarantined"
    ),
    "include_num_input_tokens_seen": idle("metrics.jsonl has the tokens of every step"),
    "include_tokens_per_second": idle("metrics.jsonl has the tokens and seconds of every step"),
    "log_level": idle(_LOG),
    "log_level_replica": idle(_LOG),
    "disable_tqdm": idle("a launch has its own live view, and none where there is no terminal"),
    "project": idle("a tracker takes its project from its own environment variables"),
    "trackio_space_id": idle("Trackio reads TRACKIO_SPACE_ID of the environment"),
    "trackio_bucket_id": idle("Trackio chooses the bucket of TRACKIO_SPACE_ID"),
    "trackio_static_space_id": idle("Trackio makes no static Space of a run that lasts"),
    # evaluation
    "eval_strategy": translated("`--eval_steps`; `no` is 0", _when_evaluated),
    "evaluation_strategy": translated("`--eval_steps`; `no` is 0", _when_evaluated),
    "eval_delay": refused("evaluations are every --eval_steps from step 0 on; leave it out", "0"),
    "eval_on_start": idle("the start model is evaluated in any case if there is an --eval_file"),
    "per_device_eval_batch_size": idle(_EVALUATION),
    "prediction_loss_only": idle(_EVALUATION),
    "eval_do_concat_batches": idle(_EVALUATION),
    "eval_use_gather_object": idle(_EVALUATION),
    "eval_accumulation_steps": idle(_EVALUATION),
    "include_for_metrics": idle(_EVALUATION, several=True),
    "include_inputs_for_metrics": idle(_EVALUATION),
    "batch_eval_metrics": idle(_EVALUATION),
    # checkpoints
    "save_strategy": translated("`--save_steps`; `no` is 0, the last step only", _when_saved),
    "save_only_model": idle(
        "a checkpoint always has the optimizer too, so that a run resumes where it stopped; "
        "`agentrl export` writes the model alone, and --save_total_limit bounds the space"
    ),
    "save_on_each_node": idle("every process writes its shard into the one folder of the run"),
    "save_safetensors": idle("`agentrl export` always writes safetensors"),
    "enable_jit_checkpoint": idle("a stop signal always saves a checkpoint, see --drain_seconds"),
    "overwrite_output_dir": refused(
        "a run continues in its folder; `agentrl delete RUN` deletes it, or give another name",
        "false",
    ),
    "load_best_model_at_end": refused(_BEST, "false"),
    "metric_for_best_model": idle(_BEST),
    "greater_is_better": idle(_BEST),
    "ignore_data_skip": idle(
        "a resumed run goes on with the rows that its checkpoint has not seen"
    ),
    "restore_callback_states_from_checkpoint": idle("there are no callbacks"),
    "push_to_hub": refused(
        "give `agentrl export CHECKPOINT FOLDER` and `hf upload NAME FOLDER` afterwards", "false"
    ),
    "hub_token": idle(_HUB),
    "hub_private_repo": idle(_HUB),
    "hub_model_id": idle(_HUB),
    "hub_strategy": idle(_HUB),
    "hub_always_push": idle(_HUB),
    "hub_revision": idle(_HUB),
    "push_to_hub_model_id": idle(_HUB),
    "push_to_hub_organization": idle(_HUB),
    "push_to_hub_token": idle(_HUB),
    # data
    "full_determinism": refused(
        "sampling is not deterministic; --seed gives the order of tasks and of sampling", "false"
    ),
    "data_seed": idle("--seed is that of the order of tasks too"),
    "accelerator_config": idle(_LOADER),
    "dataloader_drop_last": idle(_LOADER),
    "dataloader_num_workers": idle(_LOADER),
    "dataloader_pin_memory": idle(_LOADER),
    "dataloader_persistent_workers": idle(_LOADER),
    "dataloader_prefetch_factor": idle(_LOADER),
    "dataloader_multiprocessing_context": idle(_LOADER),
    "dataloader_in_order": idle(_LOADER),
    "split_batches": idle(_LOADER),
    "dispatch_batches": idle(_LOADER),
    "remove_unused_columns": idle(_COLUMNS),
    "label_names": idle(_COLUMNS, several=True),
    "length_column_name": idle(_COLUMNS),
    "train_sampling_strategy": idle(
        "rows are trained in the order in which their groups were begun, oldest first"
    ),
    "group_by_length": idle("micro-batches are filled by tokens, whatever the lengths of rows"),
    # processes
    "parallelism_config": refused(
        "give --tp_size, --cp_size, --ep_size and --dp_replicate_size"
    ),
    "fsdp": idle(_SHARDS),
    "fsdp_config": idle(_SHARDS),
    "fsdp_min_num_params": idle(_SHARDS),
    "fsdp_transformer_layer_cls_to_wrap": idle(_SHARDS),
    "deepspeed": refused(
        "parameters are sharded by FSDP2, the ZeRO-3 of PyTorch; leave it out, and give "
        "--param_offload true for its offload"
    ),
    "ddp_find_unused_parameters": idle(_SHARDS),
    "ddp_bucket_cap_mb": idle(_SHARDS),
    "ddp_broadcast_buffers": idle(_SHARDS),
    "ddp_static_graph": idle(_SHARDS),
    "ddp_backend": refused(
        "processes use NCCL on GPUs and Gloo on the CPU, see --use_cpu", "nccl", "gloo"
    ),
    "local_rank": idle("a process takes its rank from the environment of `accelerate launch`"),
    "no_cuda": named("use_cpu"),
    "use_mps_device": refused(_OTHER_DEVICES, "false"),
    "use_ipex": refused(_OTHER_DEVICES, "false"),
    "xpu_backend": refused(_OTHER_DEVICES),
    "tpu_num_cores": refused(_OTHER_DEVICES),
    "tpu_metrics_debug": refused(_OTHER_DEVICES, "false"),
    # further
    "do_train": idle(_SCRIPT),
    "do_eval": idle(_SCRIPT),
    "do_predict": idle(_SCRIPT),
    "debug": refused(
        "a gradient that is not finite is found by row and quarantined; leave it out", several=True
    ),
    "skip_memory_metrics": idle("`agentrl memory` says what a step takes"),
    "past_index": refused("rows are whole conversations, without memories; leave it out", "-1"),
    "ray_scope": idle("there is no search of hyperparameters"),
    "jit_mode_eval": idle(_PRECISION),
    "torchdynamo": refused("give --compile true"),
    "mp_parameters": refused("give --tp_size"),
    "per_gpu_train_batch_size": named("per_device_train_batch_size"),
    "per_gpu_eval_batch_size": idle(_EVALUATION),
}  # fmt: skip
