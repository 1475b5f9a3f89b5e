"""Allocation of the rows of the KV cache to requests. Pure bookkeeping, without tensors.

A slot is one row of the cache. A running request holds it, or it is idle and keeps the keys and
values of a finished request, which a later request may reuse as a prefix. `compact` moves slots so
that the decoding ones are rows 0..n-1 and attention reads the cache as one view. Slots share
nothing; a common prefix is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A request waits for a prefix that the next step computes if this saves at least so many tokens.
WORTH_WAITING = 16


@dataclass(slots=True, eq=False)
class CacheSlot:
    """One slot. `index` identifies it; `row` is the current place of its keys and values."""

    index: int
    row: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot for a request, and its cached prefix.

    The first `cached` tokens are in `copy_from` and must be copied to `slot`; with None they are in
    `slot` already.
    """

    slot: CacheSlot
    cached: int
    copy_from: CacheSlot | None


class SlotTable:
    """All slots of a cache of `num_slots` rows of `row_length` positions."""

    def __init__(self, num_slots: int, row_length: int) -> None:
        self.slots = [CacheSlot(index, index) for index in range(num_slots)]
        self._by_row = list(self.slots)
        self._held = np.zeros(num_slots, dtype=np.bool_)
        self._last_used = np.zeros(num_slots, dtype=np.int64)
        self._clock = 0
        # The tokens of each slot. The first `_ready` have keys and values that others may copy;
        # `_coming` is the number after the next step.
        self._tokens = np.zeros((num_slots, row_length), dtype=np.int32)
        self._ready = np.zeros(num_slots, dtype=np.int64)
        self._coming = np.zeros(num_slots, dtype=np.int64)

    def filled(self, row: int) -> int:
        """Number of positions of a row that are reusable now or after the next step."""
        index = self._by_row[row].index
        return int(max(self._ready[index], self._coming[index]))

    def place(self, tokens: Sequence[int]) -> Placement | None:
        """Allocate a slot for a request with `tokens`, reusing the longest cached prefix.

        At least one token is left to compute, because its logits are needed. Returns None if
        another request computes a much longer prefix in this step; call again after it. At least
        one slot must be idle.
        """
        ids = np.fromiter(tokens, dtype=np.int32, count=len(tokens))
        common = self._common_prefixes(ids)
        best = int(np.minimum(common, self._ready).argmax())
        cached = int(min(common[best], self._ready[best]))
        if int(np.minimum(common, self._coming).max()) >= cached + WORTH_WAITING:
            return None
        source = self.slots[best]
        if cached and not self._held[best] and cached >= self._ready[best] - 1:
            # The request continues all tokens of the slot, except perhaps the last: no copy needed.
            slot, copy_from = source, None
        else:
            slot = self._reclaim()
            copy_from = source if cached and slot is not source else None
        assert not self._held[slot.index]
        self._held[slot.index] = True
        # From this step on, positions after the prefix are overwritten.
        self._ready[slot.index] = cached
        self._coming[slot.index] = len(ids)
        self._tokens[slot.index, : len(ids)] = ids
        return Placement(slot, cached, copy_from)

    def computed(self, slot: CacheSlot) -> None:
        """Mark the tokens given to `place` as computed."""
        self._ready[slot.index] = self._coming[slot.index]
        self._coming[slot.index] = 0

    def release(self, slot: CacheSlot, tokens: Sequence[int]) -> None:
        """Return the slot. It keeps the keys and values of `tokens` for reuse."""
        assert self._held[slot.index]
        self._held[slot.index] = False
        self._clock += 1
        self._last_used[slot.index] = self._clock
        self._tokens[slot.index, : len(tokens)] = tokens
        self._ready[slot.index] = len(tokens)
        self._coming[slot.index] = 0

    def clear(self) -> None:
        """Forget the tokens of all slots, held ones included, so that no request reuses them."""
        self._ready[:] = 0
        self._coming[:] = 0

    def compact(self, decoding: Sequence[CacheSlot]) -> list[tuple[int, int]]:
        """Assign `decoding` to rows 0..n-1. Returns the pairs of rows to swap, all distinct."""
        front = len(decoding)
        inside = {slot.row for slot in decoding if slot.row < front}
        outside = [slot for slot in decoding if slot.row >= front]
        holes = [row for row in range(front) if row not in inside]
        swaps = []
        for hole, slot in zip(holes, outside, strict=True):
            other, row = self._by_row[hole], slot.row
            swaps.append((hole, row))
            slot.row, other.row = hole, row
            self._by_row[hole], self._by_row[row] = slot, other
        return swaps

    def _common_prefixes(self, ids: np.ndarray) -> np.ndarray:
        """Length of the common prefix of each slot and `ids[:-1]`, int [slots]."""
        reach = len(ids) - 1
        filled = np.maximum(self._ready, self._coming)
        reach = min(reach, int(filled.max()))
        if reach == 0:
            return np.zeros(len(self.slots), dtype=np.int64)
        differs = self._tokens[:, :reach] != ids[:reach]
        first = differs.argmax(axis=1)
        return np.where(differs[np.arange(len(first)), first], first, reach)

    def _reclaim(self) -> CacheSlot:
        """The idle slot to overwrite: an empty one, else the least recently used."""
        rank = np.where(self._ready > 0, self._last_used, 0)
        rank[self._held] = self._clock + 1
        return self.slots[int(rank.argmin())]
