"""Losses on numbers computed by hand."""

import math
from dataclasses import replace

import pytest
import torch
from loss_inputs import HALF, gradient, inputs, random_inputs

from agentrl.configs import LossConfig
from agentrl.configs.losses import LOSSES
from agentrl.training.losses import LOSS_FUNCTIONS, LossInputs, TokenLoss
from agentrl.training.losses.divergence import kl_divergence

RATIOS, ADVANTAGES = [1.0, 1.5, 1.5, 0.5, 0.5], [2.0, 2.0, -2.0, 2.0, -2.0]


def loss_of(name: str, given: LossInputs, **flags: object) -> TokenLoss:
    config = LossConfig(loss_calculator=name, **flags)  # type: ignore[arg-type]
    return LOSS_FUNCTIONS[name](given, config)


def test_every_name_has_a_function_and_defaults() -> None:
    assert set(LOSS_FUNCTIONS) == set(LOSSES)


def test_the_surrogate_clips_the_ratio_where_the_advantage_pushes_outward() -> None:
    given = inputs(RATIOS, ADVANTAGES)
    loss = loss_of("GRPO", given, epsilon=0.2, clip_ratio_high=0.3)
    # r A, or clip(r) A = 1.3 * 2 and 0.8 * -2 where that is smaller
    assert loss.token_losses.tolist() == pytest.approx([-2.0, -2.6, 3.0, -1.0, 1.6], abs=1e-6)
    assert loss.clipped_high.tolist() == [False, True, False, False, False]
    assert loss.clipped_low.tolist() == [False, False, False, False, True]
    # d(-r A)/d log pi = -r A where it is not clipped
    assert gradient(loss.token_losses, given) == [-2.0, 0.0, 3.0, -1.0, 0.0]


@pytest.mark.parametrize("name", ["Dr.GRPO", "DAPO", "REINFORCE++", "REINFORCE++-baseline", "PPO"])
def test_what_shares_the_surrogate_differs_by_its_clip_range_only(name: str) -> None:
    given = inputs(RATIOS, ADVANTAGES)
    low, high = LossConfig(loss_calculator=name).clip_range
    same = loss_of("GRPO", given, epsilon=1 - low, clip_ratio_high=high - 1)
    assert loss_of(name, given).token_losses.tolist() == same.token_losses.tolist()


def test_the_upper_clip_range_is_the_lower_one_unless_it_is_given_or_the_paper_has_one() -> None:
    assert LossConfig(epsilon=0.1).clip_range == pytest.approx((0.9, 1.1))
    assert LossConfig(epsilon=0.1, clip_ratio_high=0.3).clip_range == pytest.approx((0.9, 1.3))
    assert LossConfig(loss_calculator="DAPO").clip_range == pytest.approx((0.8, 1.28))
    assert LossConfig(loss_calculator="GSPO").clip_range == pytest.approx((0.9997, 1.0004))


def test_gspo_clips_the_geometric_mean_of_a_sequence() -> None:
    # rows of 2 and 3: s = sqrt(2 * 1/2) = 1, and (1.5^3)^(1/3) = 1.5, which is clipped to 1.2
    given = inputs([2.0, 0.5, 1.5, 1.5, 1.5], [1.0, 1.0, 1.0, 1.0, 1.0], rows=[2, 3])
    loss = loss_of("GSPO", given, epsilon=0.2, clip_ratio_high=0.2)
    assert loss.token_losses.tolist() == pytest.approx([-1.0, -1.0, -1.2, -1.2, -1.2])
    assert loss.clipped_high.tolist() == [False, False, True, True, True]
    # d(-2 s A)/d log pi_t = -2 s A / 2: each of the two token_losses has the whole s
    assert gradient(loss.token_losses, given) == [-1.0, -1.0, 0.0, 0.0, 0.0]


def test_gspo_leaves_untrained_tokens_out_of_the_mean() -> None:
    given = inputs([2.0, 0.5, 8.0], [1.0, 1.0, 1.0], mask=[True, True, False])
    assert loss_of("GSPO", given).ratio.tolist()[:2] == pytest.approx([1.0, 1.0])


