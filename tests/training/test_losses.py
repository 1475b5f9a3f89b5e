"""The losses on numbers worked out by hand, and their normalisation under any split."""

import math

import pytest
import torch
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses import (
    LOSS_FUNCTIONS,
    BatchTotals,
    LossInputs,
    Normalisation,
    cross_entropy,
    grpo,
    minirl,
    normalisation_of,
    normalise,
)


def inputs(
    ratios: list[float],
    advantages: list[float],
    *,
    mask: list[bool] | None = None,
    staleness: list[int] | None = None,
) -> LossInputs:
    """Tokens with these ratios; every behaviour logprob is log 0.5."""
    behaviour = torch.full((len(ratios),), math.log(0.5))
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    return LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=behaviour,
        advantages=torch.tensor(advantages),
        mask=torch.tensor(mask or [True] * len(ratios)),
        staleness=torch.tensor(staleness or [0] * len(ratios)),
        sequence_tokens=torch.full((len(ratios),), float(len(ratios))),
        sequence=torch.zeros(len(ratios), dtype=torch.int64),
    )


def gradient(terms: Tensor, given: LossInputs) -> list[float]:
    (grad,) = torch.autograd.grad(terms.sum(), given.logprobs, retain_graph=True)
    return [round(value, 5) for value in grad.tolist()]


def test_grpo_clips_the_ratio_where_the_advantage_pushes_outward() -> None:
    given = inputs([1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0])
    loss = grpo(given, LossConfig(epsilon=0.2, epsilon_higher=0.3))
    # r A, or clip(r) A = 1.3 * 2 and 0.8 * -2 where that is smaller
    assert loss.terms.tolist() == pytest.approx([-2.0, -2.6, 3.0, -1.0, 1.6], abs=1e-6)
    assert loss.clipped_high.tolist() == [False, True, False, False, False]
    assert loss.clipped_low.tolist() == [False, False, False, False, True]
    # d(-r A)/d log pi = -r A where it is not clipped
    assert gradient(loss.terms, given) == [-2.0, 0.0, 3.0, -1.0, 0.0]


def test_the_upper_clip_range_is_the_lower_one_unless_it_is_given() -> None:
    given = inputs([1.25], [1.0])
    assert grpo(given, LossConfig(epsilon=0.2)).clipped_high.tolist() == [True]
    assert grpo(given, LossConfig(epsilon=0.2, epsilon_higher=0.28)).clipped_high.tolist() == [
        False
    ]


def test_the_cap_on_the_weight_bounds_a_bad_token_in_grpo() -> None:
    given = inputs([10.0, 10.0], [-1.0, 1.0])
    loss = grpo(given, LossConfig(importance_weight_cap_ratio=3.0))
    assert loss.terms.tolist() == pytest.approx([3.0, -1.2])
    assert gradient(loss.terms, given) == [0.0, 0.0]


def test_minirl_weighs_the_policy_gradient_and_masks_what_is_out_of_range() -> None:
    given = inputs([1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0])
    loss = minirl(given, LossConfig(loss_calculator="MINIRL", epsilon=0.2))
    log_pi = given.logprobs.tolist()
    expected = [-2.0 * log_pi[0], 0.0, 3.0 * log_pi[2], -1.0 * log_pi[3], 0.0]
    assert loss.terms.tolist() == pytest.approx(expected, abs=1e-6)
    # the weight is a constant: the gradient is -M r A
    assert gradient(loss.terms, given) == [-2.0, 0.0, 3.0, -1.0, 0.0]


def test_the_cap_truncates_the_weight_of_minirl_and_keeps_its_gradient() -> None:
    given = inputs([10.0], [-1.0])
    loss = minirl(given, LossConfig(importance_weight_cap_ratio=3.0))
    assert gradient(loss.terms, given) == [3.0]


