"""Loss functions by their names in `--loss_calculator`, and from a user's file."""

from importlib import import_module

import torch

from agentrl.configs import LossConfig
from agentrl.configs.flag import ConfigError, is_function
from agentrl.configs.losses import LOSSES
from agentrl.configs.user_module import load_user_function
from agentrl.foreign_text import error_line
from agentrl.training.losses.inputs import (
    LossFunction,
    LossInputs,
    Scope,
    TokenLoss,
    scope_of,
)


def _named(function: str) -> LossFunction:
    """Import the function that `LOSSES` names as `file.function` of this package."""
    file, _, name = function.rpartition(".")
    found: LossFunction = getattr(import_module(f"{__package__}.{file}"), name)
    return found


LOSS_FUNCTIONS: dict[str, LossFunction] = {
    name: _named(defaults.function) for name, defaults in LOSSES.items()
}


def loss_function(config: LossConfig) -> LossFunction:
    """The function that `--loss_calculator` names.

    Raises `ConfigError` if the user's file or function cannot be used.
    """
    if not is_function(config.loss_calculator):
        return LOSS_FUNCTIONS[config.loss_calculator]
    function: LossFunction = load_user_function(config.loss_calculator, "loss_calculator")
    _check(function, config)
    return function


def _check(function: LossFunction, config: LossConfig) -> None:
    """Try a user's loss on some tokens before the run, its declared scope included.

    A loss that uses more of the batch than it declares would depend on the split of the batch.
    """
    flag = f"--loss_calculator {config.loss_calculator}"
    whole = _example(rows=3)
    try:
        loss = function(whole, config)
    except Exception as error:
        raise ConfigError(f"{flag} fails: {error_line(error)}") from error
    if not isinstance(loss, TokenLoss) or loss.token_losses.shape != whole.logprobs.shape:
        raise ConfigError(
            f"{flag}: must return a TokenLoss whose token_losses have the shape of logprobs"
        )
    if not loss.token_losses.requires_grad:
        raise ConfigError(f"{flag}: its token_losses carry no gradient to logprobs")
    said = scope_of(function)
    if said is Scope.BATCH:
        return
    unit = whole.sequence if said is Scope.SEQUENCE else torch.arange(len(whole.sequence))
    for number in unit.unique().tolist():
        here = unit == number
        alone = function(_part(whole, here), config).token_losses
        if not torch.allclose(alone, loss.token_losses[here], rtol=1e-4, atol=1e-5, equal_nan=True):
            more = "SEQUENCE or BATCH" if said is Scope.TOKEN else "BATCH"
            raise ConfigError(
                f"{flag}: a token's term depends on other tokens, so decorate the function with "
                f"@depends_on(Scope.{more})"
            )


def _example(rows: int) -> LossInputs:
    """Example rows with tokens on and off policy, and all optional inputs."""
    generator = torch.Generator().manual_seed(0)
    sequence = torch.arange(rows).repeat_interleave(4)
    n = len(sequence)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(n, generator=generator) * (high - low) + low

    return LossInputs(
        logprobs=uniform(-3.0, -0.1).requires_grad_(),
        behaviour_logprobs=uniform(-3.0, -0.1),
        advantages=uniform(-2.0, 2.0),
        mask=torch.ones(n, dtype=torch.bool),
        staleness=torch.arange(n) % 3,
        sequence_tokens=torch.full((n,), 4.0),
        sequence=sequence,
        entropy=uniform(0.1, 2.0),
        reference_logprobs=uniform(-3.0, -0.1),
        place=torch.arange(n) % 4,
    )


def _part(inputs: LossInputs, here: torch.Tensor) -> LossInputs:
    values = {name: value[here] for name, value in vars(inputs).items() if value is not None}
    return LossInputs(**values)
