"""A launched process that takes each step of a training in another arrangement.

    accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes 4 resume_worker.py OUT

The checkpoints are in OUT/CASE, and the gradient norms in OUT/CASE.json.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tiny`

import torch.distributed as dist
from accelerate import Accelerator
from resume_cases import ARRANGEMENTS, step_from_checkpoint

from agentrl.training.parallel import exit_process, make_mesh


def main(out: Path) -> None:
    """All cases, one after the other."""
    accelerator = Accelerator(cpu=True)
    for case, arrangements in ARRANGEMENTS.items():
        norms = [
            step_from_checkpoint(case, make_mesh(accelerator, config), out / case, step)
            for step, config in enumerate(arrangements, start=1)
        ]
        if accelerator.is_main_process:
            (out / f"{case}.json").write_text(json.dumps(norms))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_process(0)
