"""One process of two that would train a model wrongly, and is refused.

    accelerate launch ... --num_processes 2 refused_worker.py OUT

Some of the model's gradients are whole on each process and others are partial, in one weight, and
its plan does not say so. OUT/sentence: the refusal.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tiny`

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tiny import VOCABULARY, random_model
from transformers import DeepseekV2Config

from agentrl.configs import ComputeConfig, ConfigError, LearnerConfig, ParallelConfig
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.step.learner import Learner


def main(out: Path) -> None:
    """Make a learner of it."""
    torch.set_num_threads(1)
    mesh = make_mesh(Accelerator(cpu=True), ParallelConfig(tp_size=2))
    config = DeepseekV2Config(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=VOCABULARY, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, initializer_range=0.2,
    )  # fmt: skip
    plan = config.base_model_tp_plan
    config.base_model_tp_plan = {
        name: style for name, style in plan.items() if style != "mla_kv_a_proj"
    }
    assert len(config.base_model_tp_plan) < len(plan)
    model = random_model(config)
    try:
        Learner(model, mesh, LearnerConfig(ComputeConfig(micro_batch_tokens=96)), 1)
    except ConfigError as error:
        if mesh.is_first_of_rows:
            (out / "sentence").write_text(str(error))
    dist.barrier()
    dist.destroy_process_group()
    exit_process(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
