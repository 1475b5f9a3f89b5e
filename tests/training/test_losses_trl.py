"""Losses against those of TRL on the same random rows: value and gradient.

TRL's loss is a method of its trainer: here it is called on an object that has what the method
reads, with logprobs given instead of a model.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from loss_inputs import random_inputs
from torch import Tensor

from agentrl.configs import LossConfig
from agentrl.training.losses import BatchTotals, LossInputs
from agentrl.training.step.objective import Objective

LENGTHS = [7, 3, 12, 1, 9]
LONGEST = 16  # TRL's max_completion_length


def padded(values: Tensor) -> Tensor:
    """[rows, longest] of [N], 0 behind each row's end."""
    return torch.nn.utils.rnn.pad_sequence(list(values.split(LENGTHS)), batch_first=True)


def trl_loss(
    given: LossInputs,
    trainer: str = "GRPOTrainer",
    **arguments: object,
) -> Tensor:
    """TRL 1.16's loss of these rows, differentiable by `given.logprobs`."""
    import trl  # takes seconds, which every worker would spend to collect this module

    args = trl.GRPOConfig(
        output_dir="unused", use_cpu=True, bf16=False, report_to="none", **arguments
    )  # type: ignore[arg-type]
    logprobs = padded(given.logprobs)
    mask = padded(given.mask.float())
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=False, gather=lambda x: x,
        reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x,
    )  # fmt: skip
    entropies = None if given.entropy is None else padded(given.entropy)
    held = SimpleNamespace(
        args=args, model=SimpleNamespace(training=True), accelerator=accelerator,
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, entropies, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        importance_sampling_level=args.importance_sampling_level, beta=args.beta,
        loss_type=args.loss_type, epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        use_vllm=False, vllm_importance_sampling_correction=False,
        max_completion_length=LONGEST, current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=args.entropy_coef > 0, use_adaptive_entropy=False,
        entropy_coef=args.entropy_coef,
        _metrics={"train": defaultdict(list)},
    )  # fmt: skip
    advantages = torch.stack([line[0] for line in given.advantages.split(LENGTHS)])
    reference = given.reference_logprobs
    assert reference is not None
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask.int(),
        "advantages": advantages,
        "old_per_token_logps": padded(given.behaviour_logprobs),
        "ref_per_token_logps": padded(reference),
        "old_logps": logprobs.detach().sum(dim=1),  # RLOO's: on policy
        "num_items_in_batch": mask.sum(),
    }
    loss = getattr(trl, trainer)._compute_loss(held, held.model, inputs)
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs", "scale"),
    [
        ({"token_level_loss": False}, {"loss_type": "grpo"}, 1.0),
        ({"token_level_loss": True}, {"loss_type": "bnpo"}, 1.0),
        ({"loss_calculator": "DAPO"}, {"loss_type": "dapo", "epsilon_high": 0.28}, 1.0),
        (
            {"loss_calculator": "Dr.GRPO", "normalization_length": LONGEST},
            {"loss_type": "dr_grpo"},
            1.0,
        ),
        (
            {"loss_calculator": "GSPO", "proximal_policy": "behaviour"},
            {"loss_type": "grpo", "importance_sampling_level": "sequence",
             "epsilon": 3e-4, "epsilon_high": 4e-4},
            1.0,
        ),
        (
            {"loss_calculator": "GSPO", "proximal_policy": "behaviour", "epsilon": 0.2,
             "clip_ratio_high": 0.3},
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.3},
            1.0,
        ),
        (
            {"loss_calculator": "CISPO", "clip_ratio_high": 1.0},
            {"loss_type": "cispo", "epsilon_high": 2.0},
            1.0,
        ),
        ({"loss_calculator": "SAPO"}, {"loss_type": "sapo"}, 1.0),
        (
            {"rollout_is_threshold": 1.3, "epsilon_higher": 0.3},
            {"loss_type": "dapo", "delta": 1.3, "epsilon_high": 0.5},
            1.0,
        ),
        ({"beta": 0.2}, {"loss_type": "dapo", "beta": 0.2, "use_bias_correction_kl": False}, 1.0),
        ({"entropy_coef": 0.1}, {"loss_type": "dapo", "entropy_coef": 0.1}, 1.0),
    ],
)  # fmt: skip
def test_loss_and_gradients_are_trls(
    ours: dict[str, object], theirs: dict[str, object], scale: float
) -> None:
    for seed in range(5):
        given = random_inputs(LENGTHS, seed)
        totals = BatchTotals(tokens=sum(LENGTHS), sequences=len(LENGTHS))
        loss, _ = Objective(LossConfig(**ours)).share(given, totals)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(loss, given.logprobs)
        reference = trl_loss(given, **theirs)
        (expected,) = torch.autograd.grad(reference, given.logprobs)
        assert loss.item() * scale == pytest.approx(reference.item(), rel=1e-4, abs=1e-6)
        torch.testing.assert_close(gradient * scale, expected, rtol=1e-4, atol=1e-7)
        assert gradient.abs().sum() > 0


@pytest.mark.slow
def test_on_policy_the_gradient_of_rloo_is_trls() -> None:
    """TRL clips the ratio of whole sequences, which on policy is 1, as is that of each token."""
    given = random_inputs(LENGTHS, spread=0.0)
    totals = BatchTotals(tokens=sum(LENGTHS), sequences=len(LENGTHS))
    loss, _ = Objective(LossConfig(loss_calculator="RLOO")).share(given, totals)
    (gradient,) = torch.autograd.grad(loss, given.logprobs)
    (expected,) = torch.autograd.grad(trl_loss(given, "RLOOTrainer"), given.logprobs)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)
