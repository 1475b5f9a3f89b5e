"""One process of several that probe models in bfloat16."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from parallel_cases import CASES

from agentrl.configs import ComputeConfig
from agentrl.training.model.batch_form import BatchForm
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.step.probe import probe


def main(*cases: str) -> None:
    torch.set_num_threads(1)
    mesh = make_mesh(Accelerator(cpu=True))
    for case in cases:
        for fp32_head in (False, True):
            compute = ComputeConfig(bf16=True, fp32_head=fp32_head)
            model = CASES[case].model()
            prepare_model(model, mesh, compute)
            verdict = probe(model, mesh, compute, 200, trees=True)
            assert verdict.form is BatchForm.TREE, f"{case}: {verdict.sentence}"
            assert verdict.difference is not None and verdict.difference.gradient < 0.2
    dist.barrier()
    dist.destroy_process_group()
    exit_process(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
