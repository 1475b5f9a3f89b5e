"""The state of a learner, which waits in host memory while services use its device.

On a CPU the state moves to other memory of the host. The order of things, the values and what is
freed are those of a GPU; that a GPU's memory is really free is not shown.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from checkpointing import ROWS, Training
from tiny import linear_rows, sequences_of, tiny_model, write_tiny_folder
from trainer_run import Run

from agentrl.configs import (
    ComputeConfig,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)
from agentrl.training.checkpoint.layout import list_checkpoints
from agentrl.training.parallel import make_mesh
from agentrl.training.parallel.held_parts import local_part
from agentrl.training.run.coordinator import RunCoordinator
from agentrl.training.step.learner import Learner
from agentrl.training.trainer import main


def device_bytes(learner: Learner) -> int:
    """Bytes of the memory that a learner's models and optimizers hold on the device.

    Not those of a model's file, which a CPU reads in place.
    """
    storages = [local_part(tensor).untyped_storage() for tensor in states(learner)]
    return sum(storage.nbytes() for storage in storages if storage.resizable())


def states(learner: Learner) -> Iterator[torch.Tensor]:
    critic, reference = learner.critic, learner._auxiliary._reference
    for model in (learner.model, critic and critic.model, reference and reference.model):
        yield from model.parameters() if model is not None else ()
    for optimizer in (learner.optimizer, critic and critic.optimizer):
        for moments in optimizer.state.values() if optimizer is not None else ():
            yield from moments.values()


def test_a_step_is_the_same_with_and_without_a_stay_on_the_host(tmp_path: Path) -> None:
    folder = ModelConfig(str(write_tiny_folder(tmp_path / "model")))
    config = LearnerConfig(
        ComputeConfig(micro_batch_tokens=96, loss_seq_chunk_size=32),
        LossConfig(loss_calculator="PPO", beta=0.1),
        OptimizerConfig(learning_rate=1e-2),
    )
    rows = [sequences_of(row) for row in linear_rows(4)]
    made = []
    for offloads in (False, True):
        learner = Learner(
            tiny_model(), make_mesh(Accelerator(cpu=True)), config, 3, reference=folder,
            value_start=folder,
        )  # fmt: skip
        said = []
        for _ in range(3):
            said.append(learner.step(rows))
            before = device_bytes(learner)
            if offloads:
                learner.offload()
                assert before > 0 and device_bytes(learner) == 0
                learner.bring_back()
                assert device_bytes(learner) == before
        made.append((said, [p.full_tensor().clone() for p in learner.model.parameters()]))
    (steps, weights), (other_steps, other_weights) = made
    assert steps == other_steps
    assert all(torch.equal(one, two) for one, two in zip(weights, other_weights, strict=True))


def test_a_checkpoint_is_saved_from_the_host(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step(ROWS)
    training.learner.offload()
    training.save(1)
    training.learner.bring_back()
    expected = training.step(ROWS), training.weights()

    resumed = Training(tmp_path, seed=5)
    resumed.load(list_checkpoints(tmp_path)[-1])
    said, weights = resumed.step(ROWS), resumed.weights()
    assert said == expected[0]
    assert all(torch.equal(one, two) for one, two in zip(weights, expected[1], strict=True))


def test_a_checkpoint_before_the_first_update_is_saved_from_the_host(tmp_path: Path) -> None:
    """As after a step that trains the critic only."""
    folder = ModelConfig(str(write_tiny_folder(tmp_path / "model")))
    config = LearnerConfig(
        ComputeConfig(micro_batch_tokens=96, loss_seq_chunk_size=32),
        LossConfig(loss_calculator="PPO"),
        OptimizerConfig(learning_rate=1e-2),
        critic=CriticConfig(critic_warmup_steps=1),
    )
    rows = [sequences_of(row) for row in linear_rows(4)]

    def fresh() -> Learner:
        mesh = make_mesh(Accelerator(cpu=True))
        return Learner(tiny_model(), mesh, config, 3, value_start=folder)

    def after(learner: Learner) -> tuple[object, list[torch.Tensor]]:
        said = learner.step(rows)
        return said, [p.full_tensor().clone() for p in learner.model.parameters()]

    never_saved, saved, resumed = fresh(), fresh(), fresh()
    never_saved.step(rows)
    saved.step(rows)
    saved.offload()
    resumed.load_state_dict(saved.state_dict())
    assert device_bytes(saved) == 0
    saved.bring_back()
    expected = after(never_saved)
    for other in (after(saved), after(resumed)):
        assert other[0] == expected[0]
        assert all(torch.equal(a, b) for a, b in zip(other[1], expected[1], strict=True))
    made = next(iter(make_moments(fresh()).values()))
    first = next(iter(never_saved.optimizer.state.values()))
    assert {name: (m.shape, m.dtype, type(m)) for name, m in made.items()} == {
        name: (m.shape, m.dtype, type(m)) for name, m in first.items()
    }


def make_moments(learner: Learner) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    learner.state_dict()
    return learner.optimizer.state


def test_services_have_the_device_when_the_trainer_has_left_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    learners: list[Learner] = []
    held: list[int] = []
    released: list[int] = []
    make, publish = Learner.__init__, RunCoordinator.publish
    release = RunCoordinator.release_gpus

    def remember(self: Learner, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        learners.append(self)

    async def look(self: RunCoordinator, *args: object) -> float:
        held.append(device_bytes(learners[0]))
        return await publish(self, *args)

    async def note(self: RunCoordinator) -> int:
        released.append(len(learners))
        return await release(self)

    monkeypatch.setattr(RunCoordinator, "release_gpus", note)
    monkeypatch.setattr(Learner, "__init__", remember)
    monkeypatch.setattr(RunCoordinator, "publish", look)
    run.add(linear_rows(4))
    turns = ["--sync_sampling", "true", "--inf_share_gpus", "true", "--save_steps", "1"]
    assert main(run.flags("--enable_sampling", "false", *turns)) == 0
    assert held == [0, 0]  # the start weights, and those of the step
    assert released == [0, 1]  # before the model is loaded, and for the step
    assert len(run.metrics()) == 1 and (run.output / "checkpoint-1").is_dir()
