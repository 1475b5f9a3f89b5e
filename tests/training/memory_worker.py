"""Two steps of a tiny model by each way of saving memory; in one process, or launched in several.

    accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes N memory_worker.py OUT

Rank 0 writes OUT/result.json: by the name of the way, what `train` returned.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tiny import linear_rows, sequences_of, tiny_model

from agentrl.configs import ComputeConfig, LearnerConfig, LoraConfig, LossConfig, OptimizerConfig
from agentrl.training.data.planner import assign_rows
from agentrl.training.model.lora import add_adapter
from agentrl.training.model.weight_gathering import WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.step.learner import Learner

LORA = LoraConfig(lora_rank=4, lora_alpha=8)
STEPS = 2
WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "checkpointing": {"gradient_checkpointing": True},
    "activation_offloading": {"activation_offloading": True},
    "both": {"gradient_checkpointing": True, "activation_offloading": True},
    "param_offload": {"param_offload": True},
    "bf16": {"bf16": True},
    "fp32_head": {"bf16": True, "fp32_head": True},
    "bf16_all": {
        "bf16": True,
        "gradient_checkpointing": True,
        "activation_offloading": True,
        "param_offload": True,
    },
    "lora": {"lora": True},
    "lora_all": {
        "lora": True,
        "gradient_checkpointing": True,
        "activation_offloading": True,
        "param_offload": True,
    },
    "lora_bf16": {"lora": True, "bf16": True},
}


def make_learner(*, lora: bool = False, bf16: bool = False, **ways: bool) -> Learner:
    """A learner of the tiny model by the given ways."""
    model = tiny_model()
    if lora:
        torch.manual_seed(1)
        add_adapter(model, LORA, frozen_dtype=torch.bfloat16 if bf16 else torch.float32)
    return Learner(
        model,
        make_mesh(Accelerator(cpu=True)),
        LearnerConfig(
            ComputeConfig(bf16=bf16, micro_batch_tokens=96, loss_seq_chunk_size=32, **ways),
            LossConfig(log_entropy=True),
            OptimizerConfig(learning_rate=1e-2, weight_decay=0.01),
        ),
        STEPS,
    )


def train(learner: Learner) -> list[dict[str, Any]]:
    """What each step said."""
    rows = linear_rows(6)
    mine = assign_rows([row.cost for row in rows], dist.get_world_size())[dist.get_rank()]
    sequences = [sequences_of(rows[index]) for index in mine]
    return [asdict(learner.step(sequences)) for _ in range(STEPS)]


def main(out: Path) -> None:
    results = {}
    for name, ways in WAYS.items():
        learner = make_learner(**ways)
        steps = train(learner)
        weights = (
            WeightGatherer(learner.model, written_form(learner.model), torch.float32)
            .stage()
            .gather()
        )
        total = sum(float(weight.double().square().sum()) for weight in weights.values())
        results[name] = {"steps": steps, "square_of_weights": total}
    if dist.get_rank() == 0:
        (out / "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_process(0)