def test_the_token_variant_of_gspo_has_its_gradient_where_a_sequence_has_one_advantage() -> None:
    given = random_inputs([3, 5, 1, 4])
    gradients = []
    for name in ("GSPO", "GSPO-token"):
        loss = loss_of(name, given, epsilon=0.2, clip_ratio_high=0.3)
        assert loss.token_losses.tolist() == pytest.approx((-torch.minimum(
            loss.ratio * given.advantages, loss.ratio.clamp(0.8, 1.3) * given.advantages
        )).tolist(), abs=1e-6)  # fmt: skip
        gradients.append(gradient(loss.token_losses / given.sequence_tokens, given))
    assert gradients[0] == pytest.approx(gradients[1], abs=2e-5)


def test_the_token_variant_of_gspo_gives_each_token_the_gradient_of_its_own_advantage() -> None:
    given = inputs([2.0, 0.5], [1.0, 3.0])
    assert gradient(loss_of("GSPO-token", given).token_losses, given) == [-1.0, -3.0]


def test_gspo_reinforces_no_malformed_turn_of_a_right_record() -> None:
    # A row of a completed turn, a malformed one and an untrained token, and one of a single
    # advantage off policy: s = sqrt(1.2) there.
    given = inputs(
        [1.0, 1.0, 1.0, 5.0, 1.2, 1.0], [1.0, 1.0, 0.0, 9.0, 1.0, 1.0], rows=[4, 2],
        mask=[True, True, True, False, True, True],
    )  # fmt: skip
    found = loss_of("GSPO", given, epsilon=0.2, clip_ratio_high=0.2)
    s = 1.2**0.5
    slopes = gradient(torch.where(given.mask, found.token_losses, 0.0), given)
    assert slopes == pytest.approx([-1.0, -1.0, 0.0, 0.0, -s, -s], abs=1e-4)
    assert found.ratio.tolist() == pytest.approx([1.0, 1.0, 1.0, 1.0, s, s])


def test_minirl_weighs_the_policy_gradient_by_the_ratio_to_the_sampler() -> None:
    given = inputs(RATIOS, ADVANTAGES)
    loss = loss_of("MINIRL", given)
    log_pi = given.logprobs.tolist()
    expected = [-r * a * p for r, a, p in zip(RATIOS, ADVANTAGES, log_pi, strict=True)]
    assert loss.token_losses.tolist() == pytest.approx(expected, abs=1e-6)
    # the weight is a constant: the gradient is -r A
    assert gradient(loss.token_losses, given) == [-2.0, -3.0, 3.0, -1.0, 1.0]


@pytest.mark.parametrize("name", ["RLOO", "ReMax", "OPO"])
def test_reinforce_weighs_the_policy_gradient_and_masks_nothing(name: str) -> None:
    given = inputs(RATIOS, ADVANTAGES)
    assert gradient(loss_of(name, given).token_losses, given) == [-2.0, -3.0, 3.0, -1.0, 1.0]


def test_cispo_clips_the_weight_from_above_and_keeps_every_gradient() -> None:
    given = inputs([1.0, 9.0, 9.0, 0.01], [1.0, 1.0, -1.0, -1.0])
    loss = loss_of("CISPO", given, clip_ratio_high=4.0)
    assert gradient(loss.token_losses, given) == [-1.0, -5.0, 5.0, 0.01]
    assert loss.clipped_high.tolist() == [False, True, True, False]


def test_gpg_is_the_policy_gradient_itself() -> None:
    given = inputs([1.0, 9.0, 0.1], [1.0, 2.0, -3.0])
    assert gradient(loss_of("GPG", given).token_losses, given) == [-1.0, -2.0, 3.0]


def test_sapo_gates_the_ratio_softly() -> None:
    given = inputs([1.0, 3.0, 3.0], [1.0, 1.0, -1.0])
    loss = loss_of("SAPO", given, sapo_temperature_pos=1.0, sapo_temperature_neg=2.0)
    # 4 / tau * sigmoid(tau (r - 1)): 4 * 1/2, 4 * sigmoid(2), 2 * sigmoid(4)
    sigmoid_2, sigmoid_4 = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-4))
    assert loss.token_losses.tolist() == pytest.approx([-2.0, -4 * sigmoid_2, 2 * sigmoid_4])
    # 4 r sigmoid'(tau (r - 1)) A: 1 on policy
    slopes = [1.0, 12 * sigmoid_2 * (1 - sigmoid_2), -12 * sigmoid_4 * (1 - sigmoid_4)]
    assert gradient(loss.token_losses, given) == pytest.approx([-s for s in slopes], abs=1e-5)


