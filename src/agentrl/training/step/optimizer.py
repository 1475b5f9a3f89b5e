"""AdamW and its learning-rate schedule, by the names of transformers.TrainingArguments.

A checkpoint has the optimizer's moments and the position in the schedule. All other settings come
from the present flags when a checkpoint is loaded.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from agentrl.configs import ConfigError, OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over all trained parameters; weight decay on matrices only, as is usual."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_epsilon,
        fused=True,
    )


def make_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int
) -> LambdaLR:
    """The schedule `lr_scheduler_type` over `total_steps` optimizer steps, with linear warm-up.

    Raises `ConfigError` for `lr_scheduler_kwargs` that the schedule does not take.
    """
    steps = config.warmup_steps
    try:
        scheduler: LambdaLR = get_scheduler(
            config.lr_scheduler_type,
            optimizer,
            num_warmup_steps=math.ceil(total_steps * steps) if steps < 1 else int(steps),
            num_training_steps=total_steps,
            scheduler_specific_kwargs=json.loads(config.lr_scheduler_kwargs),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"--lr_scheduler_kwargs {config.lr_scheduler_kwargs}: not taken by "
            f"--lr_scheduler_type {config.lr_scheduler_type} ({error})"
        ) from None
    return scheduler


def missing_moments(optimizer: AdamW) -> Iterator[list[Tensor]]:
    """Make the state that the first update would make, and yield that of each parameter.

    `get_state_dict` makes it by an update, for which the weights must be on the device, and which
    counts as one in the state.
    """
    if optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            }
            yield list(optimizer.state[parameter].values())


def load_optimizer(
    model: nn.Module,
    optimizer: AdamW,
    scheduler: LambdaLR,
    state: dict[str, Any],
    *,
    strict: bool = True,
) -> None:
    """Load weights, moments and the position in the schedule. Other settings stay. Collective.

    `strict`: whether `state` must have all weights.
    """
    given = [_settings(group) for group in optimizer.param_groups]
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=strict),
    )
    for group, settings in zip(optimizer.param_groups, given, strict=True):
        group.update(settings)
    _go_to(scheduler, state["scheduler"]["last_epoch"])


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _go_to(scheduler: LambdaLR, step: int) -> None:
    """Set the schedule to its position after `step` steps."""
    state = {**scheduler.state_dict(), "last_epoch": step, "_step_count": step + 1}
    rates = [
        base * factor(step)
        for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    scheduler.load_state_dict({**state, "_last_lr": rates})
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