@pytest.mark.parametrize("name", ["GRPO", "MINIRL"])
def test_strict_in_bound_leaves_out_every_ratio_out_of_range(name: str) -> None:
    given = inputs([1.0, 1.5, 0.5, 1.5, 0.5], [1.0, 1.0, 1.0, -1.0, -1.0])
    loss = LOSS_FUNCTIONS[name](given, LossConfig(strict_in_bound=True))
    assert gradient(loss.terms, given) == [-1.0, 0.0, 0.0, 0.0, 0.0]
    assert loss.clipped_high.tolist() == [False, True, False, True, False]
    assert loss.clipped_low.tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("name", ["GRPO", "MINIRL"])
def test_decay_shrinks_the_advantage_of_stale_tokens(name: str) -> None:
    given = inputs([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], staleness=[0, 1, 3])
    loss = LOSS_FUNCTIONS[name](given, LossConfig(out_of_date_decay=0.5))
    assert gradient(loss.terms, given) == [-1.0, -0.5, -0.125]


def test_the_options_compose() -> None:
    config = LossConfig(
        importance_weight_cap_ratio=1.1, strict_in_bound=True, out_of_date_decay=0.5, epsilon=0.2
    )
    given = inputs([1.15, 1.3, 0.9], [1.0, 1.0, 1.0], staleness=[1, 0, 2])
    loss = minirl(given, config)
    assert gradient(loss.terms, given) == [-0.55, 0.0, -0.225]


@pytest.mark.parametrize("name", sorted(LOSS_FUNCTIONS))
def test_an_untrained_token_adds_nothing_whatever_its_numbers_are(name: str) -> None:
    given = inputs([1.0, 1.0], [1.0, 1.0], mask=[True, False])
    odd = LossInputs(
        logprobs=given.logprobs,
        behaviour_logprobs=torch.tensor([math.log(0.5), -90.0]),
        advantages=torch.tensor([1.0, 1e9]),
        mask=given.mask,
        staleness=given.staleness,
        sequence_tokens=given.sequence_tokens,
        sequence=given.sequence,
    )
    loss = LOSS_FUNCTIONS[name](odd, LossConfig(loss_calculator=name))
    assert loss.terms[1].item() == 0.0
    assert gradient(loss.terms, odd)[1] == 0.0


def test_cross_entropy_is_the_negative_logprob() -> None:
    given = inputs([0.2, 1.8], [5.0, -5.0])
    loss = cross_entropy(given, LossConfig(loss_calculator="CrossEntropy"))
    assert loss.terms.tolist() == pytest.approx([-math.log(0.1), -math.log(0.9)])
    assert gradient(loss.terms, given) == [-1.0, -1.0]


def test_the_flags_name_the_normalisation() -> None:
    assert normalisation_of(LossConfig()) is Normalisation.TOKEN
    assert normalisation_of(LossConfig(token_level_loss=False)) is Normalisation.SEQUENCE
    assert normalisation_of(LossConfig(skip_length_normalization=True)) is Normalisation.NONE
    assert normalisation_of(LossConfig(loss_calculator="MINIRL")) is Normalisation.NONE


# sequences of 1, 3 and 2 tokens
TERMS = torch.tensor([6.0, 1.0, 2.0, 3.0, 4.0, 8.0])
SEQUENCE_TOKENS = torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0, 2.0])
TOTALS = BatchTotals(tokens=6, sequences=3)


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        (Normalisation.TOKEN, 24 / 6),
        (Normalisation.SEQUENCE, (6 + 2 + 6) / 3),
        (Normalisation.NONE, 24 / 3),
    ],
)
def test_normalisations_are_the_same_under_any_split(
    normalisation: Normalisation, expected: float
) -> None:
    for parts in ([6], [1, 3, 2], [2, 2, 2], [5, 1], [1] * 6):
        shares = [
            normalise(terms, tokens, normalisation, TOTALS).item()
            for terms, tokens in zip(TERMS.split(parts), SEQUENCE_TOKENS.split(parts), strict=True)
        ]
        assert sum(shares) == pytest.approx(expected)