def covariances() -> LossInputs:
    """Eight tokens on policy; (log pi - mean) (A - mean A) by hand: logprobs -1 ... -8, mean -4.5,
    advantages 4, 3, ... with mean 0."""
    logprobs = torch.arange(-1.0, -9.0, -1.0)
    advantages = torch.tensor([4.0, 3.0, 0.0, 0.0, 0.0, 0.0, -2.0, -5.0])
    given = inputs([1.0] * 8, advantages.tolist())
    return replace(given, logprobs=logprobs.requires_grad_(), behaviour_logprobs=logprobs.detach())


def test_clip_cov_takes_the_gradient_from_tokens_of_high_covariance() -> None:
    # 3.5 * 4 = 14, 2.5 * 3 = 7.5, 0 ..., -2.5 * -2 = 5, -3.5 * -5 = 17.5: only 7.5 is in (5, 14)
    given = covariances()
    loss = loss_of("Clip-Cov", given, clip_cov_lb=5.0, clip_cov_ub=14.0)
    assert gradient(loss.token_losses, given) == [-4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 5.0]
    assert loss.clipped_high.tolist() == [False, True] + [False] * 6


def test_clip_cov_draws_as_many_as_its_share_whatever_the_order_of_tokens() -> None:
    given = covariances()
    flags = {"clip_cov_ratio": 0.25, "clip_cov_lb": 1.0, "clip_cov_ub": 100.0}
    drawn = loss_of("Clip-Cov", given, **flags).clipped_high
    assert drawn.sum() == 2  # a quarter of 8, of the 4 candidates
    order = torch.tensor([3, 0, 7, 1, 6, 2, 5, 4])
    values = {name: v[order] for name, v in vars(given).items() if v is not None}
    again = loss_of("Clip-Cov", LossInputs(**values), **flags).clipped_high
    assert again.tolist() == drawn[order].tolist()


def test_clip_cov_of_a_batch_without_candidates_is_the_surrogate() -> None:
    given = random_inputs([4, 4])
    config = {"clip_cov_lb": 1e6, "clip_cov_ub": 1e7}
    ours, same = loss_of("Clip-Cov", given, **config), loss_of("GRPO", given)
    assert ours.token_losses.tolist() == same.token_losses.tolist()


def test_kl_cov_adds_a_penalty_at_the_tokens_of_highest_covariance() -> None:
    given = covariances()
    moved = replace(given, behaviour_logprobs=given.behaviour_logprobs - math.log(2))  # r = 2
    loss = loss_of("KL-Cov", moved, kl_cov_ratio=0.125, ppo_kl_coef=0.5)
    expected = (-2.0 * given.advantages).tolist()
    expected[7] += 0.5 * math.log(2)  # covariance 17.5, the one of 8 tokens
    assert loss.token_losses.tolist() == pytest.approx(expected, abs=1e-5)


def test_kl_cov_at_a_ratio_of_1_is_the_plain_policy_gradient() -> None:
    given = covariances()
    loss = loss_of("KL-Cov", given, kl_cov_ratio=0.25, ppo_kl_coef=9.0)
    assert loss.token_losses.tolist() == (-given.advantages).tolist()
    assert gradient(loss.token_losses, given) == (-given.advantages).tolist()
    # where the policy has moved, r = 2, the penalty's gradient is its coefficient, towards r = 1
    moved = replace(given, behaviour_logprobs=given.behaviour_logprobs - math.log(2))
    loss = loss_of("KL-Cov", moved, kl_cov_ratio=0.25, ppo_kl_coef=9.0)
    expected = (-2.0 * given.advantages).tolist()
    expected[0] += 9.0  # covariances 14 and 17.5, two of 8 tokens
    expected[7] += 9.0
    assert gradient(loss.token_losses, moved) == pytest.approx(expected, abs=1e-5)


def test_cross_entropy_is_the_negative_logprob() -> None:
    given = inputs([0.2, 1.8], [5.0, -5.0])
    loss = loss_of("CrossEntropy", given)
    assert loss.token_losses.tolist() == pytest.approx([-math.log(0.1), -math.log(0.9)])
    assert gradient(loss.token_losses, given) == [-1.0, -1.0]


