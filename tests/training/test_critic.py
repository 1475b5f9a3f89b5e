"""PPO: the critic's values, what the policy makes of them, and that both learn."""

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tiny import linear_rows, make_row, sequences_of, tiny_model, write_tiny_folder
from torch import Tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from agentrl.configs import (
    ComputeConfig,
    ConfigError,
    CriticConfig,
    LearnerConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.parallel import make_mesh
from agentrl.training.step.critic_loss import CriticStatistics
from agentrl.training.step.culprits import NonFiniteGradient
from agentrl.training.step.learner import Learner
from agentrl.training.step.schedule import make_schedule
from agentrl.training.step.statistics import StepStatistics

TREE = [(0, 6, -1), (6, 12, 0), (12, 17, 1), (17, 24, 1), (24, 30, 0)]
PPO = LossConfig(loss_calculator="PPO")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("critic") / "model")


def learner(
    folder: Path,
    critic: CriticConfig,
    *,
    budget: int = 4096,
    learning_rate: float = 0.0,
    steps: int = 100,
) -> Learner:
    return Learner(
        tiny_model(),
        make_mesh(Accelerator(cpu=True)),
        LearnerConfig(
            ComputeConfig(micro_batch_tokens=budget),
            PPO,
            OptimizerConfig(learning_rate=learning_rate),
            critic,
        ),
        steps,
        value_start=ModelConfig(str(folder)),
    )


def demonstration(
    prompt: Sequence[int], answer: Sequence[int], reward: float, logprob: float = 0.0
) -> list[TrainingSequence]:
    """A row: `answer` was sampled after `prompt`."""
    length = len(prompt) + len(answer)
    return [
        TrainingSequence(
            TokenTree.line(
                [*prompt, *answer], mask=np.arange(length) >= len(prompt), logprobs=logprob
            ),
            temperature=1.0,
            row_tokens=len(answer),
            reward=reward,
        )
    ]


def weights_of(model: PreTrainedModel) -> list[Tensor]:
    return [parameter.full_tensor().clone() for parameter in model.parameters()]


def critic_of(statistics: StepStatistics) -> dict[str, float]:
    """What they say of the critic."""
    return {
        field.name: value
        for field in fields(CriticStatistics)
        if (value := getattr(statistics, field.name)) is not None
    }


def test_the_places_of_trained_tokens_count_through_the_segments_of_a_row() -> None:
    (chain,) = linear_rows(1)
    rows = [sequences_of(chain), sequences_of(make_row("tree", 9, TREE, reward=0.5))]
    schedule = make_schedule(tiny_model(), rows, 10, 1, make_mesh(Accelerator(cpu=True)))
    assert len(schedule.batches) > 2
    places: dict[int, list[int]] = {0: [], 1: []}
    for batch in schedule.batches:
        for row, place in zip(batch.sequence.tolist(), batch.place.tolist(), strict=True):
            places[row].append(place)
    for row, sequences in enumerate(rows):
        assert sorted(places[row]) == list(range(sequences[0].row_tokens))
    assert {sequence.reward for sequence in rows[1]} == {0.5}


