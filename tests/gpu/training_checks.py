"""A step of the trainer in bfloat16 and compiled, against the same step in float32 and plain."""

import time
from dataclasses import replace

from dtensor_bench import make_rows, random_model
from machine import CheckFailed, Figures, Machine
from on_device import device_of, mesh_of, synchronise
from transformers import PreTrainedModel

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, OptimizerConfig
from agentrl.training.step.learner import Learner
from agentrl.training.step.statistics import StepStatistics

_STEPS = 3
# Relative; of gradient norms of the whole and of each layer.
_ROUNDING = {"loss": 2e-2, "grad_norm": 5e-2, "negative_logprob": 2e-3, "layer": 0.15}
# Kernels that sum in another order, in the dtype of the GPU's steps (bfloat16) and the CPU's.
_COMPILED = {True: _ROUNDING, False: dict.fromkeys(_ROUNDING, 1e-3)}


def make_model(machine: Machine) -> PreTrainedModel:
    """A random Qwen3 on the device: 0.6B on a GPU, 2M in the stand-in."""
    with device_of(machine):
        return random_model(experts=False, large=machine.on_gpu)


def bf16_against_float32(machine: Machine, figures: Figures) -> None:
    """Loss, logprobs and gradient norms of one step; on a GPU other kernels compute each."""
    exact, _ = _steps(machine, ComputeConfig(), 1)
    rounded, _ = _steps(machine, ComputeConfig(bf16=True), 1)
    _compare(rounded[0], exact[0], _ROUNDING, figures)


def compiled_against_plain(machine: Machine, figures: Figures) -> None:
    """The same, the seconds of compiling, and those of a step with it and without."""
    compute = ComputeConfig(bf16=machine.on_gpu)
    plain, seconds = _steps(machine, compute, _STEPS)
    compiled, compiled_seconds = _steps(machine, replace(compute, compile=True), _STEPS)
    figures.add(
        compiling_s=round(compiled_seconds[0] - seconds[0], 1),
        step_s=round(compiled_seconds[-1], 3),
        plain_step_s=round(seconds[-1], 3),
    )
    _compare(compiled[0], plain[0], _COMPILED[machine.on_gpu], figures)


def _steps(
    machine: Machine, compute: ComputeConfig, steps: int
) -> tuple[list[StepStatistics], list[float]]:
    """Statistics of steps of the same model on the same rows; seconds of its start and of each.

    Groups of siblings, branching records and plain ones; the prefixes of the large groups are
    computed ahead of their branches.
    """
    model = make_model(machine)
    unit = 64 if machine.on_gpu else 8
    rows = make_rows(model.config.vocab_size, unit)
    began = time.perf_counter()
    learner = Learner(  # probes the model, which compiles it
        model,
        mesh_of(machine),
        LearnerConfig(
            replace(compute, micro_batch_tokens=8 * unit),
            LossConfig(),
            OptimizerConfig(learning_rate=1e-6, log_grad_norms=True),
        ),
        steps,
    )
    synchronise(machine)
    taken, seconds = [], [time.perf_counter() - began]
    for _ in range(steps):
        began = time.perf_counter()
        taken.append(learner.step(rows))
        synchronise(machine)
        seconds.append(time.perf_counter() - began)
    return taken, seconds


def _compare(
    found: StepStatistics, expected: StepStatistics, allowed: dict[str, float], figures: Figures
) -> None:
    """Relative differences as figures. Raises `CheckFailed` naming all that are too large."""
    pairs = {
        name: [(getattr(found, name), getattr(expected, name))]
        for name in ("loss", "grad_norm", "negative_logprob")
    }
    assert found.grad_norms is not None and expected.grad_norms is not None
    pairs["layer"] = [(found.grad_norms[name], norm) for name, norm in expected.grad_norms.items()]
    differences = {
        name: max(abs(one - other) / abs(other) for one, other in values)
        for name, values in pairs.items()
    }
    figures.add(**differences)
    wrong = [
        f"{name} differs by {difference:.2g} of itself"
        for name, difference in differences.items()
        if not difference <= allowed[name]
    ]
    if wrong:
        raise CheckFailed("; ".join(wrong))
