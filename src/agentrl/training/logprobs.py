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

from agentrl.training.attention import SharedLine, TreeContext
from agentrl.training.batch import MicroBatch

_METHOD = "token_logprobs"


class _WithLogprobs(Protocol):
    def token_logprobs(
        self, batch: MicroBatch, chunk_size: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]: ...


def attach_logprobs(model: PreTrainedModel, line: SharedLine | None = None) -> None:
    """Make `token_logprobs` a forward method of `model`; after `fully_shard`, if that is applied.

    FSDP gathers parameters around registered methods of its root only: the base model and the head
    called from elsewhere would see shards. `line`: how processes share lines, if they do.
    """

    def method(
        self: PreTrainedModel, batch: MicroBatch, chunk_size: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return _forward(self, line, batch, chunk_size, with_entropy)

    setattr(model, _METHOD, types.MethodType(method, model))
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, _METHOD)


def token_logprobs(
    model: PreTrainedModel, batch: MicroBatch, chunk_size: int, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) of the batch's predictions, and that one's entropy.

    Returns logprobs [M] float32, and entropy [M] float32 without gradient if asked for. `model`
    must have been through `attach_logprobs`, and through `use_tree_attention` if the batch is a
    forest.
    """
    return cast(_WithLogprobs, model).token_logprobs(batch, chunk_size, with_entropy)


def _forward(
    model: PreTrainedModel,
    line: SharedLine | None,
    batch: MicroBatch,
    chunk_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    hidden = _hidden(model, line, batch).flatten(0, 1)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    if line is None:
        hidden_MH = hidden.index_select(0, batch.positions)
        return _in_chunks(
            head, hidden_MH, batch.targets, batch.temperatures, chunk_size, with_entropy
        )
    mine, places = line.mine(batch.positions, batch.input_ids.shape[1])
    logprobs, entropy = _in_chunks(
        head, hidden.index_select(0, places), batch.targets[mine], batch.temperatures[mine],
        chunk_size, with_entropy,
    )  # fmt: skip
    count = len(batch.targets)
    return (
        line.collect(logprobs, mine, count),
        None if entropy is None else line.collect(entropy, mine, count),
    )


def _in_chunks(
    head: nn.Module,
    hidden_MH: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    chunk_size: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    if len(targets) <= chunk_size:
        # one chunk: recomputing it would save nothing
        return _chunk(head, hidden_MH, targets, temperatures, with_entropy)
    logprobs, entropies = [], []
    for start in range(0, len(targets), chunk_size):
        part = slice(start, start + chunk_size)
        logprob, entropy = checkpoint(
            _chunk, head, hidden_MH[part], targets[part], temperatures[part], with_entropy,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        logprobs.append(logprob)
        entropies.append(entropy)
    return torch.cat(logprobs), torch.cat(entropies) if with_entropy else None


def _hidden(model: PreTrainedModel, line: SharedLine | None, batch: MicroBatch) -> Tensor:
    """The hidden states [B, T, H] of a batch. Padded lines are causal and need no mask.

    Of a shared line only this process's tokens.
    """
    if batch.tree is None:
        output = model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        )
        return cast(Tensor, output.last_hidden_state)
    tree = TreeContext(batch.tree)
    input_ids, position_ids = batch.input_ids, batch.position_ids
    shared = {}
    if line is not None:
        input_ids, position_ids = line.take(input_ids), line.take(position_ids)
        shared = {"line": line}
    output = model.base_model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, tree=tree, **shared
    )
    if len(tree.layers) != model.config.get_text_config().num_hidden_layers:
        raise ValueError(
            f"{type(model).__name__} did not pass the tree on to the attention of every layer: "
            "train this model with --attention_implementation sdpa"
        )
    return cast(Tensor, output.last_hidden_state)


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
