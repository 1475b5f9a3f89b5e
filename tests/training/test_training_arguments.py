"""Flags by the names of transformers.TrainingArguments, where they act."""

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import nn

from agentrl.configs import ConfigError, OptimizerConfig, parse_config
from agentrl.training.run.startup import make_accelerator
from agentrl.training.step.optimizer import make_optimizer, make_scheduler


def rates(steps: int, **flags: object) -> list[float]:
    """The learning rate of each of so many steps, of a largest one of 1."""
    config = OptimizerConfig(learning_rate=1.0, **flags)  # type: ignore[arg-type]
    optimizer = make_optimizer(nn.Linear(2, 2), config)
    scheduler = make_scheduler(optimizer, config, steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_a_warm_up_below_one_is_a_share_of_the_runs_steps() -> None:
    share = rates(10, warmup_steps=0.35, lr_scheduler_type="constant_with_warmup")
    assert share == pytest.approx([0.0, 0.25, 0.5, 0.75, *[1.0] * 6])  # 3.5 steps are 4
    assert rates(10, warmup_steps=4, lr_scheduler_type="constant_with_warmup") == share


def test_a_schedule_takes_its_arguments() -> None:
    # cosine from 1 to 0.1 over 4 steps: 0.1 + 0.9 * (1 + cos(pi t / 4)) / 2
    floor = '{"min_lr": 0.1}'
    found = rates(4, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs=floor)
    assert found == pytest.approx([1.0, 0.86820, 0.55, 0.23180], abs=1e-5)
    decay = '{"num_decay_steps": 2}'
    found = rates(4, lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs=decay)
    assert found == pytest.approx([1.0, 1.0, 1.0, 0.5])
    with pytest.raises(ConfigError, match="not taken by --lr_scheduler_type linear"):
        rates(4, lr_scheduler_type="linear", lr_scheduler_kwargs=floor)


def test_checkpoints_are_saved_every_so_many_steps_or_at_the_end_only() -> None:
    every = parse_config(["--save_steps", "3"]).checkpoint
    assert [step for step in range(1, 8) if every.is_due(step)] == [3, 6]
    last = parse_config(["--save_strategy", "no"]).checkpoint
    assert not any(last.is_due(step) for step in range(1, 8))


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("precision")
def test_processes_wait_as_long_and_multiply_as_the_flags_say() -> None:
    flags = ["--use_cpu", "--ddp_timeout", "7200", "--tf32", "true"]
    accelerator = make_accelerator(parse_config(flags))
    assert accelerator.init_handler is not None
    assert accelerator.init_handler.timeout == timedelta(seconds=7200)
    assert torch.get_float32_matmul_precision() == "high"
