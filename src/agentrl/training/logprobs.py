"""Logprobs and entropy of chosen tokens, without the `[tokens, vocabulary]` logits ever in full.

The head runs over trained positions only, in chunks whose logits are recomputed in the backward
pass, so that at most one chunk of logits exists at a time.
"""

import types
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from agentrl.training.attention import SharedLine, TreeContext, Trunk
from agentrl.training.batch import MicroBatch, TrunkBatch

_LOGPROBS, _TRUNK = "token_logprobs", "compute_trunk"


class _WithLogprobs(Protocol):
    def token_logprobs(
        self, batch: MicroBatch, chunk_size: int, with_entropy: bool, trunk: Trunk | None
    ) -> tuple[Tensor, Tensor | None]: ...

    def compute_trunk(self, batch: TrunkBatch, trunk: Trunk) -> Tensor: ...


def attach_logprobs(model: PreTrainedModel, line: SharedLine | None = None) -> None:
    """Make `token_logprobs` and `compute_trunk` forward methods of `model`; after `fully_shard`.

    FSDP gathers parameters around registered methods of its root only: the base model and the head
    called from elsewhere would see shards. `line`: how processes share lines, if they do.
    """
    for name, function in ((_LOGPROBS, _logprobs), (_TRUNK, _trunk)):
        setattr(model, name, types.MethodType(partial(function, line), model))
        if isinstance(model, FSDPModule):
            register_fsdp_forward_method(model, name)


def token_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    chunk_size: int,
    with_entropy: bool = False,
    trunk: Trunk | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) of the batch's predictions, and that one's entropy.

    `trunk`: what the batch stands behind, if it does. Returns logprobs [M] float32, and entropy
    [M] float32 without gradient if asked for. `model` must have been through `attach_logprobs`,
    and through `use_tree_attention` if the batch is a forest.
    """
    return cast(_WithLogprobs, model).token_logprobs(batch, chunk_size, with_entropy, trunk)


def compute_trunk(model: PreTrainedModel, batch: TrunkBatch) -> Trunk:
    """The forward pass over a trunk; its backward pass is `Trunk.backward`."""
    trunk = Trunk(batch.tokens)
    # kept out here: FSDP hooks what leaves its method, to gather parameters for the backward pass
    trunk.keep_hidden(cast(_WithLogprobs, model).compute_trunk(batch, trunk))
    return trunk


def _trunk(
    line: SharedLine | None, model: PreTrainedModel, batch: TrunkBatch, trunk: Trunk
) -> Tensor:
    """The trunk's hidden states [1, T, H], whole on each process that shares the line."""
    hidden = _tree_hidden(model, batch, TreeContext(batch.tree, trunk, is_trunk=True, line=line))
    return hidden if line is None else line.gather(hidden)


def _logprobs(
    line: SharedLine | None,
    model: PreTrainedModel,
    batch: MicroBatch,
    chunk_size: int,
    with_entropy: bool,
    trunk: Trunk | None,
) -> tuple[Tensor, Tensor | None]:
    hidden = _hidden(model, batch, trunk, line)
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    chosen = partial(_in_chunks, head, chunk_size, with_entropy)
    positions, targets, temperatures = batch.positions, batch.targets, batch.temperatures
    if line is None:
        return chosen(hidden.index_select(0, positions), targets, temperatures)
    mine, places = line.mine(positions, batch.input_ids.shape[1], batch.trunk_tokens)
    logprobs, entropy = chosen(hidden.index_select(0, places), targets[mine], temperatures[mine])
    collect = partial(line.collect, indices=mine, count=len(targets))
    return collect(logprobs), None if entropy is None else collect(entropy)


def _in_chunks(
    head: nn.Module,
    chunk_size: int,
    with_entropy: bool,
    hidden_MH: Tensor,
    targets: Tensor,
    temperatures: Tensor,
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


def _hidden(
    model: PreTrainedModel, batch: MicroBatch, trunk: Trunk | None, line: SharedLine | None
) -> Tensor:
    """The hidden states [trunk_tokens + B * T, H] of a batch and what it stands behind.

    Of a line that is shared, only this process's tokens.
    """
    if batch.tree is None:  # padded lines are causal and need no mask
        output = model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
        )
        return cast(Tensor, output.last_hidden_state).flatten(0, 1)
    hidden = _tree_hidden(model, batch, TreeContext(batch.tree, trunk, line=line)).flatten(0, 1)
    return hidden if trunk is None else trunk.before_hidden(hidden)


def _tree_hidden(
    model: PreTrainedModel, batch: MicroBatch | TrunkBatch, tree: TreeContext
) -> Tensor:
    """The hidden states [1, T, H] of a line, or of a process's part of it."""
    input_ids, position_ids = batch.input_ids, batch.position_ids
    if tree.line is not None:
        input_ids, position_ids = tree.line.take(input_ids), tree.line.take(position_ids)
    output = model.base_model(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, tree=tree
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