def test_values_learn_what_the_prompt_says_of_the_reward(folder: Path) -> None:
    draw = random.Random(0)
    trainee = learner(folder, CriticConfig(critic_learning_rate=1e-2, critic_updates=2))
    said: list[StepStatistics] = []
    for _ in range(15):
        rows = []
        for _ in range(24):
            lucky = draw.random() < 0.5
            prompt = [7, 10 if lucky else 11, draw.randrange(20, 60)]
            answer = [draw.randrange(20, 60) for _ in range(draw.randrange(1, 6))]
            rows.append(demonstration(prompt, answer, reward=float(lucky)))
        said.append(trainee.step(rows))
    first, last = critic_of(said[0]), critic_of(said[-1])
    assert first["value_mean"] == 0.0, "it starts without an opinion"
    assert first["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert last["explained_variance"] > 0.9
    assert last["value_loss"] < 0.1 * first["value_loss"]
    assert last["value_mean"] == pytest.approx(last["return_mean"], abs=0.1)


def test_the_policy_learns_to_sample_what_is_rewarded(folder: Path) -> None:
    """One token after one prompt; right are those of even number. Half of them at the start."""
    torch.manual_seed(0)
    config = CriticConfig(critic_learning_rate=1e-2)
    trainee = learner(folder, config, learning_rate=1e-2)
    prompt = [5, 6, 7]
    rewards = []
    for _ in range(30):
        with torch.no_grad():
            logits = trainee.model(input_ids=torch.tensor([prompt])).logits[0, -1]
        log_p = torch.log_softmax(logits, -1)
        tokens = torch.multinomial(log_p.exp(), 32, replacement=True).tolist()
        scores = [float(token % 2 == 0) for token in tokens]
        rows = [
            demonstration(prompt, [token], score, log_p[token].item())
            for token, score in zip(tokens, scores, strict=True)
        ]
        rewards.append(sum(scores) / len(scores))
        if len(set(scores)) == 1:
            break
        assert trainee.step(rows).ratio_max == pytest.approx(1.0, abs=1e-4)
    assert rewards[0] < 0.8
    assert rewards[-1] > 0.95


def test_micro_batches_do_not_change_what_critic_and_policy_learn(folder: Path) -> None:
    rows = [sequences_of(row) for row in [*linear_rows(6), make_row("tree", 9, TREE)]]
    config = CriticConfig(critic_learning_rate=1e-2, gae_lambda=0.9, gae_gamma=0.95, value_clip=0.2)
    results = []
    for budget in (10_000, 50, 1):
        trainee = learner(folder, config, budget=budget, learning_rate=1e-2)
        statistics = [trainee.step(rows) for _ in range(3)]
        assert trainee.critic is not None
        results.append((statistics, weights_of(trainee.critic.model)))
    (whole, weights), *others = results
    assert abs(critic_of(whole[-1])["explained_variance"]) > 1e-3
    for parts, same in others:
        assert parts[0].n_micro_batches > 1
        for ours, theirs in zip(parts, whole, strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-2, abs=1e-4)
            assert critic_of(ours) == pytest.approx(critic_of(theirs), rel=1e-3, abs=1e-3)
        for one, other in zip(same, weights, strict=True):
            torch.testing.assert_close(one, other, atol=2e-3, rtol=1e-2)


def test_while_the_critic_warms_up_the_policy_and_its_schedule_wait(folder: Path) -> None:
    rows = [sequences_of(row) for row in linear_rows(4)]
    config = CriticConfig(critic_learning_rate=1e-2, critic_warmup_steps=2)
    trainee = learner(folder, config, learning_rate=1e-2)
    start = weights_of(trainee.model)
    waiting = [trainee.step(rows) for _ in range(2)]
    assert all(map(torch.equal, weights_of(trainee.model), start))
    assert [said.grad_norm for said in waiting] == [0.0, 0.0]
    assert waiting[0].mismatch_kl > 0, "what the rows are like is said nevertheless"
    assert waiting[1].value_loss != waiting[0].value_loss
    assert trainee.step(rows).grad_norm > 0
    assert not all(map(torch.equal, weights_of(trainee.model), start))


def test_a_critic_goes_on_where_its_state_was_taken(folder: Path) -> None:
    rows = [sequences_of(row) for row in linear_rows(4)]
    config = CriticConfig(critic_learning_rate=1e-2, critic_warmup_steps=1)
    one = learner(folder, config, learning_rate=1e-2)
    one.step(rows)
    state = torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, one.state_dict()
    )
    expected = one.step(rows)
    other = learner(folder, config, learning_rate=1e-2)
    other.load_state_dict(state)
    assert other.step(rows) == expected


def test_a_critic_goes_on_at_the_learning_rate_that_is_given_now(folder: Path) -> None:
    one = learner(folder, CriticConfig(critic_learning_rate=1e-2))
    one.step([sequences_of(row) for row in linear_rows(2)])
    other = learner(folder, CriticConfig(critic_learning_rate=1e-3))
    other.load_state_dict(one.state_dict())
    assert other.critic is not None
    state = other.critic.state_dict()
    assert state["scheduler"]["_last_lr"] == [1e-3, 1e-3]
    assert {group["lr"] for group in state["optimizer"]["param_groups"]} == {1e-3}


def test_a_folder_with_a_head_of_its_own_keeps_it_and_one_without_starts_at_0(
    folder: Path, tmp_path: Path
) -> None:
    fresh = learner(folder, CriticConfig()).critic
    assert fresh is not None
    assert fresh.model.score.weight.full_tensor().abs().max() == 0
    saved = AutoModelForTokenClassification.from_pretrained(folder, num_labels=1)
    saved.save_pretrained(tmp_path / "critic")
    loaded = learner(tmp_path / "critic", CriticConfig()).critic
    assert loaded is not None
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight.full_tensor(), saved.state_dict()[name]), name


def test_a_folder_that_is_no_model_is_refused_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--critic_model_name_or_path .*no config\.json"):
        learner(tmp_path, CriticConfig())


def test_a_gradient_of_the_critic_that_is_not_finite_leaves_both_models_alone(folder: Path) -> None:
    rows = [sequences_of(row) for row in linear_rows(4)]
    overrated = [replace(sequence, reward=3e38) for sequence in rows[2]]
    trainee = learner(folder, CriticConfig(critic_learning_rate=1e-2), learning_rate=1e-2)
    assert trainee.critic is not None
    models = (trainee.model, trainee.critic.model)
    before = [weights_of(model) for model in models]
    with pytest.raises(NonFiniteGradient, match="the critic's gradient norm is nan"):
        trainee.step([*rows[:2], overrated, rows[3]])
    for model, start in zip(models, before, strict=True):
        assert all(map(torch.equal, weights_of(model), start))
        assert all(parameter.grad is None for parameter in model.parameters())
    other = learner(folder, CriticConfig(critic_learning_rate=1e-2), learning_rate=1e-2)
    assert trainee.step(rows) == other.step(rows), "nor does the next step know of it"


def test_a_later_update_of_the_critic_that_is_not_finite_is_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [sequences_of(row) for row in linear_rows(4)]
    config = CriticConfig(critic_learning_rate=1e25, critic_updates=3)
    trainee = learner(folder, config, learning_rate=1e-2)
    once = learner(folder, replace(config, critic_updates=1), learning_rate=1e-2)
    assert trainee.step(rows) == once.step(rows)
    assert "after 1 of --critic_updates 3: the critic's gradient norm is" in caplog.text
    assert trainee.critic is not None and once.critic is not None
    assert all(map(torch.equal, weights_of(trainee.critic.model), weights_of(once.critic.model)))
