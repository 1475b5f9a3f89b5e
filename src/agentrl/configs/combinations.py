"""The checks that involve several flags. Each refusal has its reason.

The bounds and choices of one flag are in its declaration.
"""

from collections.abc import Iterator

from agentrl.configs.config import Config
from agentrl.configs.flag import ConfigError
from agentrl.configs.losses import loss_defaults
from agentrl.configs.training import LossConfig
from agentrl.configs.unused_flags import check_unused

Refusals = Iterator[tuple[bool, str]]  # whether the refusal applies, and its message


def check_combinations(config: Config) -> None:
    """Raise `ConfigError` if flags contradict each other or if one of them would be ignored."""
    check_unused(config)
    for refusals in (_of_the_loss(config.loss), _of_sampling(config), _of_devices(config)):
        for refused, reason in refusals:
            if refused:
                raise ConfigError(reason)


def _of_sampling(config: Config) -> Refusals:
    sampling = config.sampling
    longest = sampling.max_prompt_tokens
    yield (
        config.context.new_context != "disabled" and longest in (None, sampling.max_tokens),
        f"--new_context {config.context.new_context}: needs --max_prompt_tokens, below "
        f"--max_tokens ({sampling.max_tokens}), so that a prompt leaves room for its answer",
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
    oldest, bound = config.services.publish_steps - 1, config.staleness_bound
    allowed = "--sync_sampling allows none" if not bound else f"--max_staleness allows {bound}"
    yield (
        oldest > bound,
        f"--publish_steps {oldest + 1}: before a publication the services' weights are {oldest} "
        f"steps old and {allowed}, so that the run would wait for rows forever; publish more often",
    )
    yield (
        config.services.inf_share_gpus and not config.sampling.sync_sampling,
        "--inf_share_gpus: needs --sync_sampling, because services whose memory is given back "
        "cannot sample while the trainer computes",
    )


def _of_the_loss(config: LossConfig) -> Refusals:
    loss = config.loss_calculator
    of_loss = loss_defaults(loss)
    decoupled = config.centre != "behaviour"
    cap_on_ratio = config.importance_weight_cap_ratio is not None and config.rollout_is is None
    yield (
        not of_loss.has_ratio and cap_on_ratio,
        f"--importance_weight_cap_ratio with --loss_calculator {loss}: it has no ratio to cap; "
        "give it a weight with --rollout_is",
    )
    yield (
        config.rollout_is is not None and of_loss.weighs_sampler,
        f"--rollout_is {config.rollout_is}: {loss} has the weight between trainer and sampler "
        "already; leave it out",
    )
    yield (
        config.rollout_is is not None and not decoupled and of_loss.has_ratio,
        f"--rollout_is {config.rollout_is}: the ratio to the sampler's policy is in the loss "
        "already, so give --proximal_policy recompute or loglinear too",
    )
    yield (
        decoupled and cap_on_ratio and of_loss.has_ratio and not of_loss.weighs_sampler,
        f"--importance_weight_cap_ratio: the ratio of {loss} is to the proximal policy "
        f"(--proximal_policy {config.centre}), so that there is no weight between trainer and "
        "sampler to cap; give it one with --rollout_is",
    )
    yield (
        loss == "KL-Cov" and config.centre == "recompute",
        "--proximal_policy recompute with --loss_calculator KL-Cov: its penalty |log r| and the "
        "penalty's gradient are 0 where the ratio is always 1; leave --proximal_policy out",
    )
    yield (
        config.strict_in_bound and of_loss.weighs_sampler and config.centre == "loglinear",
        f"--strict_in_bound true: the mask of {loss} is around --proximal_policy loglinear "
        "already; leave one of the two out",
    )
    yield (
        bool(config.token_level_loss) and config.skip_length_normalization,
        "--token_level_loss true and --skip_length_normalization true: a loss has one length "
        "normalization; give one of the two",
    )
    yield (
        config.normalization_length is not None and config.normalisation != "constant",
        f"--normalization_length {config.normalization_length}: the loss is divided by the "
        "number of its tokens; give --skip_length_normalization true too",
    )
    yield (
        config.clip_cov_lb > config.clip_cov_ub,
        f"--clip_cov_lb {config.clip_cov_lb:g}: must not be above --clip_cov_ub "
        f"{config.clip_cov_ub:g}",
    )
