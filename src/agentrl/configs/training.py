"""Flags of the trainer: model, loss, optimizer, devices, checkpoints."""

from dataclasses import dataclass

from agentrl.configs.flag import flag
from agentrl.configs.losses import (
    KL_ESTIMATORS,
    LOSSES,
    PROXIMAL_POLICIES,
    RATIO_LEVELS,
    loss_defaults,
)

TREE_ATTENTION = "tree"
CONTEXT_MODES = ("ulysses", "allgather")
SCHEDULES = (
    "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The policy."""

    model_name_or_path: str | None = flag(
        None, "folder of the model to train", unset="none: needed to train", kind="DIR"
    )
    reference_model_name_or_path: str | None = flag(
        None, "folder of the reference policy of --beta", unset="--model_name_or_path", kind="DIR"
    )
    chat_template_kwargs: str = flag(
        "{}", 'variables of the chat template: {"enable_thinking": false}', kind="JSON"
    )
    attention_implementation: str = flag(
        TREE_ATTENTION,
        "attention of the trainer's model: tree, which computes shared tokens once (sdpa for "
        "models that cannot), or one of transformers', over padded sequences",
        kind="NAME",
    )
    bf16: bool = flag(False, "compute in bfloat16, with float32 master weights and reduction")
    gradient_checkpointing: bool = flag(False, "recompute activations in the backward pass")


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter that is trained in place of the model's own weights."""

    lora_rank: int = flag(0, "rank of a LoRA adapter to train (0: train all weights)", least=0)
    lora_alpha: int = flag(32, "the adapter's output is scaled by this, over its rank", least=0)
    lora_target_modules: str = flag(
        "all-linear",
        "linear layers to adapt, comma separated, or all-linear (without the head)",
        kind="LIST",
    )


@dataclass(frozen=True)
class LossConfig:
    """The loss. What is None stands at what the loss's paper has, see `losses.py`."""

    loss_calculator: str = flag(
        "GRPO",
        "the loss, with the defaults of its paper",
        choices=tuple(LOSSES),
        function=True,
        aliases=("loss_calculater",),
    )
    token_level_loss: bool | None = flag(
        None,
        "average over tokens of the batch; false: over sequences",
        unset="as the loss's paper does",
    )
    skip_length_normalization: bool = flag(False, "sum over tokens, average over sequences only")
    epsilon: float | None = flag(
        None,
        "clip range below 1 of the importance ratio",
        unset="that of the loss's paper, mostly 0.2",
        least=0,
    )
    epsilon_higher: float | None = flag(
        None,
        "clip range above 1 of the importance ratio",
        unset="that of the loss's paper, else --epsilon",
        least=0,
    )
    beta1: float | None = flag(
        None,
        "CE-GRPO: keep this share of the gradient of tokens below the clip range",
        unset="nothing is kept",
        least=0,
    )
    beta2: float | None = flag(
        None,
        "CE-GRPO: keep this share of the gradient of tokens above the clip range",
        unset="nothing is kept",
        least=0,
    )
    dual_clip: float | None = flag(
        None,
        "cap on the importance ratio of tokens with a negative advantage",
        unset="none",
        least=1,
    )
    strict_in_bound: bool = flag(False, "leave tokens out whose ratio is out of the clip range")
    importance_weight_cap_ratio: float | None = flag(
        None,
        "cap on the importance weight between trainer and sampler",
        unset="none",
        least=0,
    )
    proximal_policy: str = flag(
        "behaviour",
        "policy that the clip range is around",
        choices=PROXIMAL_POLICIES,
    )
    rollout_is: str | None = flag(
        None,
        "weigh by the ratio of proximal and sampler's policy, cut at "
        "--importance_weight_cap_ratio, by",
        choices=RATIO_LEVELS,
        unset="no such weight",
    )
    rollout_rs: str | None = flag(
        None,
        "leave out what the sampler's policy is too far from, by the ratio of",
        choices=RATIO_LEVELS,
        unset="nothing is",
    )
    rollout_rs_threshold: float = flag(2.0, "largest ratio that --rollout_rs keeps", least=1)
    rollout_rs_threshold_lower: float | None = flag(
        None,
        "smallest ratio that --rollout_rs keeps",
        unset="1 / --rollout_rs_threshold",
        least=0,
    )
    out_of_date_decay: float | None = flag(
        None,
        "factor on a token's advantage for each step that its policy version is old",
        unset="1",
        least=0,
    )
    normalize_advantages: bool | None = flag(
        None,
        "advantages of a step to mean 0 and deviation 1 over its tokens",
        unset="as the loss's paper does",
    )
    beta: float = flag(0.0, "coefficient of the KL divergence to the reference model", least=0)
    kl_estimator: str = flag(
        "k3", "how the KL divergence of --beta is estimated", choices=KL_ESTIMATORS
    )
    kl_in_advantage: bool = flag(
        False, "take the KL divergence of --beta off the advantages; false: add it to the loss"
    )
    entropy_coef: float = flag(0.0, "coefficient of the entropy bonus", least=0)
    sapo_temperature_pos: float = flag(
        1.0, "SAPO: temperature where the advantage is positive", least=0.001
    )
    sapo_temperature_neg: float = flag(1.05, "SAPO: temperature where it is not", least=0.001)
    clip_cov_ratio: float = flag(
        2e-4, "Clip-Cov: share of the tokens that get no gradient", least=0
    )
    clip_cov_lb: float = flag(1.0, "Clip-Cov: least covariance of these")
    clip_cov_ub: float = flag(5.0, "Clip-Cov: largest covariance of these")
    kl_cov_ratio: float = flag(2e-4, "KL-Cov: share of the tokens that get the KL penalty", least=0)
    ppo_kl_coef: float = flag(1.0, "KL-Cov: coefficient of the penalty", least=0)
    log_entropy: bool = flag(False, "log the policy's entropy")

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the importance ratio."""
        defaults = loss_defaults(self.loss_calculator)
        below = defaults.epsilon if self.epsilon is None else self.epsilon
        above = defaults.epsilon_higher if self.epsilon_higher is None else self.epsilon_higher
        return 1.0 - below, 1.0 + (below if above is None else above)

    @property
    def normalisation(self) -> str:
        """One of `NORMALISATIONS`."""
        if self.skip_length_normalization:
            return "none"
        if self.token_level_loss is None:
            return loss_defaults(self.loss_calculator).normalisation
        return "token" if self.token_level_loss else "sequence"

    @property
    def normalizes_advantages(self) -> bool:
        """Whether advantages are normalised over the global batch."""
        if self.normalize_advantages is None:
            return loss_defaults(self.loss_calculator).normalize_advantages
        return self.normalize_advantages


@dataclass(frozen=True)
class CriticConfig:
    """The critic of `--loss_calculator PPO`."""

    critic_model_name_or_path: str | None = flag(
        None,
        "PPO: folder of the critic's start weights",
        unset="--model_name_or_path",
        kind="DIR",
    )
    critic_learning_rate: float = flag(1e-5, "PPO: peak learning rate of the critic", least=0)
    critic_updates: int = flag(
        1, "PPO: optimizer updates of the critic on the rows of a step", least=1
    )
    critic_warmup_steps: int = flag(0, "PPO: first steps, which train the critic only", least=0)
    gae_gamma: float = flag(1.0, "PPO: discount of a reward for each trained token before it")
    gae_lambda: float = flag(
        1.0, "PPO: GAE's lambda; 1 trusts what was reached, 0 what the critic expects"
    )
    value_clip: float | None = flag(
        None,
        "PPO: how far an update moves a value from that before the step",
        unset="no bound",
        least=0,
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer step, by the names of transformers.TrainingArguments."""

    learning_rate: float = flag(1e-6, "peak learning rate", least=0)
    weight_decay: float = flag(0.0, "AdamW weight decay")
    adam_beta1: float = flag(0.9, "AdamW beta 1")
    adam_beta2: float = flag(0.95, "AdamW beta 2")
    adam_epsilon: float = flag(1e-8, "AdamW epsilon")
    max_grad_norm: float = flag(1.0, "gradient norm to clip to", least=0)
    log_grad_norms: bool = flag(False, "log the gradient norm of each layer too")
    lr_scheduler_type: str = flag("constant", "learning rate schedule", choices=SCHEDULES)
    warmup_steps: int = flag(0, "steps of linear warm-up", least=0)
    max_steps: int = flag(-1, "optimizer steps (-1: as --num_train_epochs gives)", least=-1)
    per_device_train_batch_size: int = flag(
        1,
        "rows of a step: this, times --gradient_accumulation_steps, times the data-parallel ranks",
        least=1,
    )
    gradient_accumulation_steps: int = flag(
        1, "times as many rows in a step, see --per_device_train_batch_size", least=1
    )
    max_trained_count: int = flag(1, "how often a row is trained, unless it grows too old", least=1)
    retrained_interval: int = flag(
        1, "least steps from one training of a row to the next, while there are other rows", least=1
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Devices and memory. Processes that no degree claims share the data."""

    tp_size: int = flag(1, "tensor parallelism: processes that share each matrix", least=1)
    cp_size: int = flag(1, "context parallelism: processes that share each sequence", least=1)
    cp_mode: str = flag(
        "ulysses",
        "how processes that share a sequence attend: each has some heads of all tokens (ulysses), "
        "or all heads of its tokens and the keys and values of all (allgather)",
        choices=CONTEXT_MODES,
    )
    ep_size: int = flag(1, "expert parallelism: processes that experts are spread over", least=1)
    dp_replicate_size: int = flag(
        1, "copies of the sharded model (HSDP), one per node say", least=1
    )
    pp_size: int = flag(
        1, "pipeline parallelism: only 1, see docs/reference/parallelism.md", least=1
    )
    use_cpu: bool = flag(False, "train on the CPU though there is a GPU")
    micro_batch_tokens: int | None = flag(
        None,
        "tokens of one forward pass, padding included",
        unset="--max_tokens",
        least=1,
    )
    pad_to_multiple_of: int = flag(1, "pad micro-batches to a multiple of so many tokens", least=1)
    loss_seq_chunk_size: int = flag(1024, "tokens whose logits exist at once", least=1)
    activation_offloading: bool = flag(
        False, "keep what the backward pass needs in host memory until it needs it"
    )
    param_offload: bool = flag(
        False, "keep master weights, gradients and optimizer state in host memory"
    )
    compile: bool = flag(False, "compile each transformer layer (torch.compile)")

    @property
    def processes_per_rank(self) -> int:
        """Processes of a data-parallel rank, which train the same rows."""
        return self.tp_size * self.cp_size


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    save_steps: int = flag(100, "save a checkpoint every so many steps, and at the end", least=1)
    save_total_limit: int | None = flag(3, "how many checkpoints to keep", least=1)
    resume_from_checkpoint: str | None = flag(
        None,
        "folder to resume from, or `true` for the run's last; `false` starts anew",
        unset="the run's last, if there is one",
        kind="DIR",
    )


@dataclass(frozen=True)
class ReservedConfig:
    """Flags whose feature this version does not have: only the default is taken."""

    lora_publish: str = flag(
        "merged",
        "how services get an adapter: only merged in this version, see docs/reference/memory.md",
    )
    dynamic_batching: bool = flag(True, "fill micro-batches by tokens: only true in this version")
