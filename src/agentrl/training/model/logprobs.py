"""Logprobs and entropy of given tokens without materialising all `[tokens, vocabulary]` logits.

The head runs over trained positions only, in chunks (`head`). The backward pass recomputes the
logits of a chunk, so that at most one chunk of logits exists at a time.
"""

import types
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from transformers import PreTrainedModel

from agentrl.training.attention import SharedLine, SharedPrefix, TreeContext
from agentrl.training.data.batch import MicroBatch, SharedPrefixBatch
from agentrl.training.model.head import HeadOptions, head_logprobs
from agentrl.training.model.own_logits import OwnHead, base_model

_LOGPROBS, _PREFIX = "token_logprobs", "compute_prefix"


class _WithLogprobs(Protocol):
    def token_logprobs(
        self,
        batch: MicroBatch,
        chunk_size: int,
        with_entropy: bool,
        entropy_gradient: bool,
        prefix: SharedPrefix | None,
    ) -> tuple[Tensor, Tensor | None]: ...

    def compute_prefix(self, batch: SharedPrefixBatch, prefix: SharedPrefix) -> Tensor: ...


def attach_logprobs(
    model: PreTrainedModel, line: SharedLine | None = None, *, fp32_head: bool = False
) -> None:
    """Make `token_logprobs` and `compute_prefix` forward methods of `model`, after `fully_shard`.

    FSDP gathers parameters only around registered methods of its root; otherwise base model and
    head would see shards. `line`: this process's part of lines under context parallelism, else
    None. `fp32_head`: see `head`.
    """
    methods: dict[str, Callable[..., Any]] = {
        _LOGPROBS: partial(_logprobs, OwnHead(model), line, fp32_head),
        _PREFIX: partial(_prefix, line),
    }
    for name, function in methods.items():
        setattr(model, name, types.MethodType(function, model))
        if isinstance(model, FSDPModule):
            register_fsdp_forward_method(model, name)


