"""The head in bfloat16 and in float32, against float32 throughout and against transformers."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from tiny import tiny_model
from torch import Tensor, nn

from agentrl.configs import ComputeConfig
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.batch import collate_forest
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.head import HeadOptions, head_logprobs
from agentrl.training.model.logprobs import token_logprobs
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import make_mesh

TOKENS, WIDTH, VOCABULARY = 1024, 32, 128
GENERATOR = torch.Generator().manual_seed(0)
STATES = torch.randn(TOKENS, WIDTH, generator=GENERATOR).bfloat16()
WEIGHT = (0.3 * torch.randn(VOCABULARY, WIDTH, generator=GENERATOR)).bfloat16()
TARGETS = torch.randint(VOCABULARY, (TOKENS,), generator=GENERATOR)


def gradients(
    dtype: torch.dtype, options: HeadOptions, *, of_entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, and the gradients of their mean (or the entropies') by weights and states."""
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = nn.Parameter(WEIGHT.to(dtype))
    states = STATES.clone().to(dtype).requires_grad_()
    logprobs, entropy = head_logprobs(head, states, TARGETS, torch.ones(TOKENS), options)
    chosen = entropy if of_entropy else logprobs
    assert chosen is not None
    chosen.mean().backward()
    assert head.weight.grad is not None and states.grad is not None
    assert head.weight.grad.dtype == states.grad.dtype == dtype
    return logprobs.detach(), head.weight.grad.float(), states.grad.float()


def distance(ours: Tensor, exact: Tensor) -> float:
    """The norm of the difference, relative to the exact one."""
    return ((ours - exact).norm() / exact.norm()).item()


def test_the_error_of_a_gradient_in_bfloat16_does_not_grow_with_the_number_of_chunks() -> None:
    _, exact, _ = gradients(torch.float32, HeadOptions(TOKENS))
    for chunks in (1, 16, 256):
        _, ours, _ = gradients(torch.bfloat16, HeadOptions(TOKENS // chunks))
        # A sum in bfloat16 is off by 0.5% after 16 chunks and by 1.9% after 256.
        assert distance(ours, exact) < 0.004


@pytest.mark.parametrize("chunk_size", [TOKENS, 100])
def test_a_head_in_float32_has_the_logprobs_of_float32_over_the_same_weights(
    chunk_size: int,
) -> None:
    exact, exact_weight, exact_states = gradients(torch.float32, HeadOptions(TOKENS))
    rounded, _, _ = gradients(torch.bfloat16, HeadOptions(chunk_size))
    assert (rounded - exact).abs().max() > 5e-3
    ours, weight, states = gradients(torch.bfloat16, HeadOptions(chunk_size, fp32=True))
    torch.testing.assert_close(ours, exact, atol=1e-5, rtol=1e-5)
    # rounded once, when they leave the head: half a unit of 8 binary digits
    assert distance(weight, exact_weight) < 0.002
    assert distance(states, exact_states) < 0.002


def test_entropies_of_a_head_in_float32_have_their_gradient() -> None:
    whole = HeadOptions(TOKENS, entropy=True, entropy_gradient=True)
    _, exact, _ = gradients(torch.float32, whole, of_entropy=True)
    chunked = HeadOptions(100, entropy=True, entropy_gradient=True, fp32=True)
    _, ours, _ = gradients(torch.bfloat16, chunked, of_entropy=True)
    assert distance(ours, exact) < 0.002


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_size", [4, 64])
def test_only_the_head_of_a_sharded_model_computes_in_float32(tied: bool, chunk_size: int) -> None:
    model = tiny_model(tied=tied)
    compute = ComputeConfig(bf16=True, fp32_head=True)
    prepare_model(model, make_mesh(Accelerator(cpu=True)), compute)
    line = TokenTree.line(np.arange(2, 12), mask=np.arange(10) > 0)
    batch = collate_forest([TrainingSequence(line, temperature=0.7, row_tokens=9)], [0])
    logprobs, _ = token_logprobs(model, batch, chunk_size)
    reference = tiny_model(tied=tied)
    for weight in reference.parameters():  # not `bfloat16()`, which rounds the rotary buffers too
        weight.data = weight.data.bfloat16()
    states = reference.model(input_ids=torch.arange(2, 12)[None]).last_hidden_state[0, :9]
    assert states.dtype == torch.bfloat16
    logits = states.float() @ reference.lm_head.weight.float().T
    expected = torch.log_softmax(logits / 0.7, -1).gather(-1, torch.arange(3, 12)[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=1e-4)
    logprobs.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
