"""Flags of the trainer: model, loss, optimizer, computation, processes, checkpoints.

The trainer passes whole groups to the `Learner`, in a `LearnerConfig`. A new flag is declared in
its group and read where it takes effect; no code between the two changes.
"""

from dataclasses import dataclass

from agentrl.configs.flag import FlagClass, flag
from agentrl.configs.losses import (
    KL_ESTIMATORS,
    LOSSES,
    PROXIMAL_POLICIES,
    RATIO_LEVELS,
    loss_defaults,
)
from agentrl.configs.preferences import PreferenceConfig

TREE_ATTENTION = "tree"
CONTEXT_MODES = ("ulysses", "allgather")
SCHEDULES = (
    "linear", "cosine", "constant", "constant_with_warmup", "inverse_sqrt", "polynomial",
    "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
)  # fmt: skip


@dataclass(frozen=True)
class ModelConfig:
    """The policy's weights, its chat template and its attention."""

    model_name_or_path: str | None = flag(
        None,
        "folder of the model to train, or its name on the Hugging Face hub",
        unset="none; training needs it",
        kind="DIR",
        belongs=FlagClass.DATA,
    )
    reference_model_name_or_path: str | None = flag(
        None,
        "folder of the reference policy to which --beta penalises the KL divergence",
        unset="--model_name_or_path",
        kind="DIR",
    )
    chat_template_kwargs: str = flag(
        "{}",
        'variables of the chat template as JSON, for example {"enable_thinking": false}',
        kind="JSON",
        belongs=FlagClass.SAMPLING,
    )
    attention_implementation: str = flag(
        TREE_ATTENTION,
        "attention of the trainer's model: tree computes tokens that sequences share once, and "
        "falls back to sdpa or eager over padded sequences if a probe of the model finds it wrong; "
        "any other name is an attention of transformers, refused if the probe finds it wrong",
        kind="NAME",
    )

    @property
    def attends_over_trees(self) -> bool:
        """Whether tree attention is wanted, with a fallback for models that do not support it."""
        return self.attention_implementation == TREE_ATTENTION


@dataclass(frozen=True)
class LoraConfig:
    """A LoRA adapter, which is trained instead of the model's weights."""

    lora_rank: int = flag(
        0, "rank of the LoRA adapter that is trained (0: all weights are trained)", least=0
    )
    lora_alpha: int = flag(
        32, "alpha of the LoRA adapter, whose output is multiplied by alpha / rank", least=0
    )
    lora_target_modules: str = flag(
        "all-linear",
        "names of the linear layers that get a LoRA adapter, separated by commas; all-linear means "
        "all except the output head",
        kind="LIST",
    )


