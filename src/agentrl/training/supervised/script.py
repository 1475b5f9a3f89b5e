"""Supervised training for scripts that hold their rows in memory."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedModel

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, OptimizerConfig
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.planner import assign_rows
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.parallel import make_mesh
from agentrl.training.step.learner import Learner
from agentrl.training.step.statistics import StepStatistics
from agentrl.training.supervised.order import RowOrder

COMPUTE = ComputeConfig(micro_batch_tokens=8192, loss_seq_chunk_size=4096)


@dataclass(frozen=True)
class SupervisedRow:
    """A demonstration of L tokens: `loss_mask` is 1 on those to learn, 0 on the others."""

    input_ids: Sequence[int]
    loss_mask: Sequence[int]


def train_supervised(
    model: PreTrainedModel,
    rows: Sequence[SupervisedRow],
    *,
    steps: int,
    rows_per_step: int,
    optimizer: OptimizerConfig,
    compute: ComputeConfig = COMPUTE,
    seed: int = 0,
    on_step: Callable[[int, StepStatistics], None] | None = None,
) -> None:
    """Train `model`, in float32, on `rows` for `steps` optimizer steps of `rows_per_step` rows.

    The loss is the mean over the step's trained tokens. Rows are shuffled by `seed` in each epoch.
    `on_step(step, statistics)` is called after each step, counted from 1. `model` gets the trained
    weights at the end. Processes that were launched together must all call this with the same
    arguments; they share each step. Raises `ValueError` for a row that trains no token.
    """
    sequences = [_sequence(index, row) for index, row in enumerate(rows)]
    config = LearnerConfig(compute, LossConfig(loss_calculator="CrossEntropy"), optimizer)
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    mesh = make_mesh(accelerator)
    # Sharding cannot be undone, so a copy is sharded and the caller keeps a plain model.
    learner = Learner(copy.deepcopy(model), mesh, config, steps)
    order = RowOrder(len(rows), seed)
    for step in range(1, steps + 1):
        batch = order.step(step, rows_per_step)
        costs = [float(len(sequences[index])) for index in batch]
        mine = assign_rows(costs, mesh.dp_size)[mesh.dp_rank]
        statistics = learner.step([[sequences[batch[index]]] for index in mine])
        if on_step is not None:
            on_step(step, statistics)
    trained = get_model_state_dict(learner.model, options=StateDictOptions(full_state_dict=True))
    model.load_state_dict(trained)


def _sequence(index: int, row: SupervisedRow) -> TrainingSequence:
    length = len(row.input_ids)
    mask = np.array(row.loss_mask, dtype=np.bool_)
    if len(mask) != length:
        raise ValueError(f"row {index}: {length} tokens and a loss mask of {len(mask)}")
    mask[:1] = False  # nothing predicts the first token
    if not mask.any():
        raise ValueError(f"row {index}: no token after the first has loss_mask 1")
    return TrainingSequence(
        TokenTree.line(row.input_ids, mask=mask, advantages=1.0),
        temperature=1.0,
        row_tokens=int(mask.sum()),
    )
