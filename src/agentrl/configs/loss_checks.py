"""Which flags of the loss go together. What does not is refused at the start, with the reason."""

from collections.abc import Iterator

from agentrl.configs.flag import ConfigError
from agentrl.configs.training import LossConfig

# Losses without a clip range, or whose clip range takes no gradient away.
_NOT_CLIPPING = frozenset(
    {"CISPO", "SAPO", "RLOO", "ReMax", "OPO", "GPG", "KL-Cov", "CrossEntropy"}
)
# Losses without an importance ratio of their own: a weight does not come twice.
_WITHOUT_RATIO = frozenset({"GPG"})


def validate_loss(config: LossConfig) -> None:
    """Raises `ConfigError` for values and combinations that would mean nothing, or something
    else than they seem to."""
    for refused, reason in _refusals(config):
        if refused:
            raise ConfigError(reason)


def _refusals(config: LossConfig) -> Iterator[tuple[bool, str]]:
    """Whether something is asked for that cannot be had, and the sentence that says so."""
    loss = config.loss_calculator
    without_ratio = loss in _WITHOUT_RATIO
    decoupled = config.proximal_policy != "behaviour"
    cap_on_ratio = config.importance_weight_cap_ratio is not None and config.rollout_is is None
    yield (
        (config.beta1, config.beta2) != (None, None) and loss in _NOT_CLIPPING,
        f"--beta1 and --beta2 with --loss_calculator {loss}: its clip range takes no gradient away "
        "that could be kept; leave them out",
    )
    yield (
        without_ratio and (cap_on_ratio or config.dual_clip is not None),
        f"--importance_weight_cap_ratio and --dual_clip with --loss_calculator {loss}: it has no "
        "ratio to cap; give it a weight with --rollout_is",
    )
    yield (
        config.rollout_is is not None and not decoupled and not without_ratio,
        f"--rollout_is {config.rollout_is}: the ratio to the sampler's policy is in the loss "
        "already, so give --proximal_policy recompute or loglinear too",
    )
    yield (
        decoupled and cap_on_ratio,
        f"--importance_weight_cap_ratio with --proximal_policy {config.proximal_policy}: there is "
        "no weight between trainer and sampler to cap without --rollout_is",
    )
    lower = config.rollout_rs_threshold_lower
    yield (
        lower is not None and lower > 1,
        f"--rollout_rs_threshold_lower {lower}: must not be above 1, the ratio of equal policies",
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
