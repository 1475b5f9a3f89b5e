"""Flags of the trainer: model, loss, optimizer, devices, checkpoints."""

from dataclasses import dataclass

from agentrl.configs.flag import flag

LOSSES = ("GRPO", "MINIRL", "CrossEntropy")
CONTEXT_MODES = ("ulysses", "allgather")
SCHEDULES = (
    "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The policy."""

    model_name_or_path: str | None = flag(None, "folder of the model to train")
    chat_template_kwargs: str = flag(
        "{}", 'variables of the chat template, as JSON: {"enable_thinking": false}'
    )
    attention_implementation: str = flag("sdpa", "attention of the trainer's model")
    bf16: bool = flag(False, "compute in bfloat16, with float32 master weights and reduction")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass")


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter that is trained in place of the model's own weights."""

    lora_rank: int = flag(0, "rank of a LoRA adapter to train (0: train all weights)")
    lora_alpha: int = flag(32, "the adapter's output is scaled by this, over its rank")
    lora_target_modules: str = flag(
        "all-linear", "linear layers to adapt, comma separated, or all-linear (without the head)"
    )


@dataclass(frozen=True)
class LossConfig:
    """The loss."""

    loss_calculator: str = flag("GRPO", f"loss: {', '.join(LOSSES)}", aliases=["--loss_calculater"])
    token_level_loss: bool = flag(True, "average over tokens of the batch; off: over sequences")
    skip_length_normalization: bool = flag(False, "sum over tokens, average over sequences only")
    epsilon: float = flag(0.2, "clip range below 1 of the importance ratio")
    epsilon_higher: float | None = flag(None, "clip range above 1 (default --epsilon)")
    strict_in_bound: bool = flag(False, "leave tokens out whose ratio is out of the clip range")
    importance_weight_cap_ratio: float | None = flag(
        None, "cap on the importance weight between trainer and sampler (default: none)"
    )
    out_of_date_decay: float | None = flag(
        None, "factor on a token's advantage for each step that its policy version is old"
    )
    log_entropy: bool = flag(False, "log the policy's entropy")


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer step, by the names of transformers.TrainingArguments."""

    learning_rate: float = flag(1e-6, "peak learning rate")
    weight_decay: float = flag(0.0, "AdamW weight decay")
    adam_beta1: float = flag(0.9, "AdamW beta 1")
    adam_beta2: float = flag(0.95, "AdamW beta 2")
    adam_epsilon: float = flag(1e-8, "AdamW epsilon")
    max_grad_norm: float = flag(1.0, "gradient norm to clip to")
    lr_scheduler_type: str = flag("constant", f"learning rate schedule: {', '.join(SCHEDULES)}")
    warmup_steps: int = flag(0, "steps of linear warm-up")
    max_steps: int = flag(-1, "optimizer steps (-1: as --num_train_epochs gives)")
    per_device_train_batch_size: int = flag(1, "rows of a step, per data-parallel rank and ...")
    gradient_accumulation_steps: int = flag(1, "... times so many")
    max_trained_count: int = flag(1, "how often a row is trained, unless it grows too old")
    retrained_interval: int = flag(
        1, "least steps from one training of a row to the next, while there are other rows"
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Devices and memory. Processes that no degree claims share the data."""

    tp_size: int = flag(1, "tensor parallelism: processes that share each matrix")
    cp_size: int = flag(1, "context parallelism: processes that share each sequence")
    cp_mode: str = flag(
        "ulysses",
        "how they attend: ulysses (each has some heads of all tokens) or allgather (each has all "
        "heads of its tokens, and the keys and values of all)",
    )
    ep_size: int = flag(1, "expert parallelism: processes that experts are spread over")
    dp_replicate_size: int = flag(1, "copies of the sharded model (HSDP), one per node say")
    pp_size: int = flag(1, "pipeline parallelism: only 1, see docs/parallelism.md")
    use_cpu: bool = flag(False, "train on the CPU though there is a GPU")
    micro_batch_tokens: int | None = flag(
        None, "tokens of one forward pass, padding included (default --max_tokens)"
    )
    pad_to_multiple_of: int = flag(1, "pad micro-batches to a multiple of so many tokens")
    loss_seq_chunk_size: int = flag(1024, "tokens whose logits exist at once")
    activation_offloading: bool = flag(
        False, "keep what the backward pass needs in host memory until it needs it"
    )
    param_offload: bool = flag(
        False, "keep master weights, gradients and optimizer state in host memory"
    )
    compile: bool = flag(False, "compile each transformer layer (torch.compile)")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    save_steps: int = flag(100, "save a checkpoint every so many steps, and at the end")
    save_total_limit: int | None = flag(3, "how many checkpoints to keep")
    resume_from_checkpoint: str | None = flag(
        None,
        "folder to resume from, or `true` for the run's last; `false` starts anew "
        "(default: the run's last, if there is one)",
    )


@dataclass(frozen=True)
class ReservedConfig:
    """Flags whose feature this version does not have: only the default is taken."""

    dynamic_batching: bool = flag(True, "fill micro-batches by tokens (only true in this version)")
