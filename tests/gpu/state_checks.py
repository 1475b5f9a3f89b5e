"""The trainer's state between device and host: staged for publication, offloaded, and saved there.

What comes back is compared bit for bit with what it was.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dtensor_bench import make_rows
from machine import Figures, Machine, require
from on_device import mesh_of, synchronise
from torch import Tensor
from training_checks import make_model

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, OptimizerConfig
from agentrl.training.checkpoint.layout import TrainerState, list_checkpoints
from agentrl.training.checkpoint.save import CheckpointSaver, load_checkpoint
from agentrl.training.model.weight_gathering import StagedWeights, WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel.held_parts import local_part
from agentrl.training.step.learner import Learner

_GIB = 2**30
_LEFT = 0.02  # of the state's memory, on the device when it is away
_ROUNDS = 2  # the first one makes the host's memory
_LATE_S = 0.3  # by which a copy begins after the optimizer would change the weights


class _Trainer:
    """A learner and its rows. All begin alike."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        unit = 64 if machine.on_gpu else 8
        model = make_model(machine)
        self._rows = make_rows(model.config.vocab_size, unit)
        self.form = written_form(model)
        config = LearnerConfig(
            ComputeConfig(bf16=machine.on_gpu, micro_batch_tokens=8 * unit),
            LossConfig(),
            OptimizerConfig(learning_rate=1e-4),
        )
        self.learner = Learner(model, mesh_of(machine), config, 10)

    def step(self) -> None:
        """A step on the same rows."""
        taken = self.learner.step(self._rows)
        synchronise(self._machine)
        require(math.isfinite(taken.loss), f"the loss of a step is {taken.loss}")

    def weights(self) -> dict[str, Tensor]:
        """Copies of the weights, on the host."""
        state = self.learner.model.state_dict()
        return {name: local_part(value).cpu().clone() for name, value in state.items()}

    def state(self) -> dict[str, Tensor]:
        """Copies of weights and moments, on the host."""
        state = self.weights()
        for number, moments in enumerate(self.learner.optimizer.state.values()):
            for name, value in moments.items():
                state[f"{name} of weight {number}"] = local_part(value).cpu().clone()
        return state


def staging(machine: Machine, figures: Figures) -> None:
    """Weights that are published while the next step changes them are those before it."""
    trainer = _Trainer(machine)
    trainer.step()
    at_optimizer = threading.Event()
    # Registered before the gatherer's own hook, which waits for the copy.
    trainer.learner.optimizer.register_step_pre_hook(lambda *_: at_optimizer.set())
    gatherer = WeightGatherer(
        trainer.learner.model, trainer.form, torch.bfloat16, trainer.learner.optimizer,
        sent_by_gpu=machine.on_gpu,
    )  # fmt: skip
    for _ in range(_ROUNDS):
        copied = []
        began = time.perf_counter()
        staged = gatherer.stage()
        begun_s = time.perf_counter() - began
        staged.copied.add_done_callback(lambda _, c=copied: c.append(time.perf_counter()))
        trainer.step()
        published = staged.gather()
        copied_s = copied[0] - began
    size = sum(tensor.nbytes for tensor in published.values())
    figures.add(
        gb=round(size / 1e9, 3), begun_s=round(begun_s, 4), copied_s=round(copied_s, 3),
        copied_gb_per_s=round(size / 1e9 / copied_s, 2),
        optimizer_waited_s=round(gatherer.waited_seconds(), 3),
    )  # fmt: skip
    # Once more, so that the copy and the update would meet if nothing kept them apart.
    expected = trainer.weights()
    at_optimizer.clear()
    with _late_copies(at_optimizer):
        staged = gatherer.stage()
        trainer.step()
        published = staged.gather()
    waited_s = gatherer.waited_seconds()
    figures.add(optimizer_waited_for_late_copy_s=round(waited_s, 3))
    require(
        waited_s > _LATE_S / 2,
        f"the optimizer waited {waited_s:.3f} s for a copy that began {_LATE_S:g} s after it came",
    )
    now = trainer.weights()
    shared = [name for name in published if name in expected]
    require(len(shared) > 10, f"only {len(shared)} of the published tensors have the model's names")
    wrong = [n for n in shared if not torch.equal(published[n], expected[n].to(published[n].dtype))]
    require(not wrong, f"published are not the weights of that moment: {', '.join(wrong[:3])}")
    same = all(torch.equal(now[name], expected[name]) for name in shared)
    require(not same, "the step changed no weight, so that nothing is shown")
    if machine.on_gpu:
        require(
            all(tensor.is_pinned() for tensor in published.values()),
            "what a GPU sends to services is not pinned",
        )


