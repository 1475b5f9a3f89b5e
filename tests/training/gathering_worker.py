"""A launched process that publishes weights while it trains, and finds out what that costs.

    MALLOC_MMAP_THRESHOLD_=65536 \\
    accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes 2 gathering_worker.py OUT

Each process writes what it found to OUT/RANK.json.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from peak_memory import MemoryWatch
from tiny import linear_rows, sequences_of
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, OptimizerConfig
from agentrl.training.model.weight_gathering import GatherStalled, StagedWeights, WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.step.learner import Learner
from agentrl.training.step.schedule import go_on

# 4 million parameters, nearly all of them in one matrix of 16 MiB in float32
CONFIG = Qwen3Config(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=32, vocab_size=1 << 16, tie_word_embeddings=True,
)  # fmt: skip
COPY_S = 0.7
TIMEOUT_S = 1.0


def main(out: Path) -> None:
    mesh = make_mesh(Accelerator(cpu=True))
    torch.manual_seed(0)
    config = LearnerConfig(
        ComputeConfig(micro_batch_tokens=96, loss_seq_chunk_size=32),
        LossConfig(),
        OptimizerConfig(learning_rate=1e-2),
    )
    learner = Learner(Qwen3ForCausalLM(CONFIG), mesh, config, 10)
    form = written_form(learner.model)
    gatherer = WeightGatherer(
        learner.model, form, torch.bfloat16, learner.optimizer, timeout_s=TIMEOUT_S
    )
    rows = linear_rows(4)[dist.get_rank() :: 2]

    def step(between_passes: Callable[[], None] = go_on) -> None:
        learner.step([sequences_of(row) for row in rows], between_passes)

    step()
    found = train_meanwhile(learner, gatherer, step)
    found |= peak(gatherer, mesh.device)
    found |= fail(gatherer)
    found |= hang(WeightGatherer(learner.model, form, torch.bfloat16, timeout_s=TIMEOUT_S))
    (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def train_meanwhile(
    learner: Learner, gatherer: WeightGatherer, step: Callable[..., None]
) -> dict[str, Any]:
    """Two steps between the begin of a publication and its gathering.

    Its copy begins when the first of them has a gradient, and is slow.
    """
    before = whole(learner)
    copy, computed = StagedWeights._copy, threading.Event()

    def copy_slowly(self: StagedWeights, *args: Any) -> None:
        computed.wait()
        time.sleep(COPY_S)
        copy(self, *args)

    StagedWeights._copy = copy_slowly  # type: ignore[method-assign]
    began = time.monotonic()
    staged = gatherer.stage()
    begun_s = time.monotonic() - began
    step(computed.set)
    step()
    StagedWeights._copy = copy  # type: ignore[method-assign]
    after = whole(learner)
    published = staged.gather()
    return {
        "begun_s": begun_s,
        "waited_s": gatherer.waited_seconds(),
        "published": sorted(published),
        "wrong": [n for n, weight in published.items() if not torch.equal(weight, before[n])],
        "unchanged": [n for n, weight in before.items() if torch.equal(weight, after[n])],
    }


def whole(learner: Learner) -> dict[str, Tensor]:
    """The weights as they are to be published."""
    return {
        name: parameter.full_tensor().bfloat16().clone()
        for name, parameter in learner.model.named_parameters()
    }


def peak(gatherer: WeightGatherer, device: torch.device) -> dict[str, int]:
    """How far a publication raises the memory of this process, in bytes."""
    watch = MemoryWatch(device)
    watch.mark()
    weights = gatherer.stage().gather()
    dist.barrier()
    return {"peak": watch.peak(), "size": sum(weight.nbytes for weight in weights.values())}


def fail(gatherer: WeightGatherer) -> dict[str, Any]:
    """A publication of which process 1 cannot copy its part."""
    copy = StagedWeights._copy

    def run_out(self: StagedWeights, *args: Any) -> None:
        raise MemoryError("no pinned memory is left")

    if dist.get_rank() == 1:
        StagedWeights._copy = run_out  # type: ignore[method-assign]
    began = time.monotonic()
    staged = gatherer.stage()
    try:
        staged.gather()
        failure = ""
    except (GatherStalled, MemoryError) as error:
        failure = str(error)
    StagedWeights._copy = copy  # type: ignore[method-assign]
    return {"failure": failure, "failed_s": time.monotonic() - began}


def hang(gatherer: WeightGatherer) -> dict[str, str]:
    """A publication to which process 1 sends nothing."""
    said = ""
    if dist.get_rank() == 0:
        try:
            gatherer.stage().gather()
        except GatherStalled as error:
            said = str(error)
    dist.barrier()
    return {"said": said}


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
    exit_process(0)
