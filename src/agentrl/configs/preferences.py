"""How `agentrl dpo` compares the two answers of a pair. Names and values are those of TRL."""

from dataclasses import dataclass

from agentrl.configs.flag import ConfigError

LOSS_TYPES = ("sigmoid", "ipo", "hinge", "robust", "sppo_hard")


@dataclass(frozen=True)
class PreferenceConfig:
    """The preference loss; `training.losses.preference` has the formula of each type.

    beta: how far the policy may go from the reference; a larger value keeps it closer
    label_smoothing: the share of pairs that are taken to be the wrong way round, of `robust`
    precompute_ref_log_probs: whether the reference is computed once, before the first step; None:
        where training goes through its pairs more than once

    Raises `ConfigError` for values that are out of range or have no effect.
    """

    loss_type: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    precompute_ref_log_probs: bool | None = None

    def __post_init__(self) -> None:
        if self.loss_type not in LOSS_TYPES:
            raise ConfigError(f"--loss_type {self.loss_type}: is none of {', '.join(LOSS_TYPES)}")
        if self.beta <= 0:
            raise ConfigError(
                f"--beta {self.beta:g}: must be above 0, because the reference would not count"
            )
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"--label_smoothing {self.label_smoothing:g}: must be at least 0 and below 0.5, "
                "where a pair says nothing"
            )
        if self.label_smoothing and self.loss_type != "robust":
            raise ConfigError(
                f"--label_smoothing {self.label_smoothing:g}: --loss_type {self.loss_type} does "
                "not use it, only robust; leave it out"
            )