@dataclass(frozen=True)
class LossConfig:
    """The loss. None means the value of the loss's paper, see `losses.py`."""

    loss_calculator: str = flag(
        "GRPO",
        "loss function; flags that are not given have the defaults of its paper",
        choices=tuple(LOSSES),
        function=True,
        aliases=("loss_calculater",),
    )
    token_level_loss: bool | None = flag(
        None,
        "whether the loss is the mean over the tokens of a step; if not, it is the mean over "
        "sequences of each sequence's mean",
        unset="as the loss's paper does",
    )
    skip_length_normalization: bool = flag(
        False,
        "whether the loss is the mean over sequences of each sequence's sum over its tokens, "
        "divided by --normalization_length if that is given",
    )
    normalization_length: int | None = flag(
        None,
        "number of tokens, the same for all sequences, by which a loss without another length "
        "normalization divides a sequence's sum over its tokens",
        unset="--max_new_tokens; 1 with --skip_length_normalization",
        least=1,
    )
    epsilon: float | None = flag(
        None,
        "width of the clip range below 1 of the importance ratio",
        unset="that of the loss's paper, mostly 0.2",
        least=0,
        most=1,
    )
    epsilon_higher: float | None = flag(
        None,
        "what is added to --epsilon above 1: the clip range is 1 - epsilon to 1 + epsilon + "
        "epsilon_higher",
        unset="--clip_ratio_high decides",
        least=0,
    )
    clip_ratio_high: float | None = flag(
        None,
        "width of the clip range above 1 of the importance ratio, in place of --epsilon_higher",
        unset="that of the loss's paper, else --epsilon",
        least=0,
    )
    beta1: float | None = flag(
        None,
        "share of the gradient that tokens below the clip range keep (CE-GPPO)",
        unset="nothing is kept",
        least=0,
    )
    beta2: float | None = flag(
        None,
        "share of the gradient that tokens above the clip range keep (CE-GPPO)",
        unset="nothing is kept",
        least=0,
    )
    dual_clip: float | None = flag(
        None,
        "largest importance ratio that counts for tokens with a negative advantage",
        unset="none",
        least=1,
    )
    importance_weight_cap_ratio: float | None = flag(
        None,
        "width of the band around 1, in widths of the clip range, in which a token's ratio must "
        "be; a token whose advantage would move it further out is left out of the loss",
        unset="nothing is left out",
        above=0,
    )
    out_of_date_decay: float | None = flag(
        None,
        "rate at which staleness narrows the band of --importance_weight_cap_ratio: its width is "
        "multiplied by exp(-rate * staleness)",
        unset="the band does not depend on staleness",
        least=0,
    )
    strict_in_bound: bool | None = flag(
        None,
        "whether the band of --importance_weight_cap_ratio is the clip range itself",
        unset="true for MINIRL, else false",
    )
    proximal_policy: str | None = flag(
        None,
        "policy that the clip range is centred on",
        unset="recompute for GSPO, GSPO-token and MINIRL without --strict_in_bound and "
        "--importance_weight_cap_ratio, else behaviour",
        choices=PROXIMAL_POLICIES,
    )
    rollout_is: str | None = flag(
        None,
        "level of the weight on the loss, the ratio of the proximal policy to the sampler's, which "
        "--rollout_is_threshold caps",
        choices=RATIO_LEVELS,
        unset="no such weight",
    )
    rollout_is_threshold: float | None = flag(
        None,
        "largest importance weight between the trainer's policy and the sampler's (0: no bound)",
        unset="5 for MINIRL, else 0",
        least=0,
    )
    rollout_rs: str | None = flag(
        None,
        "level of the ratio of the proximal policy to the sampler's at which tokens or sequences "
        "outside --rollout_rs_threshold are left out of the loss",
        choices=RATIO_LEVELS,
        unset="nothing is left out",
    )
    rollout_rs_threshold: float = flag(
        2.0, "largest ratio of proximal to sampler's policy that --rollout_rs keeps", least=1
    )
    rollout_rs_threshold_lower: float | None = flag(
        None,
        "smallest ratio of proximal to sampler's policy that --rollout_rs keeps, at most 1",
        unset="1 / --rollout_rs_threshold",
        least=0,
        most=1,
    )
    advantage_decay: float | None = flag(
        None,
        "factor by which a token's advantage is multiplied for each optimizer step of staleness",
        unset="1",
        least=0,
        most=1,
    )
    normalize_advantages: bool | None = flag(
        None,
        "whether the advantages of a step are normalized to mean 0 and standard deviation 1 over "
        "its tokens",
        unset="as the loss's paper does",
    )
    beta: float = flag(0.0, "coefficient of the KL divergence to the reference policy", least=0)
    kl_estimator: str | None = flag(
        None,
        "estimator of the KL divergence to the reference policy on sampled tokens",
        unset="k1 with --kl_in_advantage, else k3",
        choices=KL_ESTIMATORS,
    )
    kl_in_advantage: bool = flag(
        False,
        "whether the KL divergence to the reference policy is subtracted from the advantages; if "
        "not, it is added to the loss",
    )
    entropy_coef: float = flag(
        0.0, "coefficient of the entropy bonus, which is subtracted from the loss", least=0
    )
    sapo_temperature_pos: float = flag(
        1.0, "temperature of the SAPO loss for tokens with a positive advantage", least=0.001
    )
    sapo_temperature_neg: float = flag(
        1.05, "temperature of the SAPO loss for tokens without a positive advantage", least=0.001
    )
    clip_cov_ratio: float = flag(
        2e-4,
        "share of the tokens to which the Clip-Cov loss gives no gradient",
        least=0,
        most=1,
    )
    clip_cov_lb: float = flag(
        1.0, "smallest covariance of the tokens to which the Clip-Cov loss gives no gradient"
    )
    clip_cov_ub: float = flag(
        5.0, "largest covariance of the tokens to which the Clip-Cov loss gives no gradient"
    )
    kl_cov_ratio: float = flag(
        2e-4, "share of the tokens to which the KL-Cov loss gives a KL penalty", least=0, most=1
    )
    ppo_kl_coef: float = flag(1.0, "coefficient of the KL-Cov loss's KL penalty", least=0)
    log_entropy: bool = flag(
        False,
        "whether the policy's entropy is logged, and stored of each trained token if "
        "--store_trainer_logprobs does",
    )

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lower and upper bound of the importance ratio, around 1."""
        defaults = loss_defaults(self.loss_calculator)
        below = defaults.epsilon if self.epsilon is None else self.epsilon
        if self.epsilon_higher is not None:
            return 1.0 - below, 1.0 + below + self.epsilon_higher
        above = defaults.clip_ratio_high if self.clip_ratio_high is None else self.clip_ratio_high
        return 1.0 - below, 1.0 + (below if above is None else above)

    @property
    def band(self) -> float | None:
        """Width of the band of ratios of a new token, in widths of the clip range; None: no band.

        Only `--importance_weight_cap_ratio` gives a band whose width depends on staleness. A loss
        without a clip range has no band.
        """
        if "strict_in_bound" not in loss_defaults(self.loss_calculator).uses:
            return None
        return 1.0 if self.is_strict else self.importance_weight_cap_ratio

    @property
    def is_strict(self) -> bool:
        """Whether the band is the clip range."""
        if self.strict_in_bound is None and self.importance_weight_cap_ratio is None:
            return loss_defaults(self.loss_calculator).strict_in_bound
        return bool(self.strict_in_bound)

    @property
    def normalisation(self) -> str:
        """The length normalisation, one of `NORMALISATIONS`."""
        if self.skip_length_normalization:
            return "constant"
        if self.token_level_loss is None:
            return loss_defaults(self.loss_calculator).normalisation
        return "token" if self.token_level_loss else "sequence"

    @property
    def divisor(self) -> int:
        """`normalization_length`; `Config.learner` sets it for a run. Without it 1, the sum."""
        return 1 if self.normalization_length is None else self.normalization_length

    @property
    def centre(self) -> str:
        """The policy that the clip range is centred on, one of `PROXIMAL_POLICIES`.

        A band that is asked for is around the sampler's policy, as in the original AgentRL.
        """
        if self.proximal_policy is not None:
            return self.proximal_policy
        if self.strict_in_bound or self.importance_weight_cap_ratio is not None:
            return "behaviour"
        return loss_defaults(self.loss_calculator).proximal_policy

    @property
    def weight_cap(self) -> float | None:
        """The largest importance weight; None without a bound."""
        cap = self.rollout_is_threshold
        if cap is None:
            cap = loss_defaults(self.loss_calculator).rollout_is_threshold
        return cap or None

    @property
    def divergence(self) -> str:
        """The estimator of the KL to the reference policy, one of `KL_ESTIMATORS`."""
        if self.kl_estimator is not None:
            return self.kl_estimator
        return "k1" if self.kl_in_advantage else "k3"

    @property
    def normalizes_advantages(self) -> bool:
        """Whether advantages are normalized over the tokens of a step."""
        if self.normalize_advantages is None:
            return loss_defaults(self.loss_calculator).normalize_advantages
        return self.normalize_advantages


@dataclass(frozen=True)
class CriticConfig:
    """The critic of `--loss_calculator PPO`."""

    critic_model_name_or_path: str | None = flag(
        None,
        "folder of the weights that the critic of PPO starts from",
        unset="--model_name_or_path",
        kind="DIR",
    )
    critic_learning_rate: float = flag(
        1e-5, "largest learning rate of the critic of PPO, after warm-up", least=0
    )
    critic_updates: int = flag(
        1, "number of optimizer updates of the critic of PPO on the rows of one step", least=1
    )
    critic_warmup_steps: int = flag(
        0,
        "number of optimizer steps at the start that train only the critic of PPO, not the policy",
        least=0,
    )
    gae_gamma: float = flag(
        1.0,
        "discount factor of PPO from one trained token to the next, between 0 and 1",
        least=0,
        most=1,
    )
    gae_lambda: float = flag(
        1.0,
        "lambda of generalized advantage estimation in PPO, between 0 (only the critic's estimates "
        "count) and 1 (only the rewards count)",
        least=0,
        most=1,
    )
    value_clip: float | None = flag(
        None,
        "largest change of a value of PPO's critic in one optimizer step; the value loss is "
        "clipped beyond it",
        unset="no bound",
        above=0,
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer step. Names are those of transformers.TrainingArguments."""

    learning_rate: float = flag(1e-6, "largest learning rate, after warm-up", least=0)
    weight_decay: float = flag(0.0, "coefficient of AdamW's weight decay", least=0)
    adam_beta1: float = flag(
        0.9, "decay rate of AdamW's first moment, the mean of gradients; below 1", least=0, below=1
    )
    adam_beta2: float = flag(
        0.95,
        "decay rate of AdamW's second moment, the mean of squared gradients; below 1",
        least=0,
        below=1,
    )
    adam_epsilon: float = flag(
        1e-8, "number that AdamW adds to the denominator of its update", above=0
    )
    max_grad_norm: float = flag(
        1.0, "largest gradient norm, to which gradients are clipped (0: no clipping)", least=0
    )
    log_grad_norms: bool = flag(
        False, "whether the gradient norm of each layer is logged beside that of the whole model"
    )
    lr_scheduler_type: str = flag(
        "constant", "schedule of the learning rate after warm-up", choices=SCHEDULES
    )
    lr_scheduler_kwargs: str = flag(
        "{}",
        "arguments of the schedule as JSON, by their names in transformers, for example "
        '{"min_lr_rate": 0.1}',
        kind="JSON",
    )
    warmup_steps: float = flag(
        0.0,
        "number of first optimizer steps in which the learning rate rises linearly; below 1, the "
        "share of the run's steps",
        least=0,
    )
    max_steps: int = flag(
        -1,
        "number of optimizer steps of the run (-1: --num_train_epochs decides)",
        least=-1,
    )
    per_device_train_batch_size: int = flag(
        1,
        "number of rows for each data-parallel rank and each of --gradient_accumulation_steps in "
        "one optimizer step",
        least=1,
    )
    gradient_accumulation_steps: int = flag(
        1, "factor that multiplies --per_device_train_batch_size in one optimizer step", least=1
    )
    max_trained_count: int = flag(
        1, "largest number of optimizer steps that train a row, within --max_staleness", least=1
    )
    retrained_interval: int = flag(
        1,
        "smallest number of optimizer steps between two trainings of a row, as long as there are "
        "other rows",
        least=1,
    )


