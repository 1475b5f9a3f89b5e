"""A launched process that measures the peak memory of steps and says what the model of it expects.

    MALLOC_MMAP_THRESHOLD_=65536 \\
    accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes N peak_worker.py OUT

Rank 0 writes OUT/result.json: by case, measured and expected bytes.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tiny import make_row, sequences_of
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.configs import (
    ComputeConfig,
    LearnerConfig,
    LossConfig,
    ParallelConfig,
)
from agentrl.training.model.memory_model import MemorySetup, estimate
from agentrl.training.model.memory_report import shape_of
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.step.learner import Learner

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
        gc.collect()
        before = _status("RssAnon")
        model = Qwen3ForCausalLM(CONFIG)
        expected = estimate(shape_of(model), setup).peak
        learner = Learner(
            model,
            mesh,
            LearnerConfig(
                ComputeConfig(
                    bf16=setup.bf16,
                    gradient_checkpointing=setup.checkpointing,
                    micro_batch_tokens=setup.tokens,
                    loss_seq_chunk_size=setup.chunk,
                ),
                LossConfig(log_entropy=setup.entropy),
            ),
            2,
        )
        row = make_row(name, mesh.dp_rank, [(0, setup.tokens + 1, -1)])
        learner.step([sequences_of(row)])  # the optimizer has its state from here on
        gc.collect()
        states = _status("RssAnon") - before
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from now
        resting = _status("VmRSS")
        learner.step([sequences_of(row)])
        results[name] = [states + _status("VmHWM") - resting, expected]
        del model, learner
    if accelerator.is_main_process:
        (out / "result.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _status(key: str) -> int:
    """A figure of this process in bytes, as the kernel counts it."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    exit_process(0)