def token_logprobs(
    model: PreTrainedModel,
    batch: MicroBatch,
    chunk_size: int,
    with_entropy: bool = False,
    prefix: SharedPrefix | None = None,
    *,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """log softmax(logits / temperature) of the batch's predictions, and its entropy.

    `prefix`: the shared prefix that the batch follows, if any. Returns logprobs [M] float32, and
    with `with_entropy` the entropy [M] float32. `entropy_gradient` makes the entropy
    differentiable, at the cost of another chunk of probabilities in the backward pass. `model` must
    be prepared by `attach_logprobs`, and by `use_tree_attention` for a forest.
    """
    return cast(_WithLogprobs, model).token_logprobs(
        batch, chunk_size, with_entropy, entropy_gradient, prefix
    )


def compute_prefix(model: PreTrainedModel, batch: SharedPrefixBatch) -> SharedPrefix:
    """Run the forward pass over a shared prefix. `SharedPrefix.backward` is its backward pass."""
    prefix = SharedPrefix(batch.tokens, batch.input_ids.shape[1])
    # Kept outside of the method, whose outputs FSDP hooks to gather parameters for the backward.
    prefix.keep_hidden(cast(_WithLogprobs, model).compute_prefix(batch, prefix))
    return prefix


def _prefix(
    line: SharedLine | None, model: PreTrainedModel, batch: SharedPrefixBatch, prefix: SharedPrefix
) -> Tensor:
    tree = TreeContext(batch.tree, _n_layers(model), prefix=prefix, is_prefix=True)
    return _tree_hidden(model, line, batch, tree)


def _logprobs(
    head: OwnHead,
    line: SharedLine | None,
    fp32_head: bool,
    model: PreTrainedModel,
    batch: MicroBatch,
    chunk_size: int,
    with_entropy: bool,
    entropy_gradient: bool,
    prefix: SharedPrefix | None,
) -> tuple[Tensor, Tensor | None]:
    hidden, mine = predicting_states(model, line, batch, prefix)
    targets, temperatures = batch.targets, batch.temperatures
    options = HeadOptions(chunk_size, with_entropy, entropy_gradient, fp32_head)
    if line is None or mine is None:
        return head_logprobs(head, hidden, targets, temperatures, options)
    logprobs, entropy = head_logprobs(head, hidden, targets[mine], temperatures[mine], options)
    count = len(targets)
    return (
        line.collect(logprobs, mine, count),
        None if entropy is None else line.collect(entropy, mine, count),
    )


def predicting_states(
    model: PreTrainedModel, line: SharedLine | None, batch: MicroBatch, prefix: SharedPrefix | None
) -> tuple[Tensor, Tensor | None]:
    """The hidden states [M, H] of the batch's predictions. Call it in a forward method only.

    Under context parallelism: the states [m, H] of this process's predictions, and their indices
    [m].
    """
    hidden = _hidden(model, line, batch, prefix)
    if line is None:
        return hidden.index_select(0, _places(batch, prefix)), None
    mine, places = _shared_places(batch, line, prefix)
    return hidden.index_select(0, places), mine


def _places(batch: MicroBatch, prefix: SharedPrefix | None) -> Tensor:
    """Index [M] into the result of `_hidden` for each prediction."""
    if prefix is None:
        return batch.positions
    own = batch.positions - batch.prefix_tokens
    return torch.where(own < 0, batch.positions, own + prefix.n_hidden)


def _shared_places(
    batch: MicroBatch, line: SharedLine, prefix: SharedPrefix | None
) -> tuple[Tensor, Tensor]:
    """Indices [m] of this process's predictions, and their indices [m] into `_hidden`."""
    positions, length = batch.positions, batch.input_ids.shape[1]
    if prefix is None:
        return line.mine(positions, length)
    before = torch.nonzero(positions < batch.prefix_tokens).squeeze(-1)
    behind = torch.nonzero(positions >= batch.prefix_tokens).squeeze(-1)
    mine_before, places_before = line.mine(positions[before], prefix.length)
    mine_behind, places_behind = line.mine(positions[behind] - batch.prefix_tokens, length)
    return (
        torch.cat([before[mine_before], behind[mine_behind]]),
        torch.cat([places_before, places_behind + prefix.n_hidden]),
    )


def _hidden(
    model: PreTrainedModel, line: SharedLine | None, batch: MicroBatch, prefix: SharedPrefix | None
) -> Tensor:
    """Hidden states [.., H] of the shared prefix and then of the batch [B * T], padding included.

    Under context parallelism only this process's tokens are included.
    """
    if batch.tree is None:
        # Padded lines are causal and need no mask, and have the model's own positions.
        output = base_model(model)(input_ids=batch.input_ids, use_cache=False)
        return cast(Tensor, output.last_hidden_state).flatten(0, 1)
    tree = TreeContext(batch.tree, _n_layers(model), batch.first_read, prefix)
    hidden = _tree_hidden(model, line, batch, tree).flatten(0, 1)
    return hidden if prefix is None else prefix.before_hidden(hidden)


def _n_layers(model: PreTrainedModel) -> int:
    layers: int = model.config.get_text_config().num_hidden_layers
    return layers


def _tree_hidden(
    model: PreTrainedModel,
    line: SharedLine | None,
    batch: MicroBatch | SharedPrefixBatch,
    tree: TreeContext,
) -> Tensor:
    """Hidden states [1, T, H] of a line with tree attention.

    Under context parallelism only this process's tokens are included.
    """
    input_ids, position_ids = batch.input_ids, batch.position_ids
    shared = {}
    if line is not None:
        input_ids, position_ids = line.take(input_ids), line.take(position_ids)
        shared = {"line": line}
    output = base_model(model)(
        input_ids=input_ids, position_ids=position_ids, use_cache=False, tree=tree, **shared
    )
    if len(tree.layers) != tree.n_layers:
        raise ValueError("the model did not pass the tree on to the attention of every layer")
    return cast(Tensor, output.last_hidden_state)
