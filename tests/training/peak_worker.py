"""A launched process that measures the peak memory of steps and says what the model of it expects.

    MALLOC_MMAP_THRESHOLD_=65536 \\
    accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes N peak_worker.py OUT

Rank 0 writes OUT/result.json: by case, measured and expected bytes.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from peak_memory import MemoryWatch, expected_peak, step_peak
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.configs import ParallelConfig
from agentrl.training.model.memory_model import MemorySetup
from agentrl.training.parallel import exit_process, make_mesh

# 17 million parameters: 64 MiB in float32
CONFIG = Qwen3Config(
    hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, vocab_size=8192, tie_word_embeddings=True,
)  # fmt: skip
CASES: dict[int, dict[str, tuple[ParallelConfig, MemorySetup]]] = {
    1: {
        "plain": (ParallelConfig(), MemorySetup(1024, chunk=256)),
        "checkpointing": (ParallelConfig(), MemorySetup(2048, chunk=256, checkpointing=True)),
        "entropy": (
            ParallelConfig(),
            MemorySetup(1024, chunk=512, entropy=True, checkpointing=True),
        ),
        "bf16": (ParallelConfig(), MemorySetup(512, chunk=256, bf16=True)),
    },
    2: {
        "sharded": (ParallelConfig(), MemorySetup(1024, chunk=256, fsdp=2, checkpointing=True)),
        "context": (
            ParallelConfig(cp_size=2),
            MemorySetup(2048, chunk=256, fsdp=2, cp=2, checkpointing=True),
        ),
        "tensor": (
            ParallelConfig(tp_size=2),
            MemorySetup(1024, chunk=256, tp=2, checkpointing=True),
        ),
    },
}


def main(out: Path) -> None:
    accelerator = Accelerator(cpu=True)
    results = {}
    for name, (parallel, setup) in CASES[accelerator.num_processes].items():
        mesh = make_mesh(accelerator, parallel)
        watch = MemoryWatch(mesh.device)
        model = Qwen3ForCausalLM(CONFIG)
        expected = expected_peak(model, setup)
        results[name] = [step_peak(watch, model, mesh, setup), expected]
        del model
    if accelerator.is_main_process:
        (out / "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    exit_process(0)