@dataclass(frozen=True)
class ComputeConfig:
    """The computation of a step: dtypes, micro-batches and ways to save memory."""

    bf16: bool = flag(
        False,
        "whether the model computes in bfloat16, with float32 master weights and float32 gradient "
        "reduction",
    )
    fp32_head: bool = flag(
        False,
        "whether the output head, from hidden states to logits, computes in float32 with --bf16, "
        "in the trainer and in the inference services that a launch starts",
    )
    gradient_checkpointing: bool = flag(
        False,
        "whether the activations of each layer are recomputed in the backward pass, to save memory",
    )
    activation_offloading: bool = flag(
        False, "whether activations are kept in host memory until the backward pass"
    )
    param_offload: bool = flag(
        False, "whether master weights, gradients and optimizer state are kept in host memory"
    )
    compile: bool = flag(False, "whether each transformer layer is compiled with torch.compile")
    tf32: bool = flag(
        False, "whether GPUs multiply float32 matrices in TensorFloat-32, faster and less exact"
    )
    micro_batch_tokens: int | None = flag(
        None,
        "largest number of tokens of one forward pass, padding included",
        unset="--max_tokens",
        least=1,
    )
    pad_to_multiple_of: int = flag(
        1, "number of tokens to a multiple of which each micro-batch is padded", least=1
    )
    loss_seq_chunk_size: int = flag(
        1024, "largest number of tokens whose logits exist at once", least=1
    )

    @property
    def token_budget(self) -> int:
        """`micro_batch_tokens`, which must be set; `Config.learner` sets it."""
        assert self.micro_batch_tokens is not None, "a learner is told how long a micro-batch is"
        return self.micro_batch_tokens


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of parallelism. The remaining factor of the process count is data parallelism."""

    tp_size: int = flag(
        1, "degree of tensor parallelism: number of processes that share each matrix", least=1
    )
    cp_size: int = flag(
        1, "degree of context parallelism: number of processes that share each sequence", least=1
    )
    cp_mode: str = flag(
        "ulysses",
        "attention of context-parallel processes: with ulysses each computes some heads of all "
        "tokens, with allgather all heads of its own tokens over the keys and values of all",
        choices=CONTEXT_MODES,
    )
    ep_size: int = flag(
        1,
        "degree of expert parallelism: number of processes over which experts are distributed",
        least=1,
    )
    dp_replicate_size: int = flag(
        1, "number of copies of the sharded model (HSDP), for example one for each machine", least=1
    )
    pp_size: int = flag(
        1,
        "degree of pipeline parallelism, which is always 1 (docs/reference/parallelism.md)",
        least=1,
        only="there is no pipeline parallelism, because a step's trees have no common shape to "
        "send between stages; use --dp_replicate_size, --tp_size, --cp_size or --ep_size",
    )
    use_cpu: bool = flag(False, "whether training uses the CPU although there is a GPU")
    ddp_timeout: int = flag(
        1800,
        "seconds that trainer processes wait for each other before they fail",
        least=1,
        belongs=FlagClass.OWN,
    )

    @property
    def processes_per_rank(self) -> int:
        """Number of processes of one data-parallel rank, which train the same rows."""
        return self.tp_size * self.cp_size


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, how many are kept, and which one a run resumes from."""

    save_steps: int = flag(
        100,
        "number of optimizer steps from one checkpoint to the next (0: only the last step); the "
        "last step is saved too",
        least=0,
    )
    save_total_limit: int = flag(
        3, "largest number of checkpoints that are kept, the newest ones (0: all)", least=0
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "folder of the checkpoint to resume from; `true` means the run's last one and `false` none",
        unset="the run's last, if there is one",
        kind="DIR",
        belongs=FlagClass.OWN,
    )

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint of this step is saved, also if it is not the last one."""
        return self.save_steps > 0 and step % self.save_steps == 0


@dataclass(frozen=True)
class ReservedConfig:
    """Flags whose feature this version does not have; only the default is accepted."""

    lora_publish: str = flag(
        "merged",
        "form in which inference services get an adapter, always merged (docs/reference/memory.md)",
        only="this version has only merged; leave the flag out",
    )


@dataclass(frozen=True)
class LearnerConfig:
    """The groups of flags that a `Learner` reads; `Config.learner` makes it for a run.

    Without `model.model_name_or_path` the learner uses the weights of the model that it is given.
    `compute.micro_batch_tokens` must be set. With `preference` rows are pairs, and `loss` counts
    only for whether there is a reference. `longest_row`: tokens of the longest row that may
    come, None for those of a micro-batch.
    """

    compute: ComputeConfig
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    critic: CriticConfig = CriticConfig()
    model: ModelConfig = ModelConfig()
    preference: PreferenceConfig | None = None
    longest_row: int | None = None
