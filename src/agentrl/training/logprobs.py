"""Logprobs and entropy of chosen tokens, without the `[tokens, vocabulary]` logits ever in full.

The head runs over trained positions only, in chunks whose logits are recomputed in the backward
pass, so that at most one chunk of logits exists at a time.
"""

import types
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

_METHOD = "token_logprobs"


class _WithLogprobs(Protocol):
    def token_logprobs(
        self,
        input_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        chunk_size: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]: ...


def attach_logprobs(model: PreTrainedModel) -> None:
    """Make `token_logprobs` a forward method of `model`; after `fully_shard`, if that is applied.

    FSDP gathers parameters around registered methods of its root only: the base model and the head
    called from elsewhere would see shards.
    """
    setattr(model, _METHOD, types.MethodType(_forward, model))
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, _METHOD)


def token_logprobs(
    model: PreTrainedModel,
    input_ids: Tensor,
    positions: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    chunk_size: int,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) of `targets`, and the entropy of that distribution.

    `input_ids` [B, T], right padded: attention is causal and no mask is passed, so that a padded
    token is seen by nobody and attention takes its fast path. `positions` [N] index the flattened
    [B * T] hidden states; each predicts its entry of `targets` [N] at its entry of `temperatures`
    [N]. Returns logprobs [N] float32, and entropy [N] float32 without gradient if asked for.
    `model` must have been through `attach_logprobs`.
    """
    return cast(_WithLogprobs, model).token_logprobs(
        input_ids, positions, targets, temperatures, chunk_size, with_entropy
    )


def _forward(
    self: PreTrainedModel,
    input_ids: Tensor,
    positions: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    chunk_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    hidden = self.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    hidden_NH = hidden.flatten(0, 1).index_select(0, positions)
    head = self.get_output_embeddings()
    assert isinstance(head, nn.Module)
    if len(targets) <= chunk_size:
        # one chunk: recomputing it would save nothing
        return _chunk(head, hidden_NH, targets, temperatures, with_entropy)
    logprobs, entropies = [], []
    for start in range(0, len(targets), chunk_size):
        part = slice(start, start + chunk_size)
        logprob, entropy = checkpoint(
            _chunk, head, hidden_NH[part], targets[part], temperatures[part], with_entropy,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _chunk(
    head: nn.Module, hidden_NH: Tensor, targets: Tensor, temperatures: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logits_NV = head(hidden_NH).float() / temperatures[:, None]
    log_z = torch.logsumexp(logits_NV, dim=-1)
    logprobs = logits_NV.gather(-1, targets[:, None]).squeeze(-1) - log_z
    if not with_entropy:
        return logprobs, None
    with torch.no_grad():
        probabilities_NV = torch.softmax(logits_NV, dim=-1)
        entropy = log_z - (probabilities_NV * logits_NV).sum(dim=-1)
    return logprobs, entropy
