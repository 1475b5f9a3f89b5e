"""The KV cache of all rows, and the attention of one flattened step over it.

A step is one sequence of N tokens for the model: one token for each of B decoding rows (rows 0..B-1
of the cache, in order), then the new tokens of each prefilling row in turn. `KVCache` writes their
keys and values to the cache. `attend`, registered with transformers under `ATTENTION`, attends from
the decoding rows in one call on a view of the cache, as long as the longest of them. Rows that are
much longer than the others are attended in calls of their own, as is each prefilling row. Nothing
is gathered.

Shapes: H query heads, K key-value heads, G = H / K, D head size, L positions in use.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedConfig

ATTENTION = "agentrl_engine"
# How many positions are read in the time that a further call of attention takes: on a CPU 100 to
# 250, as measured; a GPU reads faster than it starts calls, and its number is an estimate.
_CALL_ON_CPU, _CALL_ON_GPU = 256, 16_384


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """New tokens of one prefilling row: positions `start..end-1`."""

    row: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Rows and positions of a step's tokens, and the attention masks.

    mask_B11L: added to the scores of the decoding rows in their common call
    apart: decoding rows that are longer than L, and their lengths
    segment_masks: causal mask of each segment, bool [tokens, end]; None if it starts its row
    """

    rows_N: Tensor
    positions_N: Tensor
    mask_B11L: Tensor
    apart: tuple[tuple[int, int], ...]
    segments: tuple[PrefillChunk, ...]
    segment_masks: tuple[Tensor | None, ...]


class KVCache(Cache):
    """Preallocated keys and values of `num_slots` rows of `row_length` positions.

    A transformers model uses it like its own cache. All layers are one tensor, so that moving rows
    is one operation.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        num_slots: int,
        row_length: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(layers=[])
        self.row_length = row_length
        heads, size = kv_heads(config)
        self._store = torch.zeros(
            config.num_hidden_layers, 2, num_slots, heads, row_length, size,
            device=device, dtype=dtype,
        )  # fmt: skip
        self._range = torch.arange(row_length, device=device)
        self.layout: StepLayout | None = None

    def release(self) -> None:
        """Free the memory of all keys and values; their content is lost."""
        self._store.untyped_storage().resize_(0)

    def resume(self) -> None:
        """Allocate the memory again, behind the same tensors."""
        self._store.untyped_storage().resize_(self._store.numel() * self._store.element_size())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero, because positions are always passed to the model."""
        return 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values [1, K, N, D]; return the layer's whole cache."""
        assert self.layout is not None
        both = torch.cat((key_states[0], value_states[0]))
        return self.write(both.transpose(0, 1), layer_idx, self.layout)

    def write(self, kv: Tensor, layer: int, layout: StepLayout) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values [N, 2K, D]; return the layer's whole cache."""
        both = self._store[layer]
        kv_N2KD = kv.view(kv.shape[0], 2, -1, kv.shape[2])
        both[:, layout.rows_N, :, layout.positions_N] = kv_N2KD
        return both[0], both[1]

    def lay_out(
        self, decode_positions: Sequence[int], segments: Sequence[PrefillChunk]
    ) -> StepLayout:
        """Plan a step: a token at each of `decode_positions` of rows 0.., then the segments'."""
        device = self._range.device
        rows = list(range(len(decode_positions)))
        positions = list(decode_positions)
        for segment in segments:
            rows += [segment.row] * (segment.end - segment.start)
            positions += range(segment.start, segment.end)
        positions_N = torch.tensor(positions, device=device)
        positions_B1 = positions_N[: len(decode_positions), None]
        lengths = [position + 1 for position in decode_positions]
        in_use = common_length(lengths, _CALL_ON_CPU if device.type == "cpu" else _CALL_ON_GPU)
        beyond_BL = self._range[:in_use] > positions_B1
        mask_BL = torch.zeros(beyond_BL.shape, device=device, dtype=self._store.dtype)
        mask_BL.masked_fill_(beyond_BL, float("-inf"))
        return StepLayout(
            rows_N=torch.tensor(rows, device=device),
            positions_N=positions_N,
            mask_B11L=mask_BL[:, None, None],
            apart=tuple((row, length) for row, length in enumerate(lengths) if length > in_use),
            segments=tuple(segments),
            segment_masks=tuple(
                self._range[: s.end] <= self._range[s.start : s.end, None] if s.start else None
                for s in segments
            ),
        )

    def swap_rows(self, a: int, b: int, length: int) -> None:
        """Exchange the first `length` positions of two rows."""
        # Slices are several times faster than one gather and scatter with index tensors.
        used = self._store[:, :, :, :, :length]
        kept = used[:, :, a].clone()
        used[:, :, a] = used[:, :, b]
        used[:, :, b] = kept

    def copy_prefix(self, source: int, to: int, length: int) -> None:
        """Copy the first `length` positions of one row to another."""
        self._store[:, :, to, :, :length] = self._store[:, :, source, :, :length]


