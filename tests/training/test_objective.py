"""Layers over the losses, and what may be computed apart."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from loss_inputs import gradient, inputs, part, random_inputs

from agentrl.configs import LossConfig
from agentrl.configs.losses import LOSSES
from agentrl.training.losses import (
    BatchTotals,
    LossInputs,
    Normalisation,
    Scope,
    normalise,
)
from agentrl.training.step.objective import Objective, TokenLosses

WITH_LAYERS = {
    "plain": {},
    "cap, dual clip, band, decay": {
        "rollout_is_threshold": 1.4, "dual_clip": 1.2, "importance_weight_cap_ratio": 1.2,
        "out_of_date_decay": 0.3, "epsilon": 0.3, "epsilon_higher": 0.2, "advantage_decay": 0.8,
    },
    "decoupled, sequence weights, geometric mask": {
        "proximal_policy": "loglinear", "rollout_is": "sequence",
        "rollout_is_threshold": 2.0, "rollout_rs": "geometric", "rollout_rs_threshold": 1.3,
    },
    "recomputed, token weights": {"proximal_policy": "recompute", "rollout_is": "token"},
    "divergence, entropy, normalized": {
        "beta": 0.1, "entropy_coef": 0.01, "normalize_advantages": True, "kl_estimator": "k2",
    },
    "divergence in the advantage": {"beta": 0.1, "kl_in_advantage": True, "kl_estimator": "k1"},
}  # fmt: skip


def totals_of(given: LossInputs) -> BatchTotals:
    trained = given.advantages[given.mask].double()
    return BatchTotals(
        tokens=int(given.mask.sum()),
        sequences=len(given.sequence[given.mask].unique()),
        advantages=float(trained.sum()),
        squared_advantages=float(trained.square().sum()),
    )


def objective(loss: str = "GRPO", **flags: object) -> Objective:
    return Objective(LossConfig(loss_calculator=loss, **flags))  # type: ignore[arg-type]


def token_losses_of(given: LossInputs, loss: str = "GRPO", **flags: object) -> TokenLosses:
    return objective(loss, **flags).share(given, totals_of(given))[1]


def slopes(given: LossInputs, loss: str = "GRPO", **flags: object) -> list[float]:
    """d(loss) / d(logprob), times the number of tokens, as losses have it under a token mean."""
    share, _ = objective(loss, token_level_loss=True, **flags).share(given, totals_of(given))
    return gradient(share * len(given.mask), given)


@pytest.mark.parametrize("layers", WITH_LAYERS.values(), ids=WITH_LAYERS.keys())
@pytest.mark.parametrize("loss", LOSSES)
def test_the_parts_that_a_scope_allows_add_up_to_the_whole(
    loss: str, layers: dict[str, object]
) -> None:
    given = random_inputs([3, 1, 5, 2, 4], seed=3)
    made = objective(loss, **layers)
    totals = totals_of(given)
    whole, _ = made.share(given, totals)
    gradients = torch.autograd.grad(whole, [given.logprobs, given.entropy], allow_unused=True)  # type: ignore[list-item]
    parts = {
        Scope.TOKEN: torch.arange(len(given.mask)) % 4,
        Scope.SEQUENCE: given.sequence % 2,
        Scope.BATCH: torch.zeros_like(given.sequence),
    }[made.scope]
    shares = [made.share(part(given, parts == n), totals)[0] for n in parts.unique().tolist()]
    assert sum(share.item() for share in shares) == pytest.approx(whole.item(), abs=1e-5)
    again = torch.autograd.grad(
        torch.stack(shares).sum(), [given.logprobs, given.entropy], allow_unused=True
    )  # type: ignore[list-item]
    for ours, theirs in zip(again, gradients, strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@settings(max_examples=settings.default.max_examples * 2 // 5)
@drawn(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(0, 99), st.randoms())
def test_the_order_of_tokens_does_not_matter(lengths: list[int], seed: int, rng: object) -> None:
    given = random_inputs(lengths, seed)
    order = torch.tensor(rng.sample(range(sum(lengths)), sum(lengths)))  # type: ignore[attr-defined]
    # Two tokens always have the same covariance: which of them is taken is a matter of order.
    by_covariance = () if sum(lengths) == 2 else ("Clip-Cov", "KL-Cov")
    for loss in ("GSPO", "MINIRL", *by_covariance):
        share, _ = objective(loss).share(given, totals_of(given))
        again, _ = objective(loss).share(part(given, order), totals_of(given))
        assert again.item() == pytest.approx(share.item(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES)
def test_an_untrained_token_adds_nothing_whatever_its_numbers_are(loss: str) -> None:
    given = replace(
        inputs([1.1, 1.0, 0.9], [1.0, 1e9, -1.0], mask=[True, False, True]),
        behaviour_logprobs=torch.tensor([-0.7, -90.0, -0.7]),
    )
    token_losses = token_losses_of(given, loss)
    alone = part(given, given.mask)
    assert token_losses.token_losses[1].item() == 0.0
    assert slopes(given, loss)[1] == 0.0
    assert token_losses.token_losses[given.mask].tolist() == pytest.approx(
        token_losses_of(alone, loss).token_losses.tolist()
    )


@pytest.mark.parametrize(
    ("flags", "scope"),
    [
        ({}, Scope.TOKEN),
        ({"loss_calculator": "GSPO"}, Scope.SEQUENCE),
        ({"loss_calculator": "KL-Cov"}, Scope.BATCH),
        ({"rollout_rs": "geometric"}, Scope.SEQUENCE),
        ({"rollout_rs": "token"}, Scope.TOKEN),
        ({"loss_calculator": "Clip-Cov", "rollout_rs": "sequence"}, Scope.BATCH),
        ({"loss_calculator": "CrossEntropy", "rollout_rs": "sequence"}, Scope.TOKEN),
    ],
)
def test_the_scope_is_the_widest_of_what_is_asked_for(
    flags: dict[str, object], scope: Scope
) -> None:
    assert Objective(LossConfig(**flags)).scope is scope  # type: ignore[arg-type]


def test_icepop_is_a_weight_and_a_mask_of_trainer_against_sampler() -> None:
    # M(k) = k for k in [0.5, 5], else 0, with k the ratio of the trainer's policy before the
    # update to the sampler's; arXiv 2510.18855
    given = inputs([0.4, 0.6, 1.0, 4.0, 6.0], [1.0, 1.0, -2.0, 2.0, 1.0], rows=[2, 3])
    mask = {"rollout_rs": "token", "rollout_rs_threshold": 5.0, "rollout_rs_threshold_lower": 0.5}
    whole = {**mask, "proximal_policy": "recompute", "rollout_is": "token"}
    assert slopes(given, **whole) == pytest.approx([0.0, -0.6, 2.0, -8.0, 0.0])
    # the mask alone leaves GRPO's clip around the sampler's policy, which clips 4 to 1.2
    assert slopes(given, **mask) == pytest.approx([0.0, -0.6, 2.0, 0.0, 0.0])


def test_decay_shrinks_the_advantage_of_stale_tokens() -> None:
    given = inputs([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], staleness=[0, 1, 3])
    for loss in ("GRPO", "MINIRL", "GPG"):
        assert slopes(given, loss, advantage_decay=0.5) == [-1.0, -0.5, -0.125]


def test_the_options_compose() -> None:
    given = inputs([1.15, 1.3, 0.9], [1.0, 1.0, 1.0], staleness=[1, 0, 2])
    flags = {
        "rollout_is_threshold": 1.1, "strict_in_bound": True, "advantage_decay": 0.5,
        "proximal_policy": "behaviour",
    }  # fmt: skip
    assert slopes(given, "MINIRL", **flags) == [-0.55, 0.0, -0.225]


def test_normalized_advantages_have_mean_0_and_deviation_1_over_the_global_batch() -> None:
    given = inputs([1.0, 1.0, 1.0, 1.0], [1.0, 3.0, 1.0, 3.0])
    assert slopes(given, normalize_advantages=True) == [1.0, -1.0, 1.0, -1.0]
    # a part of the batch is normalised by the whole of it: mean 2, deviation 1
    half = part(given, torch.tensor([True, False, True, False]))
    share, _ = objective(normalize_advantages=True).share(half, totals_of(given))
    assert share.item() == pytest.approx((1.0 + 1.0) / 4)


def test_a_recomputed_proximal_policy_leaves_the_correction_to_the_weights() -> None:
    given = inputs([3.0, 0.5], [1.0, 1.0])
    assert slopes(given, proximal_policy="recompute") == [-1.0, -1.0]
    weighted = {"proximal_policy": "recompute", "rollout_is": "token"}
    assert slopes(given, **weighted) == [-3.0, -0.5]
    capped = {**weighted, "rollout_is_threshold": 2.0}
    assert slopes(given, **capped) == [-2.0, -0.5]
    assert token_losses_of(given, **capped).truncated.tolist() == [True, False]


def test_a_loglinear_proximal_policy_lies_between_sampler_and_trainer_by_staleness() -> None:
    # p = mu^(1/d) pi^(1 - 1/d); pi / mu = 4: pi / p = 4^(1/d), and 1 where d = 0
    given = inputs([4.0] * 4, [1.0] * 4, staleness=[0, 1, 2, 4])
    flags = {"proximal_policy": "loglinear", "epsilon": 0.0, "clip_ratio_high": 1.5}
    expected = [1.0, 2.5, 2.0, 4**0.25]  # the second, 4, is clipped at 2.5
    assert token_losses_of(given, **flags).token_losses.tolist() == pytest.approx(
        [-r for r in expected]
    )
    # with weights p / mu the product is pi / mu again, but for the clip
    flags["rollout_is"] = "token"
    assert token_losses_of(given, **flags).token_losses.tolist() == pytest.approx(
        [-4.0, -2.5, -4.0, -4.0]
    )


@pytest.mark.parametrize(
    ("level", "weights"),
    [("token", [2.0, 0.5, 3.0]), ("sequence", [1.0, 1.0, 3.0]), ("geometric", [1.0, 1.0, 3.0])],
)
def test_weights_of_tokens_and_of_sequences(level: str, weights: list[float]) -> None:
    given = inputs([2.0, 0.5, 3.0], [1.0, 1.0, 1.0], rows=[2, 1])
    flags = {"proximal_policy": "recompute", "rollout_is": level}
    assert slopes(given, **flags) == pytest.approx([-w for w in weights], abs=1e-4)


def test_sequence_weights_are_products_and_geometric_ones_means() -> None:
    given = inputs([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    for level, weight in (("sequence", 8.0), ("geometric", 2.0)):
        flags = {"proximal_policy": "recompute", "rollout_is": level}
        assert slopes(given, **flags) == pytest.approx([-weight] * 3, abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ({"rollout_rs": "token"}, [True, False, True, True, False]),
        ({"rollout_rs": "sequence"}, [False, False, True, True, True]),
        ({"rollout_rs": "geometric"}, [True, True, True, True, True]),
        (
            {"rollout_rs": "token", "rollout_rs_threshold_lower": 0.0},
            [True, False, True, True, True],
        ),
        (
            {"rollout_rs": "geometric", "rollout_rs_threshold": 1.5},
            [False, False, True, True, True],
        ),
    ],
)
def test_what_is_too_far_from_the_sampler_is_left_out(
    flags: dict[str, object], kept: list[bool]
) -> None:
    # products 1.9 * 2.1 = 3.99 and 1 * 1.5 * 0.4 = 0.6; geometric means 1.997 and 0.84
    given = inputs([1.9, 2.1, 1.0, 1.5, 0.4], [1.0, 1.0, 1.0, 1.0, 1.0], rows=[2, 3])
    for loss in ("GRPO", "GPG"):
        token_losses = token_losses_of(given, loss, **flags)
        assert (~token_losses.left_out).tolist() == kept
        assert (token_losses.token_losses != 0.0).tolist() == kept


def test_divergence_is_added_to_the_loss_whatever_is_left_out_of_it() -> None:
    given = inputs([1.0, 9.0], [0.0, 0.0], reference=[2.0, 2.0])
    flags = {"beta": 0.5, "kl_estimator": "k2", "rollout_rs": "token"}
    log_2 = 0.6931
    assert slopes(given, **flags) == pytest.approx([0.5 * log_2] * 2, abs=1e-3)
    divergence = token_losses_of(given, **flags).reference_kl
    assert divergence is not None
    assert divergence.tolist() == pytest.approx([log_2**2 / 2] * 2, abs=1e-3)


def test_divergence_is_taken_off_the_advantages_where_that_is_asked_for() -> None:
    given = inputs([1.0, 1.0], [1.0, 1.0], reference=[2.0, 0.5])
    flags = {"beta": 0.5, "kl_estimator": "k1", "kl_in_advantage": True}
    assert slopes(given, **flags) == pytest.approx([-1 + 0.34657, -1 - 0.34657], abs=1e-4)


def test_a_penalty_in_the_advantage_ends_at_the_best_policy_of_reward_and_divergence() -> None:
    reference = torch.tensor([0.1, 0.3, 0.2, 0.2, 0.2]).log()
    reward, beta = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]), 0.5
    # The maximum of E[reward] - beta KL is proportional to reference exp(reward / beta).
    best = torch.softmax(reference + reward / beta, 0)
    made = objective("RLOO", beta=beta, kl_in_advantage=True, normalization_length=1)
    policy = reference.clone().requires_grad_()
    for _ in range(500):
        # All five actions, weighed by pi / mu with a uniform mu: the exact expected gradient.
        given = replace(
            inputs([1.0] * 5, reward.tolist(), rows=[1] * 5),
            logprobs=torch.log_softmax(policy, 0),
            behaviour_logprobs=torch.full((5,), 0.2).log(),
            reference_logprobs=reference,
        )
        share, _ = made.share(given, totals_of(given))
        (slope,) = torch.autograd.grad(share, policy)
        policy = (policy - slope).detach().requires_grad_()
    assert torch.allclose(torch.softmax(policy.detach(), 0), best, atol=1e-3)


# KL k1 of 3 tokens in rows of 2 and 1, ln(pi / reference): ln 2, 2 ln 2 and 0.
REFERENCE, LN2 = [2.0, 4.0, 1.0], 0.693147


def test_the_penalty_of_a_sequence_level_estimator_is_that_of_the_whole_sequence() -> None:
    given = inputs([1.0] * 3, [1.0, 1.0, -1.0], rows=[2, 1], reference=REFERENCE)
    flags = {"beta": 0.5, "kl_estimator": "k1", "kl_in_advantage": True}
    # A - beta (ln 2 + 2 ln 2) for both tokens of the first row
    whole = 1 - 0.5 * 3 * LN2
    for loss in ("RLOO", "ReMax", "OPO", "GSPO"):
        expected = [-whole, -whole, 1.0]
        assert slopes(given, loss, **flags) == pytest.approx(expected, abs=1e-4)
        assert objective(loss, **flags).scope is Scope.SEQUENCE
    # and of the token alone where an advantage is a token's
    own = [-(1 - 0.5 * LN2), -(1 - 0.5 * 2 * LN2), 1.0]
    for loss in ("GRPO", "PPO"):
        assert slopes(given, loss, **flags) == pytest.approx(own, abs=1e-4)


def test_the_penalty_of_what_follows_a_token_comes_before_the_normalization() -> None:
    given = inputs([1.0] * 3, [1.0, 1.0, -1.0], rows=[2, 1], reference=REFERENCE)
    flags = {"beta": 0.5, "kl_estimator": "k1", "kl_in_advantage": True}
    # A - beta KL from the token on: 1 - 1.5 ln 2 = -0.0397, 1 - ln 2 = 0.3069 and -1; their mean
    # is -0.2443, their deviation sqrt((0.2046^2 + 0.5511^2 + 0.7557^2) / 3) = 0.5528
    expected = [-0.3700, -0.9970, 1.3670]
    for loss in ("REINFORCE++", "REINFORCE++-baseline"):
        assert slopes(given, loss, **flags) == pytest.approx(expected, abs=1e-3)
        assert objective(loss, **flags).scope is Scope.BATCH
        order = torch.tensor([1, 2, 0])
        moved = slopes(part(given, order), loss, **flags)
        assert moved == pytest.approx([expected[i] for i in order.tolist()], abs=1e-3)


@pytest.mark.parametrize(
    ("loss", "flags"), [("REINFORCE++-baseline", {}), ("GRPO", {"normalize_advantages": True})]
)
def test_the_normalization_does_not_reinforce_a_failed_turn(
    loss: str, flags: dict[str, object]
) -> None:
    # A right record of a completed and a failed turn, and a wrong one that is much longer.
    advantages = [0.5, 0.0, *[-0.5] * 8]
    mean, deviation = -0.35, (0.85**2 + 0.35**2 + 8 * 0.15**2) ** 0.5 / 10**0.5
    capped = torch.tensor([False, True, *[False] * 8])
    given = replace(inputs([1.0] * 10, advantages, rows=[2, 8]), capped=capped)
    expected = [-(0.5 - mean) / deviation, 0.0, *[-(-0.5 - mean) / deviation] * 8]
    assert slopes(given, loss, **flags) == pytest.approx(expected, abs=1e-4)
    # Where the mean is above 0, the failed turn is discouraged as the normalization says.
    advantages = [0.5, 0.0, *[0.5] * 8]
    mean, deviation = 0.45, 0.15
    given = replace(inputs([1.0] * 10, advantages, rows=[2, 8]), capped=capped)
    assert slopes(given, loss, **flags)[1] == pytest.approx(mean / deviation, abs=1e-4)


def noisy(rows: int, tokens: int, noise: float) -> LossInputs:
    """Rows on policy whose logprobs differ between sampler and trainer by rounding only.

    Every second row has a negative advantage. `noise`: the deviation of one token's difference.
    """
    generator = torch.Generator().manual_seed(0)
    n = rows * tokens
    sequence = torch.arange(rows).repeat_interleave(tokens)
    behaviour = -torch.rand(n, generator=generator) - 0.05
    return LossInputs(
        logprobs=(behaviour + noise * torch.randn(n, generator=generator)).requires_grad_(),
        behaviour_logprobs=behaviour,
        advantages=1.0 - 2.0 * (sequence % 2),
        mask=torch.ones(n, dtype=torch.bool),
        staleness=torch.zeros(n, dtype=torch.int64),
        sequence_tokens=torch.full((n,), float(tokens)),
        sequence=sequence,
    )


def share_of_negative_rows(given: LossInputs, loss: str, **flags: object) -> float:
    """The share of the rows with a negative advantage that have any gradient."""
    share, _ = objective(loss, **flags).share(given, totals_of(given))
    (gradients,) = torch.autograd.grad(share, given.logprobs)
    rows = gradients.view(int(given.sequence[-1]) + 1, -1).abs().sum(dim=1) > 0
    return rows[1::2].float().mean().item()


@pytest.mark.parametrize("loss", ["GSPO", "GSPO-token"])
def test_the_narrow_range_of_gspo_clips_nothing_that_only_rounding_moved(loss: str) -> None:
    for noise in (0.005, 0.02):
        given = noisy(256, 200, noise)
        assert share_of_negative_rows(given, loss) == 1.0
        # around the sampler's policy the deviation of a row's mean, noise / sqrt(200), is beyond it
        assert share_of_negative_rows(given, loss, proximal_policy="behaviour") < 0.85


def test_minirl_weighs_by_the_sampler_and_masks_by_the_old_policy() -> None:
    # pi / mu; with one update a step the old policy is pi, and nothing is masked
    given = inputs([1.5, 0.5, 9.0], [1.0, -1.0, -1.0])
    assert slopes(given, "MINIRL") == [-1.5, 0.5, 5.0]  # the third is truncated at 5
    around_mu = slopes(given, "MINIRL", proximal_policy="behaviour")
    assert around_mu == [0.0, 0.0, 5.0]
    # p = sqrt(mu pi): r = sqrt(1.5) = 1.22 and sqrt(2.25) = 1.5, of which 1.27 masks the second
    stale = inputs([1.5, 2.25], [1.0, 1.0], staleness=[2, 2])
    assert slopes(stale, "MINIRL", proximal_policy="loglinear") == [-1.5, 0.0]


@pytest.mark.parametrize("loss", ["MINIRL", "Dr.GRPO", "RLOO", "ReMax", "OPO"])
def test_a_gradient_does_not_grow_with_the_length_of_the_sequences(loss: str) -> None:
    norms = []
    for tokens in (10, 1000):
        given = noisy(8, tokens, noise=0.0)
        share, _ = objective(loss, normalization_length=tokens).share(given, totals_of(given))
        (gradients,) = torch.autograd.grad(share, given.logprobs)
        # of a parameter that all logprobs of a row depend on alike
        norms.append(gradients.view(8, tokens).sum(dim=1).norm().item())
    # 8 rows of |A| = 1, each with an eighth of the loss: sqrt(8) / 8
    assert norms == pytest.approx([8**0.5 / 8] * 2, rel=1e-4)


def test_the_entropy_bonus_raises_the_entropy() -> None:
    given = random_inputs([3, 2])
    assert given.entropy is not None
    made = objective(entropy_coef=0.1)
    assert made.with_entropy and made.entropy_gradient
    share, _ = made.share(given, totals_of(given))
    (slope,) = torch.autograd.grad(share, given.entropy)
    assert slope.tolist() == pytest.approx([-0.1 / 5] * 5)
    logged = objective(log_entropy=True)
    assert logged.with_entropy and not logged.entropy_gradient


def test_supervised_training_heeds_no_layer_of_advantages_and_ratios() -> None:
    given = inputs([5.0, 0.1], [0.0, -7.0], staleness=[0, 5])
    flags = {"strict_in_bound": True, "advantage_decay": 0.1, "rollout_rs": "token"}
    assert slopes(given, "CrossEntropy", **flags) == [-1.0, -1.0]


# sequences of 1, 3 and 2 tokens
TERMS = torch.tensor([6.0, 1.0, 2.0, 3.0, 4.0, 8.0])
SEQUENCE_TOKENS = torch.tensor([1.0, 3.0, 3.0, 3.0, 2.0, 2.0])
TOTALS = BatchTotals(tokens=6, sequences=3)


@pytest.mark.parametrize(
    ("normalisation", "expected"),
    [
        (Normalisation.TOKEN, 24 / 6),
        (Normalisation.SEQUENCE, (6 + 2 + 6) / 3),
        (Normalisation.CONSTANT, 24 / 4 / 3),
    ],
)
def test_normalisations_are_the_same_under_any_split(
    normalisation: Normalisation, expected: float
) -> None:
    for parts in ([6], [1, 3, 2], [2, 2, 2], [5, 1], [1] * 6):
        shares = [
            normalise(token_losses, tokens, normalisation, TOTALS, length=4).item()
            for token_losses, tokens in zip(
                TERMS.split(parts), SEQUENCE_TOKENS.split(parts), strict=True
            )
        ]
        assert sum(shares) == pytest.approx(expected)