@contextmanager
def _late_copies(at_optimizer: threading.Event) -> Iterator[None]:
    """Within the block copies begin a while after the optimizer would change the weights."""
    copy = StagedWeights._copy

    def copy_late(self: StagedWeights, *args: Any) -> None:
        at_optimizer.wait()
        time.sleep(_LATE_S)
        copy(self, *args)

    StagedWeights._copy = copy_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        StagedWeights._copy = copy  # type: ignore[method-assign]


def offload(machine: Machine, figures: Figures) -> None:
    """The state that comes back is what it was, and the device was free meanwhile."""
    trainer = _Trainer(machine)
    trainer.step()
    expected = trainer.state()
    size = sum(value.nbytes for value in expected.values())
    held = _device_bytes(machine)
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        trainer.learner.offload()
        left_s = time.perf_counter() - began
        freed = held - _device_bytes(machine)
        began = time.perf_counter()
        trainer.learner.bring_back()
        returned_s = time.perf_counter() - began
    figures.add(
        state_gib=round(size / _GIB, 3), to_host_s=round(left_s, 3), back_s=round(returned_s, 3),
        to_host_gb_per_s=round(size / 1e9 / left_s, 2),
        back_gb_per_s=round(size / 1e9 / returned_s, 2),
    )  # fmt: skip
    if machine.on_gpu:
        figures.add(freed_gib=round(freed / _GIB, 3))
        require(
            freed >= (1 - _LEFT) * size,
            f"the device got {freed / _GIB:.2f} GiB back of a state of {size / _GIB:.2f}",
        )
    _compare(trainer.state(), expected, "after a stay on the host")
    trainer.step()


def checkpoint(machine: Machine, figures: Figures) -> None:
    """A checkpoint that is saved while the state is on the host has all of it."""
    trainer = _Trainer(machine)
    trainer.step()
    expected = trainer.state()
    trainer.learner.offload()
    output = machine.folder / "run"
    saver = CheckpointSaver(output, None, lambda: None)
    began = time.perf_counter()
    saver.save(
        trainer.learner,
        TrainerState(step=1, version=0, run_name="check", config={}, fence=0, processes=1),
    )
    copied_s = time.perf_counter() - began
    saver.wait()
    written_s = time.perf_counter() - began
    saver.close()
    del trainer
    resumed = _Trainer(machine)
    began = time.perf_counter()
    load_checkpoint(list_checkpoints(output)[-1], resumed.learner)
    figures.add(
        gib=round(sum(value.nbytes for value in expected.values()) / _GIB, 3),
        copied_s=round(copied_s, 3), written_s=round(written_s, 3),
        loaded_s=round(time.perf_counter() - began, 3),
    )  # fmt: skip
    _compare(resumed.state(), expected, "after a resume from a checkpoint of the host's memory")
    resumed.step()


def _compare(found: dict[str, Tensor], expected: dict[str, Tensor], when: str) -> None:
    wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
    require(not wrong, f"{when} other values are in {', '.join(wrong[:3])}")


def _device_bytes(machine: Machine) -> int:
    return torch.cuda.memory_allocated() if machine.on_gpu else 0