def common_length(lengths: Sequence[int], call: int) -> int:
    """The length that decoding rows have in their common call; longer rows are attended apart.

    It is the one with which the fewest positions are read. A call apart counts as `call` more.
    """
    best = max(lengths, default=0)
    least, apart = len(lengths) * best, 0
    if least - sum(lengths) <= call:
        return best  # the common case, at once: this is all that could be saved
    longest_first = sorted(lengths, reverse=True)
    for longer, length in pairwise(longest_first):
        apart += longer + call
        if len(lengths) * length + apart < least:
            best, least = length, len(lengths) * length + apart
    return best


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: StepLayout,
    **_: object,  # a window that is longer than any row
) -> tuple[Tensor, None]:
    """`attend_step` as transformers calls it: `query` [1, H, N, D]; returns [1, N, H, D]."""
    query_NHD = query[0].transpose(0, 1)
    attended = attend_step(query_NHD, key, value, step, scaling)
    return attended.view(1, *query_NHD.shape), None


def attend_step(
    query_NHD: Tensor, key: Tensor, value: Tensor, step: StepLayout, scaling: float
) -> Tensor:
    """Attention of a step; `key`, `value` are a layer's cache, all rows. Returns [N, H * D].

    Query heads that share a key-value head are folded into the query length (decoding) or
    broadcast over it (prefilling): no key is repeated.
    """
    kv, size = key.shape[1], key.shape[3]
    group = query_NHD.shape[1] // kv
    query_NKGD = query_NHD.view(-1, kv, group, size)
    decoding, in_use = step.mask_B11L.shape[0], step.mask_B11L.shape[3]
    outputs = []
    if decoding:
        out_BKGD = F.scaled_dot_product_attention(
            query_NKGD[:decoding],
            key[:decoding, :, :in_use],
            value[:decoding, :, :in_use],
            attn_mask=step.mask_B11L,
            scale=scaling,
        )
        for row, length in step.apart:
            this = slice(row, row + 1)
            out_BKGD[this] = F.scaled_dot_product_attention(
                query_NKGD[this], key[this, :, :length], value[this, :, :length], scale=scaling
            )
        outputs.append(out_BKGD.reshape(decoding, -1))
    begin = decoding
    for segment, mask in zip(step.segments, step.segment_masks, strict=True):
        tokens = segment.end - segment.start
        query_KGTD = query_NKGD[begin : begin + tokens].permute(1, 2, 0, 3)
        shape = (kv, group, segment.end, size)
        out_KGTD = F.scaled_dot_product_attention(
            query_KGTD,
            key[segment.row, :, None, : segment.end].expand(shape),
            value[segment.row, :, None, : segment.end].expand(shape),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
        )
        outputs.append(out_KGTD.permute(2, 0, 1, 3).reshape(tokens, -1))
        begin += tokens
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def kv_heads(config: PreTrainedConfig) -> tuple[int, int]:
    """Number and size of a model's key-value heads."""
    heads = config.num_attention_heads
    stated = config.to_dict()
    return (
        stated.get("num_key_value_heads") or heads,
        stated.get("head_dim") or config.hidden_size // heads,
    )


AttentionInterface.register(ATTENTION, attend)
