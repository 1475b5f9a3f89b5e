"""What learns: the sharded policy with its optimizer and schedule.

A step changes these and a checkpoint keeps them (`Learner.state_dict`). Not in here: rows, ledger,
publication; the trainer and supervised training bring rows and say when.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from transformers import PreTrainedModel

from agentrl.configs import LossConfig, ModelConfig, OptimizerConfig
from agentrl.training.loading import fill
from agentrl.training.objective import Objective
from agentrl.training.optimizer import make_optimizer, make_scheduler
from agentrl.training.parallel import Mesh, parallelise
from agentrl.training.sequences import TrainingSequence
from agentrl.training.statistics import StepStatistics
from agentrl.training.step import StepOptions, train_step


class Learner:
    """The policy in training. Every rank makes one and makes the same calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        mesh: Mesh,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        options: StepOptions,
        total_steps: int,
        *,
        start: ModelConfig | None = None,
        bf16: bool = False,
        gradient_checkpointing: bool = False,
        activation_offloading: bool = False,
        param_offload: bool = False,
        compiled: bool = False,
        trees: bool = True,
    ) -> None:
        """Shards `model`, which holds float32 weights, the same on every rank, in place.

        With `start` the model is an `empty_model` and gets its weights from there once sharded.
        Raises `ConfigError` if the model cannot be divided as `mesh` asks, `RuntimeError` if the
        sharding is not what was asked for.
        """
        parallelise(
            model,
            mesh,
            bf16=bf16,
            gradient_checkpointing=gradient_checkpointing,
            activation_offloading=activation_offloading,
            param_offload=param_offload,
            compiled=compiled,
            trees=trees,
        )
        if start is not None:
            fill(model, start, mesh, torch.device("cpu") if param_offload else mesh.device)
        self.model = model
        self.mesh = mesh
        self.optimizer = make_optimizer(model, optimizer)
        self.scheduler = make_scheduler(self.optimizer, optimizer, total_steps)
        self._objective = Objective(loss)
        self._options = options

    def step(self, rows: Sequence[Sequence[TrainingSequence]]) -> StepStatistics:
        """Train on this rank's rows, each as its sequences, and update the weights once."""
        return train_step(
            self.model, self.optimizer, self.scheduler, rows, self._objective, self._options,
            self.mesh,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint must hold for training to go on; sharded, not copied. Collective.

        The weights are under `model`, by their names in the model; of a model with an adapter the
        adapter only, all else being as the model's folder has it.
        """
        model, optimizer = get_state_dict(self.model, self.optimizer)
        named = self.model.named_parameters(remove_duplicate=False)
        for name in [name for name, parameter in named if not parameter.requires_grad]:
            del model[name]
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` of a learner of the same model gave. Collective."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=False),  # what is not trained is not in it
        )
        self.scheduler.load_state_dict(state["scheduler"])