def test_the_cap_on_the_weight_bounds_a_bad_token_of_the_surrogate() -> None:
    given = inputs([10.0, 10.0], [-1.0, 1.0])
    loss = loss_of("GRPO", given, rollout_is_threshold=3.0)
    assert loss.token_losses.tolist() == pytest.approx([3.0, -1.2])
    assert gradient(loss.token_losses, given) == [0.0, 0.0]


def test_the_cap_truncates_the_weight_of_minirl_and_keeps_its_gradient() -> None:
    given = inputs([10.0], [-1.0])
    loss = loss_of("MINIRL", given, rollout_is_threshold=3.0)
    assert gradient(loss.token_losses, given) == [3.0]


@pytest.mark.parametrize(
    ("name", "capped"),
    [("GRPO", 0.0), ("GSPO", 0.0), ("MINIRL", 3.0), ("CISPO", 3.0), ("RLOO", 3.0), ("KL-Cov", 0.0)],
)
def test_dual_clip_caps_the_ratio_of_bad_tokens_only(name: str, capped: float) -> None:
    given = inputs([4.0, 4.0], [-1.0, 1.0], rows=[1, 1])
    flags = {"kl_cov_ratio": 0.0}  # its penalty has a gradient of its own
    plain, dual = loss_of(name, given, **flags), loss_of(name, given, **flags, dual_clip=3.0)
    assert gradient(dual.token_losses, given)[0] == capped
    assert gradient(dual.token_losses, given)[1] == gradient(plain.token_losses, given)[1]
    if capped == 0.0:  # the value is c |A|, as in the paper
        assert dual.token_losses[0].item() == pytest.approx(3.0)


@pytest.mark.parametrize("flag", ["rollout_is_threshold", "dual_clip"])
@pytest.mark.parametrize("name", ["GRPO", "KL-Cov", "RLOO"])
def test_a_cap_of_one_keeps_the_whole_gradient_of_what_is_on_policy(name: str, flag: str) -> None:
    given = inputs([1.0], [-1.0])
    loss = loss_of(name, given, kl_cov_ratio=0.0, **{flag: 1.0})
    assert gradient(loss.token_losses, given) == [1.0]


@pytest.mark.parametrize("name", ["GRPO", "GSPO", "GSPO-token", "Clip-Cov"])
def test_beta1_and_beta2_keep_a_bounded_gradient_of_what_is_clipped(name: str) -> None:
    given = inputs([1.0, 1.5, 0.5], [2.0, 2.0, -2.0], rows=[1, 1, 1])
    flags = {"epsilon": 0.2, "clip_ratio_high": 0.3}
    if name == "Clip-Cov":
        flags |= {"clip_cov_lb": 1e6, "clip_cov_ub": 1e7}
    assert gradient(loss_of(name, given, **flags).token_losses, given) == [-2.0, 0.0, 0.0]
    loss = loss_of(name, given, **flags, beta1=0.5, beta2=0.25)
    # beta2 (1 + clip_ratio_high) A = 0.25 * 1.3 * 2 and beta1 (1 - epsilon) A = 0.5 * 0.8 * 2
    assert gradient(loss.token_losses, given) == [-2.0, -0.65, 0.8]


def test_estimates_of_the_divergence_by_hand() -> None:
    logprobs = torch.tensor([HALF, HALF]).requires_grad_()
    reference = HALF - torch.tensor([2.0, 0.5]).log()
    d = math.log(2)
    expected = {
        "k1": ([d, -d], [1.0, 1.0]),
        "k2": ([d * d / 2, d * d / 2], [d, -d]),
        "k3": ([0.5 - 1 + d, 2.0 - 1 - d], [0.5, -1.0]),
        "abs": ([d, d], [1.0, -1.0]),
    }
    for estimator, (values, slopes) in expected.items():
        estimate = kl_divergence(logprobs, reference, estimator)
        assert estimate.tolist() == pytest.approx(values, abs=1e-6)
        (grad,) = torch.autograd.grad(estimate.sum(), logprobs)
        assert grad.tolist() == pytest.approx(slopes, abs=1e-6)
