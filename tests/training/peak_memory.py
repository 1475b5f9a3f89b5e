"""The peak memory of a step, and what the memory model expects of it.

On CUDA it is what tensors take on the device. On a CPU it is what the kernel counts for the
process, which needs MALLOC_MMAP_THRESHOLD_=65536, so that glibc returns what is freed.
"""

import gc
from pathlib import Path

import torch
from tiny import make_row, sequences_of
from transformers import PreTrainedModel

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig
from agentrl.training.model.memory_model import MemorySetup, estimate
from agentrl.training.model.memory_report import shape_of
from agentrl.training.parallel import Mesh
from agentrl.training.step.learner import Learner


class MemoryWatch:
    """The memory of this process on a device, above what it has now."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        self._cuda = device.type == "cuda"
        self._before = self._now()
        self._states = self._resting = 0

    def mark(self) -> None:
        """What is held now stays; the peak counts from here."""
        gc.collect()
        self._states = self._now() - self._before
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")
            self._resting = _status("VmRSS")

    def peak(self) -> int:
        """Bytes at the highest point since the mark."""
        if self._cuda:
            return torch.cuda.max_memory_allocated() - self._before
        return self._states + _status("VmHWM") - self._resting

    def _now(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else _status("RssAnon")


def step_peak(watch: MemoryWatch, model: PreTrainedModel, mesh: Mesh, setup: MemorySetup) -> int:
    """Peak bytes of a step by `setup`, on one row of as many tokens. Collective.

    `watch` was made before the model. The model is sharded in place.
    """
    learner = Learner(
        model,
        mesh,
        LearnerConfig(
            ComputeConfig(
                bf16=setup.bf16,
                fp32_head=setup.fp32_head,
                gradient_checkpointing=setup.checkpointing,
                activation_offloading=setup.activation_offloading,
                param_offload=setup.param_offload,
                micro_batch_tokens=setup.tokens,
                loss_seq_chunk_size=setup.chunk,
            ),
            LossConfig(log_entropy=setup.entropy),
        ),
        2,
    )
    row = make_row("row", mesh.dp_rank, [(0, setup.tokens + 1, -1)])
    learner.step([sequences_of(row)])  # the optimizer has its state from here on
    watch.mark()
    learner.step([sequences_of(row)])
    return watch.peak()


def expected_peak(model: PreTrainedModel, setup: MemorySetup) -> int:
    """Peak bytes by the memory model."""
    return estimate(shape_of(model), setup).peak


def _status(key: str) -> int:
    """A figure of this process in bytes, as the kernel counts it."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024
