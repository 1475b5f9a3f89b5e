"""Which flags of the loss go together. What does not is refused at the start, with the reason."""

from agentrl.configs.flag import ConfigError, one_of, one_of_or_function
from agentrl.configs.losses import KL_ESTIMATORS, LOSSES, PROXIMAL_POLICIES, RATIO_LEVELS
from agentrl.configs.training import LossConfig

# Losses whose clip range takes gradients away, so that some can be kept.
_CLIPPING = frozenset(LOSSES) - {
    "CISPO", "SAPO", "RLOO", "ReMax", "OPO", "GPG", "KL-Cov", "CrossEntropy",
}  # fmt: skip
# Losses without an importance ratio of their own: a weight does not come twice.
_WITHOUT_RATIO = frozenset({"GPG"})


def validate_loss(config: LossConfig) -> None:
    """Raises `ConfigError` for values and combinations that would mean nothing, or something
    else than they seem to."""
    loss = config.loss_calculator
    one_of_or_function("loss_calculator", loss, tuple(LOSSES))
    one_of("proximal_policy", config.proximal_policy, PROXIMAL_POLICIES)
    one_of("kl_estimator", config.kl_estimator, KL_ESTIMATORS)
    for name in ("rollout_is", "rollout_rs"):
        level = getattr(config, name)
        if level is not None:
            one_of(name, level, RATIO_LEVELS)
    own = loss not in LOSSES
    if (config.beta1, config.beta2) != (None, None) and not own and loss not in _CLIPPING:
        raise ConfigError(
            f"--beta1 and --beta2 with --loss_calculator {loss}: its clip range takes no gradient "
            "away that could be kept; leave them out"
        )
    decoupled = config.proximal_policy != "behaviour"
    if config.rollout_is is not None and not decoupled and loss not in _WITHOUT_RATIO:
        raise ConfigError(
            f"--rollout_is {config.rollout_is}: the ratio to the sampler's policy is in the loss "
            "already, so give --proximal_policy recompute or loglinear too"
        )
    if decoupled and config.rollout_is is None and config.importance_weight_cap_ratio is not None:
        raise ConfigError(
            f"--importance_weight_cap_ratio with --proximal_policy {config.proximal_policy}: "
            "there is no weight between trainer and sampler to cap without --rollout_is"
        )
    lower = config.rollout_rs_threshold_lower
    if lower is not None and lower > 1:
        raise ConfigError(
            f"--rollout_rs_threshold_lower {lower:g}: must not be above 1, the ratio of equals"
        )
    if config.kl_in_advantage and not config.beta:
        raise ConfigError("--kl_in_advantage: needs --beta, the coefficient of what is taken off")
    if loss == "CrossEntropy" and config.kl_in_advantage:
        raise ConfigError("--kl_in_advantage: CrossEntropy has no advantages to take it off")
    if loss == "PPO" and config.whiten_advantages is not None:
        raise ConfigError(
            "--whiten_advantages with --loss_calculator PPO: advantages from a critic always are "
            "whitened; leave it out"
        )
    if config.clip_cov_lb > config.clip_cov_ub:
        raise ConfigError(
            f"--clip_cov_lb {config.clip_cov_lb:g}: must not be above --clip_cov_ub "
            f"{config.clip_cov_ub:g}"
        )
