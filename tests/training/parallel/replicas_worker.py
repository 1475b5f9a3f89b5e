"""A launched learner on two replicas whose reductions over replicas are counted.

    accelerate launch ... --num_processes 2 replicas_worker.py OUT

OUT/result.json: of each step the FSDP units that reduced and the backward passes; and whether a
step after one that was left half way was as if none was left. OUT/untied.pt: what `run` gives.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tiny`

import torch
import torch.distributed as dist
from accelerate import Accelerator
from parallel_cases import CASES, run
from tiny import sequences_of
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from agentrl.configs import ParallelConfig
from agentrl.training.data.planner import assign_rows
from agentrl.training.parallel import Mesh, exit_process, make_mesh
from agentrl.training.run.drain import StepLeft
from agentrl.training.step.learner import Learner

CASE = CASES["untied"]


class Counts:
    """Stands for FSDP's `torch.distributed`, and counts its reductions over replicas."""

    def __init__(self) -> None:
        self.reductions = self.passes = 0

    def all_reduce(self, *args: Any, **kwargs: Any) -> object:
        self.reductions += 1
        return dist.all_reduce(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def on_pass(self) -> None:
        self.passes += 1


def step(learner: Learner, mesh: Mesh, counts: Counts, leave: bool = False) -> None:
    """A step on this rank's rows; `leave`: after its first pass."""
    mine = assign_rows([row.cost for row in CASE.rows], mesh.dp_size)
    sequences = [sequences_of(CASE.rows[index], 0) for index in mine[mesh.dp_rank]]

    def between_passes() -> None:
        counts.on_pass()
        if leave:
            raise StepLeft

    try:
        learner.step(sequences, between_passes)
    except StepLeft:
        learner.leave_step()


def main(out: Path) -> None:
    """Two learners take the same steps, of which one leaves a step in between."""
    accelerator = Accelerator(cpu=True)
    mesh = make_mesh(accelerator, ParallelConfig(dp_replicate_size=2))
    learner, straight = (Learner(CASE.model(), mesh, CASE.config, 2) for _ in range(2))
    units = sum(isinstance(module, FSDPModule) for module in learner.model.modules())
    counted = []
    for number in range(2):
        counts = Counts()
        with patch.object(_fsdp_collectives, "dist", counts):
            step(learner, mesh, counts)
        counted.append({"reductions": counts.reductions, "passes": counts.passes})
        step(straight, mesh, Counts())
        if number == 0:
            step(learner, mesh, Counts(), leave=True)
    same = all(
        torch.equal(ours.to_local(), theirs.to_local())  # type: ignore[attr-defined]
        for ours, theirs in zip(
            learner.model.parameters(), straight.model.parameters(), strict=True
        )
    )
    outcome = run(CASE, mesh)
    if accelerator.is_main_process:
        torch.save(asdict(outcome), out / "untied.pt")
        result = {"steps": counted, "units": units, "as_if_none_was_left": same}
        (out / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_process(0)
