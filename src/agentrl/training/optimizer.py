"""AdamW and its learning-rate schedule, by the names of transformers.TrainingArguments."""

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from agentrl.configs import OptimizerConfig


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
) -> LRScheduler:
    """The schedule `lr_scheduler_type` over `total_steps` optimizer steps, with linear warm-up."""
    scheduler: LRScheduler = get_scheduler(
        config.lr_scheduler_type,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=total_steps,
    )
    return scheduler
