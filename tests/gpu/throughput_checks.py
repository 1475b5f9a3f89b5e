"""Tokens a second and utilisation of a step, beside what prime-rl publishes of the same step.

A random model of Qwen3-0.6B's shape in bfloat16, all activations recomputed, one row of which all
tokens are trained. prime-rl's figures are those of "RL Full, Recompute, FA3, 1xH100 HBM3" in its
benchmarks/results/BENCHMARKS.md of 16 January 2026; its MFU has the definition of ours.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from device_checks import matrix_rate
from dtensor_bench import work_of
from machine import Figures, Machine, NotHere, require
from on_device import device_name, mesh_of, synchronise
from training_checks import make_model

from agentrl.configs import ComputeConfig, LearnerConfig
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.flops import FlopsModel, peak_flops
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.memory_model import MemorySetup, estimate
from agentrl.training.model.memory_report import shape_of
from agentrl.training.step.learner import Learner

_STEPS = 3
_GIB = 2**30


@dataclass(frozen=True)
class _Published:
    """What prime-rl has."""

    tokens_per_s: float
    mfu: float
    memory_gib: float


def tokens_16k(machine: Machine, figures: Figures) -> None:
    """A row of 16,384 tokens."""
    _measure(machine, figures, 16_384 if machine.on_gpu else 256, _Published(11_900, 0.111, 12.5))


def tokens_65k(machine: Machine, figures: Figures) -> None:
    """A row of 65,536 tokens."""
    _measure(machine, figures, 65_536 if machine.on_gpu else 512, _Published(10_150, 0.268, 19.6))


def _measure(machine: Machine, figures: Figures, tokens: int, published: _Published) -> None:
    mesh = mesh_of(machine)
    model = make_model(machine)
    costs, vocabulary = FlopsModel.of(model), model.config.vocab_size
    if machine.on_gpu:
        needed = estimate(shape_of(model), MemorySetup(tokens, bf16=True, checkpointing=True)).peak
        total = torch.cuda.get_device_properties(0).total_memory
        if needed > total:
            raise NotHere(f"needs {needed / _GIB:.0f} GiB, and the GPU has {total / _GIB:.0f}")
    compute = ComputeConfig(bf16=True, gradient_checkpointing=True, micro_batch_tokens=tokens)
    learner = Learner(model, mesh, LearnerConfig(compute), _STEPS + 1)
    rows = [[_sequence(vocabulary, tokens)]]
    learner.step(rows)  # memory is allocated, kernels are chosen
    seconds = []
    for _ in range(_STEPS):
        synchronise(machine)
        began = time.perf_counter()
        taken = learner.step(rows)
        synchronise(machine)
        seconds.append(time.perf_counter() - began)
    require(taken.n_micro_batches == 1, f"the row took {taken.n_micro_batches} micro-batches")
    step_s = statistics.median(seconds)
    figures.add(step_s=round(step_s, 3), tokens=tokens, tokens_per_s=round(tokens / step_s, 1))
    peak = peak_flops(device_name(machine))
    source = "data sheet" if peak else "matrix product"
    peak = peak or matrix_rate(machine)
    figures.add(
        mfu=round(work_of(rows).mfu(costs, step_s, peak), 4),
        peak_tflops=round(peak / 1e12, 1),
        peak_by=source,
        memory_gib=round(torch.cuda.max_memory_allocated() / _GIB, 2) if machine.on_gpu else None,
        prime_rl_h100_tokens_per_s=published.tokens_per_s,
        prime_rl_h100_mfu=published.mfu,
        prime_rl_h100_memory_gib=published.memory_gib,
    )


def _sequence(vocabulary: int, tokens: int) -> TrainingSequence:
    """A row whose forward pass has that many tokens, each of which predicts a trained one."""
    random = np.random.default_rng(0)
    line = TokenTree.line(
        random.integers(2, vocabulary, tokens + 1, dtype=np.int32),
        mask=np.arange(tokens + 1) > 0,
        advantages=random.normal(),
        logprobs=-np.log(vocabulary),
    )
    return TrainingSequence(line, temperature=1.0, row_tokens=tokens)
