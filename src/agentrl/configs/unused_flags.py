"""Flags that have no effect: of another loss, of a layer that is off, of a ratio that is always 1.

A flag that has its default counts as not given.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from agentrl.configs.config import Config
from agentrl.configs.flag import ConfigError
from agentrl.configs.flags import written
from agentrl.configs.losses import LOSSES, loss_defaults, unused_by
from agentrl.configs.training import LossConfig

# Flags that describe a layer, by the flag that switches the layer on.
_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "agent_sandbox": ("agent_sandbox_folders",),
    "fork_turns": ("fork_at", "forks"),
    "otlp_endpoint": ("trace_rate", "trace_failed_only"),
    "beta": ("kl_estimator", "kl_in_advantage", "reference_model_name_or_path"),
    "rollout_rs": ("rollout_rs_threshold", "rollout_rs_threshold_lower"),
    "importance_weight_cap_ratio": ("out_of_date_decay",),
}

# Flags that act where the ratio is not 1. With --proximal_policy recompute it is always 1.
_OF_A_RATIO = (
    "strict_in_bound", "importance_weight_cap_ratio", "epsilon", "epsilon_higher",
    "clip_ratio_high", "beta1", "beta2", "dual_clip", "sapo_temperature_pos",
    "sapo_temperature_neg",
)  # fmt: skip


def check_unused(config: Config) -> None:
    """Raise `ConfigError` for a flag that is given and has no effect."""
    given = dict(_given(config))
    loss = config.loss.loss_calculator
    for name, users in unused_by(loss).items():
        if name in given:
            raise ConfigError(
                f"--{name} {given[name]}: --loss_calculator {loss} does not use it, only "
                f"{', '.join(users)}; leave it out"
            )
    for switch, names in _SWITCHES.items():
        for name in names:
            if name in given and switch not in given:
                raise ConfigError(f"--{name} {given[name]}: has no effect without --{switch}")
    _check_ratio(config.loss, given)


def _check_ratio(loss: LossConfig, given: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a flag that acts on a ratio that is always 1.

    What a loss in a user's file does with such a flag is not known.
    """
    weighs_sampler = loss_defaults(loss.loss_calculator).weighs_sampler
    if loss.loss_calculator not in LOSSES or loss.centre != "recompute":
        return
    for name in _OF_A_RATIO:
        if name in given and not (name == "dual_clip" and weighs_sampler):
            alone = weighs_sampler and loss.proximal_policy is None
            raise ConfigError(
                f"--{name} {given[name]}: has no effect with --proximal_policy recompute"
                f"{'' if loss.proximal_policy else f' (the default of {loss.loss_calculator})'}, "
                "where the ratio is always 1; leave it out, or give --proximal_policy behaviour"
                f"{' or --strict_in_bound true' if alone else ''} too"
            )


def _given(config: Config) -> Iterator[tuple[str, str]]:
    """The name and text of each flag that may have no effect, if its value is not its default.

    What is switched off counts as not given, also where its default is that of a loss.
    """
    groups = (config.run, config.loss, config.critic, config.model, config.sampling, config.agent)
    for group in groups:
        for item in fields(group):
            value = getattr(group, item.name)
            if value != item.default and value is not False:
                yield item.name, written(value)
