"""The checks that involve several flags. Each refusal has its reason.

The bounds and choices of one flag are in its declaration.
"""

from collections.abc import Iterator

from agentrl.configs.config import Config
from agentrl.configs.flag import ConfigError
from agentrl.configs.losses import loss_defaults
from agentrl.configs.training import LossConfig

Refusals = Iterator[tuple[bool, str]]  # whether the refusal applies, and its message


def check_combinations(config: Config) -> None:
    """Raise `ConfigError` if flags contradict each other or if one of them would be ignored."""
    for refusals in (_of_the_loss(config.loss), _of_sampling(config), _of_devices(config)):
        for refused, reason in refusals:
            if refused:
                raise ConfigError(reason)


def _of_sampling(config: Config) -> Refusals:
    sampling = config.sampling
    longest = sampling.max_prompt_tokens
    yield (
        config.context.new_context != "disabled"
        and not (longest is not None and longest < sampling.max_tokens),
        f"--new_context {config.context.new_context}: needs --max_prompt_tokens, below "
        f"--max_tokens ({sampling.max_tokens}), which ends a record",
    )
    compares = config.reward.estimator != "score" and config.loss.loss_calculator != "CrossEntropy"
    yield (
        sampling.num_generations < 2 and compares,
        f"--num_generations {sampling.num_generations}: an advantage compares the rollouts of one "
        "task, so there must be at least 2",
    )


def _of_devices(config: Config) -> Refusals:
    yield (
        config.lora.lora_rank > 0 and (config.parallel.tp_size > 1 or config.parallel.ep_size > 1),
        f"--lora_rank {config.lora.lora_rank}: an adapter cannot be split over --tp_size or "
        "--ep_size, because the model's plan for them does not know it; shard over data or use "
        "--cp_size",
    )
    yield (
        config.services.inf_share_gpus and not config.sampling.sync_sampling,
        "--inf_share_gpus: needs --sync_sampling, because services whose memory is given back "
        "cannot sample while the trainer computes",
    )


def _of_the_loss(config: LossConfig) -> Refusals:
    loss = config.loss_calculator
    of_loss = loss_defaults(loss)
    decoupled = config.proximal_policy != "behaviour"
    cap_on_ratio = config.importance_weight_cap_ratio is not None and config.rollout_is is None
    yield (
        (config.beta1, config.beta2) != (None, None) and not of_loss.clips,
        f"--beta1 and --beta2 with --loss_calculator {loss}: its clip range takes no gradient away "
        "that could be kept; leave them out",
    )
    yield (
        not of_loss.has_ratio and (cap_on_ratio or config.dual_clip is not None),
        f"--importance_weight_cap_ratio and --dual_clip with --loss_calculator {loss}: it has no "
        "ratio to cap; give it a weight with --rollout_is",
    )
    yield (
        config.rollout_is is not None and not decoupled and of_loss.has_ratio,
        f"--rollout_is {config.rollout_is}: the ratio to the sampler's policy is in the loss "
        "already, so give --proximal_policy recompute or loglinear too",
    )
    yield (
        decoupled and cap_on_ratio,
        f"--importance_weight_cap_ratio with --proximal_policy {config.proximal_policy}: there is "
        "no weight between trainer and sampler to cap without --rollout_is",
    )
    yield (
        config.kl_in_advantage and not config.beta,
        "--kl_in_advantage: needs --beta, the coefficient of what is taken off",
    )
    yield (
        config.kl_in_advantage and loss == "CrossEntropy",
        "--kl_in_advantage: CrossEntropy has no advantages to take it off",
    )
    yield (
        loss == "PPO" and config.normalize_advantages is not None,
        "--normalize_advantages with --loss_calculator PPO: advantages from a critic always are "
        "normalized; leave it out",
    )
    yield (
        config.clip_cov_lb > config.clip_cov_ub,
        f"--clip_cov_lb {config.clip_cov_lb:g}: must not be above --clip_cov_ub "
        f"{config.clip_cov_ub:g}",
    )
