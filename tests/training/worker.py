"""A launched process of the trainer's core: three steps on the rows of `tiny`, without a database.

    accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes N worker.py OUT

Rank 0 writes what each step gave to OUT/result.json; after the second step all save a checkpoint,
while the third goes on, and after the third the weights, as a model folder.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tiny import linear_rows, make_row, sequences_of, tiny_model, write_tiny_folder
from transformers import AutoTokenizer

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, OptimizerConfig
from agentrl.training.checkpoint.layout import TrainerState
from agentrl.training.checkpoint.save import CheckpointSaver
from agentrl.training.data.planner import assign_rows
from agentrl.training.model.model_folder import save_model_folder
from agentrl.training.model.weight_gathering import WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.step.learner import Learner

CONFIG = LearnerConfig(
    ComputeConfig(micro_batch_tokens=96, loss_seq_chunk_size=32),
    LossConfig(token_level_loss=False, entropy_coef=0.01, normalize_advantages=True),
    OptimizerConfig(
        learning_rate=1e-2, lr_scheduler_type="linear", weight_decay=0.01, log_grad_norms=True
    ),
)
STEPS = 3
ROWS = [
    *linear_rows(10),
    make_row("tree", 10, [(0, 10, -1), (10, 20, 0), (20, 25, 1), (25, 32, 1), (32, 38, 0)]),
    # more than a micro-batch on one prompt; two processes have different shares of it
    *(make_row(f"sibling-{n}", 11, [(0, 90 + 3 * n, -1)], prompt=70) for n in range(5)),
]


def main(out: Path) -> None:
    """Three steps of the same rows; the second is one row only, which leaves ranks without any."""
    accelerator = Accelerator(cpu=True)
    mesh = make_mesh(accelerator)
    learner = Learner(tiny_model(), mesh, CONFIG, STEPS)
    saver = CheckpointSaver(out, None, hold=lambda: None)
    results = []
    for step in range(1, STEPS + 1):
        rows = ROWS[:1] if step == 2 else ROWS
        mine = assign_rows([row.cost for row in rows], mesh.dp_size)
        sequences = [sequences_of(rows[index], step - 1) for index in mine[mesh.dp_rank]]
        results.append(learner.step(sequences))
        if step == 2:
            processes = dist.get_world_size()
            state = TrainerState(2, 2, "worker", {}, fence=3, processes=processes)
            saver.save(learner, state)
    if accelerator.is_main_process:
        write_tiny_folder(out / "base")
        (out / "result.json").write_text(json.dumps([asdict(result) for result in results]))
    saver.close()
    dist.barrier()
    form = written_form(learner.model)
    weights = WeightGatherer(learner.model, form, torch.float32).stage().gather()
    if weights:
        tokenizer = AutoTokenizer.from_pretrained(out / "base")
        save_model_folder(form, tokenizer, weights, out / "weights", torch.float32)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_process(0)
