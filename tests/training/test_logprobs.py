"""Chunked logprobs against full logits."""

import pytest
import torch
from tiny import VOCABULARY, tiny_model
from torch import Tensor
from transformers import Qwen3ForCausalLM

from agentrl.training.data.batch import MicroBatch
from agentrl.training.model.logprobs import attach_logprobs, token_logprobs

IDS = torch.randint(0, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.tensor([0, 3, 4, 5, 15, 17, 20, 33, 34, 40, 48, 49])
TARGETS = IDS.flatten()[POSITIONS + 1]
TEMPERATURES = torch.tensor([1.0, 0.7, 1.3]).repeat_interleave(4)


def batch_of(
    input_ids: Tensor, positions: Tensor, targets: Tensor, temperatures: Tensor
) -> MicroBatch:
    """Padded lines, and a batch that trains each prediction once."""
    zeros = torch.zeros(len(targets))
    return MicroBatch(
        input_ids=input_ids,
        position_ids=torch.arange(input_ids.shape[1]).expand(input_ids.shape),
        tree=None,
        positions=positions,
        targets=targets,
        temperatures=temperatures,
        prediction=torch.arange(len(targets)),
        sequence=zeros.long(),
        place=zeros.long(),
        columns={"logprobs": zeros, "advantages": zeros, "staleness": zeros.long()},
        sequence_tokens=zeros + 1,
        mask=zeros == 0,
    )


BATCH = batch_of(IDS, POSITIONS, TARGETS, TEMPERATURES)


def full(model: Qwen3ForCausalLM) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=IDS, use_cache=False).logits.flatten(0, 1)[POSITIONS]
    log_p = torch.log_softmax(logits / TEMPERATURES[:, None], -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, TARGETS[:, None])[:, 0], entropy


def gradients(model: Qwen3ForCausalLM, logprobs: Tensor) -> list[Tensor]:
    weights = torch.arange(1.0, len(logprobs) + 1)
    return list(torch.autograd.grad((logprobs * weights).sum(), list(model.parameters())))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 5, 12, 4096])
def test_chunks_equal_full_logits_in_values_and_gradients(tied: bool, chunk_size: int) -> None:
    model = tiny_model(tied=tied)
    expected, expected_entropy = full(model)
    attach_logprobs(model)
    logprobs, entropy = token_logprobs(model, BATCH, chunk_size, with_entropy=True)
    assert entropy is not None and not entropy.requires_grad
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(gradients(model, logprobs), gradients(model, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("chunk_size", [5, 4096])
def test_an_entropy_that_is_trained_has_the_gradient_of_full_logits(chunk_size: int) -> None:
    model = tiny_model()
    _, expected = full(model)
    attach_logprobs(model)
    _, entropy = token_logprobs(model, BATCH, chunk_size, True, entropy_gradient=True)
    assert entropy is not None
    for ours, theirs in zip(gradients(model, entropy), gradients(model, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_only_trained_positions_go_through_the_head_and_never_more_than_a_chunk() -> None:
    model = tiny_model()
    attach_logprobs(model)
    sizes: list[int] = []
    head = model.get_output_embeddings()
    head.register_forward_hook(lambda module, args, output: sizes.append(output.shape[-2]))
    logprobs, _ = token_logprobs(model, BATCH, 5)
    assert sizes == [5, 5, 2]
    logprobs.sum().backward()
    assert sum(sizes) == 2 * len(TARGETS), "the backward pass recomputes each chunk once"
    assert max(sizes) == 5


def test_what_is_padded_on_the_right_changes_nothing() -> None:
    model = tiny_model()
    attach_logprobs(model)
    line = IDS[:1, :10]
    padded = torch.cat([line, torch.zeros(1, 7, dtype=torch.int64)], dim=1)
    positions, targets, temperatures = torch.arange(9), line[0, 1:], torch.ones(9)
    alone, _ = token_logprobs(model, batch_of(line, positions, targets, temperatures), 64)
    beside, _ = token_logprobs(model, batch_of(padded, positions, targets, temperatures), 64)
    torch.testing.assert_close(alone, beside, atol=1e-5, rtol=1e-5)
