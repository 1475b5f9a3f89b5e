"""Training that changes its arrangement of processes at every checkpoint."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from parallel_cases import CASES
from tiny import sequences_of

from agentrl.configs import ParallelConfig
from agentrl.training.checkpoint.layout import TrainerState, checkpoint_path
from agentrl.training.checkpoint.save import CheckpointSaver, load_checkpoint
from agentrl.training.data.planner import assign_rows
from agentrl.training.parallel import Mesh
from agentrl.training.step.learner import Learner

PROCESSES = 4
# By case: how its processes are arranged for each step; the one after is of one process.
ARRANGEMENTS = {
    "chains": (
        ParallelConfig(),
        ParallelConfig(tp_size=2),
        ParallelConfig(dp_replicate_size=2),
        ParallelConfig(cp_size=2, tp_size=2),
    ),
    "qwen3_moe": (
        ParallelConfig(ep_size=2),
        ParallelConfig(tp_size=2, ep_size=4),
        ParallelConfig(tp_size=2),
        ParallelConfig(dp_replicate_size=2, ep_size=2),
    ),
}


def total_steps(case: str) -> int:
    """Of a whole training: the schedule runs over them."""
    return len(ARRANGEMENTS[case]) + 1


def make_learner(case: str, mesh: Mesh, *, resumed: bool) -> Learner:
    """A learner before its first step; one that is to resume has other weights until it does."""
    chosen = CASES[case]
    model = chosen.model()
    if resumed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5)
    config = replace(chosen, gradient_checkpointing=False).config
    return Learner(model, mesh, config, total_steps(case))


def take_steps(case: str, learner: Learner, mesh: Mesh, steps: Sequence[int]) -> list[float]:
    """Train the case's rows in those steps; returns their gradient norms."""
    rows = CASES[case].rows
    mine = assign_rows([row.cost for row in rows], mesh.dp_size)[mesh.dp_rank]
    return [
        asdict(learner.step([sequences_of(rows[index], step) for index in mine]))["grad_norm"]
        for step in steps
    ]


def step_from_checkpoint(case: str, mesh: Mesh, out: Path, step: int) -> float:
    """Take the one step from the checkpoint before it and save the next; the gradient norm."""
    learner = make_learner(case, mesh, resumed=step > 1)
    if step > 1:
        load_checkpoint(checkpoint_path(out, step - 1), learner)
    (grad_norm,) = take_steps(case, learner, mesh, [step])
    saver = CheckpointSaver(out, None, hold=lambda: None)
    saver.save(learner, TrainerState(step, step, case, config={}, fence=1, processes=PROCESSES))
    saver.wait()
    saver.close()
    return grad_norm
