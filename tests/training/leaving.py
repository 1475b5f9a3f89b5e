"""A launched learner that leaves a step half way and saves what it had, for `test_leaving`.

    accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes N leaving.py OUT

OUT/result.json: for each pass after which a step was left, whether the weights were as before it
(a checkpoint of them is written); and whether the next step was as if none was left.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tiny import sequences_of, tiny_model
from worker import CONFIG, ROWS

from agentrl.training.checkpoint.layout import TrainerState, checkpoint_path
from agentrl.training.checkpoint.save import CheckpointSaver, check_files
from agentrl.training.data.planner import assign_rows
from agentrl.training.parallel import Mesh, exit_process, make_mesh
from agentrl.training.run.drain import StepLeft
from agentrl.training.step.learner import Learner


class LeavesAfter:
    """Raises after so many passes."""

    def __init__(self, passes: int) -> None:
        self.left = passes

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise StepLeft


def step(learner: Learner, mesh: Mesh, leaves: LeavesAfter) -> float | None:
    """The loss of a step on this rank's rows; None if it was left."""
    mine = assign_rows([row.cost for row in ROWS], mesh.dp_size)
    sequences = [sequences_of(ROWS[index], 0) for index in mine[mesh.dp_rank]]
    try:
        return learner.step(sequences, leaves).loss
    except StepLeft:
        learner.leave_step()
        return None


def weights_of(learner: Learner) -> list[torch.Tensor]:
    """A copy of this rank's shards."""
    return [parameter.detach().to_local().clone() for parameter in learner.model.parameters()]  # type: ignore[attr-defined]


def main(out: Path) -> None:
    """Leave steps after each of their passes, and then take one."""
    accelerator = Accelerator(cpu=True)
    mesh = make_mesh(accelerator)
    learner, straight = (Learner(tiny_model(), mesh, CONFIG, 3) for _ in range(2))
    saver = CheckpointSaver(out, None, hold=lambda: None)
    for each in (learner, straight):  # so that there is an optimizer's state too
        step(each, mesh, LeavesAfter(0))
    before = weights_of(learner)
    unchanged, passes = [], 0
    while step(learner, mesh, LeavesAfter(passes + 1)) is None:
        passes += 1
        same = all(map(torch.equal, before, weights_of(learner)))
        unchanged.append(same)
        state = TrainerState(passes, 0, "leaving", {}, fence=1, processes=dist.get_world_size())
        saver.save(learner, state)
        saver.wait()
        check_files(checkpoint_path(out, passes))
    step(straight, mesh, LeavesAfter(0))
    alike = [
        torch.allclose(one, other, rtol=1e-5, atol=1e-7)
        for one, other in zip(weights_of(learner), weights_of(straight), strict=True)
    ]
    if accelerator.is_main_process:
        result = {"unchanged": unchanged, "as_if_none_was_left": all(alike)}
        (out / "result.json").write_text(json.dumps(result))
    saver.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_process(0)
