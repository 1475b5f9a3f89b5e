"""A launched process that trains each case on each arrangement of its number of processes.

    accelerate launch ... --num_processes N parallel_worker.py OUT [ARRANGEMENT-CASE ...]

Rank 0 writes what came of them, or of those named, to OUT/ARRANGEMENT-CASE.pt.
"""

import sys
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tiny`

import torch
import torch.distributed as dist
from accelerate import Accelerator
from parallel_cases import ARRANGEMENTS, CASES, run

from agentrl.training.parallel import exit_process, make_mesh


def main(out: Path, names: Collection[str]) -> None:
    """The arrangements and cases of `names`, or all, one after the other."""
    accelerator = Accelerator(cpu=True)
    for arrangement, (config, cases) in ARRANGEMENTS[accelerator.num_processes].items():
        mesh = make_mesh(accelerator, config)
        for case in cases:
            if names and f"{arrangement}-{case}" not in names:
                continue
            outcome = run(CASES[case], mesh)
            if accelerator.is_main_process:
                torch.save(asdict(outcome), out / f"{arrangement}-{case}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    exit_process(0)
