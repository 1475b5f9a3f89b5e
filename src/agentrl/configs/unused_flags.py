"""Flags that have no effect: those of another loss, and those of a layer that is switched off.

A flag that has its default counts as not given.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from agentrl.configs.config import Config
from agentrl.configs.flag import ConfigError
from agentrl.configs.flags import written
from agentrl.configs.losses import unused_by
from agentrl.configs.training import LossConfig

_CLIP_RANGE = ("epsilon", "epsilon_higher")  # --strict_in_bound has it with every loss

# Flags that describe a layer, by the flag that switches the layer on.
_SWITCHES: Mapping[str, tuple[str, ...]] = {
    "beta": ("kl_estimator", "kl_in_advantage", "reference_model_name_or_path"),
    "rollout_rs": ("rollout_rs_threshold", "rollout_rs_threshold_lower"),
}


def check_unused(config: Config) -> None:
    """Raise `ConfigError` for a flag that is given and has no effect."""
    given = dict(_given(config))
    loss = config.loss.loss_calculator
    for name, users in unused_by(loss).items():
        if name in given and not _bounds_what_is_left_out(name, config.loss):
            raise ConfigError(
                f"--{name} {given[name]}: --loss_calculator {loss} does not use it, only "
                f"{', '.join(users)}; leave it out"
            )
    for switch, names in _SWITCHES.items():
        for name in names:
            if name in given and switch not in given:
                raise ConfigError(f"--{name} {given[name]}: has no effect without --{switch}")


def _bounds_what_is_left_out(name: str, loss: LossConfig) -> bool:
    return name in _CLIP_RANGE and loss.strict_in_bound


def _given(config: Config) -> Iterator[tuple[str, str]]:
    """The name and text of each flag of the trainer that has another value than its default."""
    for group in (config.loss, config.critic, config.model):
        for item in fields(group):
            value = getattr(group, item.name)
            if value != item.default:
                yield item.name, written(value)
