"""The reference's logprobs of pairs, computed once: the same steps, and nothing twice."""

import copy
import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, ModelConfig, OptimizerConfig
from agentrl.configs.preferences import LOSS_TYPES, PreferenceConfig
from agentrl.databases.tree_file import TreeFile
from agentrl.rollout.demonstrations.prepare import Preparation, prepare_rows
from agentrl.training.data.flops import FlopsModel
from agentrl.training.parallel import make_mesh
from agentrl.training.parallel.agreement import Agreement
from agentrl.training.step.learner import Learner
from agentrl.training.step.reference import Reference
from agentrl.training.step.schedule import Schedule
from agentrl.training.step.statistics import PreferenceStatistics
from agentrl.training.supervised import reference_once
from agentrl.training.supervised.file_rows import FileRows
from agentrl.training.supervised.reference_once import Means, answer_means, kept_means

DEMO = Path(__file__).parents[2] / "assets" / "demo" / "model"
PAIRS = [
    (f"How many parts are in bin E{n}?", f"There are {9 * n} parts.", "I do not know." * (n + 1))
    for n in range(5)
]


def policy() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    return model


@dataclass
class Pairs:
    """Prepared pairs, and a reference that differs from the policy, so that no ratio is 1."""

    file: TreeFile
    reference: ModelConfig

    def learner(self, loss_type: str, tokens: int, *, in_rows: bool) -> Learner:
        smoothing = 0.2 if loss_type == "robust" else 0.0
        config = LearnerConfig(
            ComputeConfig(micro_batch_tokens=tokens),
            LossConfig(beta=0.3),
            OptimizerConfig(learning_rate=1e-4),
            preference=PreferenceConfig(loss_type, 0.3, smoothing),
        )
        return Learner(
            policy(), make_mesh(Accelerator(cpu=True)), config, 1,
            reference=None if in_rows else self.reference, reference_in_rows=in_rows,
        )  # fmt: skip

    def rows(self, learner: Learner) -> FileRows:
        return FileRows(self.file, FlopsModel.of(learner.model), learner.mesh)

    def means(
        self,
        learner: Learner,
        wanted: list[int],
        load: Callable[[], Reference] | None = None,
        stops: Callable[[], bool] = lambda: False,
        rows_at_once: int = 2,
    ) -> Means | None:
        compute = ComputeConfig(micro_batch_tokens=64)
        return answer_means(
            self.rows(learner), wanted, load or (lambda: learner.load_reference(self.reference)),
            compute, kept_means(self.file.folder, self.reference, compute), rows_at_once,
            Agreement(), stops,
        )  # fmt: skip


@pytest.fixture
def pairs(tmp_path: Path) -> Pairs:
    other = policy()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    other.save_pretrained(tmp_path / "reference")
    file = tmp_path / "pairs.jsonl"
    file.write_text(
        "".join(
            json.dumps(
                {
                    "prompt": [{"role": "user", "content": prompt}],
                    "chosen": [{"role": "assistant", "content": chosen}],
                    "rejected": [{"role": "assistant", "content": rejected}],
                }
            )
            + "\n"
            for prompt, chosen, rejected in PAIRS
        )
    )
    made = prepare_rows(file, tmp_path / "rows", Preparation(DEMO, {}, 512, pairs=True))
    reference = ModelConfig(model_name_or_path=str(tmp_path / "reference"))
    return Pairs(TreeFile(made.folder), reference)


@pytest.mark.parametrize("tokens", [512, 16], ids=["whole pairs", "divided pairs"])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_step_is_that_with_the_reference_beside_it(
    pairs: Pairs, loss_type: str, tokens: int
) -> None:
    beside = pairs.learner(loss_type, tokens, in_rows=False)
    expected = beside.step(pairs.rows(beside).of([0, 1, 2, 3, 4]).mine)
    once = pairs.learner(loss_type, tokens, in_rows=True)
    rows = pairs.rows(once)
    rows.reference = pairs.means(once, [0, 1, 2, 3, 4])
    found = once.step(rows.of([0, 1, 2, 3, 4]).mine)
    assert isinstance(expected, PreferenceStatistics) and isinstance(found, PreferenceStatistics)
    assert abs(expected.rewards["margins"]) > 1e-2
    for name in ("loss", "grad_norm"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-4)
    for metrics in ("rewards", "logps"):
        assert getattr(found, metrics) == pytest.approx(getattr(expected, metrics), rel=1e-4)


def test_only_rows_that_are_wanted_are_computed_and_none_twice(pairs: Pairs) -> None:
    learner = pairs.learner("sigmoid", 512, in_rows=True)
    some = copy.copy(pairs.means(learner, [1, 3]))
    assert some is not None
    assert np.isnan(some[[0, 2, 4]]).all() and np.isfinite(some[[1, 3]]).all()

    def unasked() -> Reference:
        raise AssertionError("the reference is loaded for rows that are there")

    assert np.array_equal(pairs.means(learner, [1, 3], unasked), some, equal_nan=True)
    whole = pairs.means(learner, [0, 1, 2, 3, 4])
    assert whole is not None and np.isfinite(whole).all()
    assert np.array_equal(whole[[1, 3]], some[[1, 3]])


def test_a_stop_keeps_what_is_computed(pairs: Pairs, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    learner = pairs.learner("sigmoid", 512, in_rows=True)
    asked = iter([False, True])
    assert pairs.means(learner, [0, 1, 2, 3], stops=lambda: next(asked)) is None
    assert caplog.messages[-1] == "the reference's logprobs of 2 of 4 pairs"
    kept = np.load(kept_means(pairs.file.folder, pairs.reference, ComputeConfig()))
    assert np.isfinite(kept[:2]).all() and np.isnan(kept[2:]).all()


def test_a_death_loses_what_was_computed_in_the_last_seconds_only(
    pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference_once, "_EVERY_S", 0.0)
    learner = pairs.learner("sigmoid", 512, in_rows=True)
    computed: list[int] = []

    def load() -> Reference:
        reference = learner.load_reference(pairs.reference)
        compute = reference.logprobs

        def dies_at_the_third(schedule: Schedule) -> list[torch.Tensor]:
            if len(computed) == 2:
                raise MemoryError
            computed.append(len(computed))
            return compute(schedule)

        monkeypatch.setattr(reference, "logprobs", dies_at_the_third)
        return reference

    with pytest.raises(MemoryError):
        pairs.means(learner, [0, 1, 2, 3], load, rows_at_once=1)
    kept = np.load(kept_means(pairs.file.folder, pairs.reference, ComputeConfig()))
    assert np.isfinite(kept[:2]).all() and np.isnan(kept[2:]).all()


def test_another_reference_has_a_file_of_its_own(pairs: Pairs) -> None:
    compute = ComputeConfig()
    own = ModelConfig(model_name_or_path=str(DEMO))
    files = {kept_means(pairs.file.folder, start, compute) for start in (own, pairs.reference)}
    assert len(files) == 2


def test_the_model_of_the_reference_is_freed(pairs: Pairs) -> None:
    learner = pairs.learner("sigmoid", 512, in_rows=True)
    loaded: list[weakref.ref[PreTrainedModel]] = []

    def load() -> Reference:
        reference = learner.load_reference(pairs.reference)
        loaded.append(weakref.ref(reference.model))
        return reference

    assert pairs.means(learner, [0, 1], load) is not None
    gc.collect()
    assert loaded[0]() is None
