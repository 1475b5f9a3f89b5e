"""Who holds which row of the key-value cache: bookkeeping without tensors of the model.

A slot is a row's worth of cache: held by a running request, or idle with the tokens of a finished
one, whose keys and values a later request may continue. Rows move (`compact`): the decoding slots
must be rows 0..n-1, so that attention reads the cache as one view. Nothing is ever shared between
slots; a common prefix is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# A request waits one step for a prefix that is being computed if that saves this many tokens.
WORTH_WAITING = 16


@dataclass(slots=True, eq=False)
class CacheSlot:
    """One slot. `index` is its identity, `row` where its keys and values lie now."""

    index: int
    row: int
    held: bool = False
    last_used: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A slot for a request, `cached` prompt tokens of which are there once `copy_from` is copied
    (None: they are there already)."""

    slot: CacheSlot
    cached: int
    copy_from: CacheSlot | None


class SlotTable:
    """All slots of a cache of `num_slots` rows of `row_length` positions."""

    def __init__(self, num_slots: int, row_length: int) -> None:
        self.slots = [CacheSlot(index, index) for index in range(num_slots)]
        self._by_row = list(self.slots)
        self._idle = num_slots
        self._clock = 0
        # The tokens whose keys and values each slot has, or will have after the next step
        # (`_coming` of them); others may match the first `_ready` only.
        self._tokens = np.zeros((num_slots, row_length), dtype=np.int32)
        self._ready = np.zeros(num_slots, dtype=np.int64)
        self._coming = np.zeros(num_slots, dtype=np.int64)

    @property
    def idle(self) -> int:
        """How many slots no request holds."""
        return self._idle

    @property
    def cached_tokens(self) -> int:
        """How many tokens are in slots, held or idle, for others to continue."""
        return int(self._ready.sum())

    @property
    def extent(self) -> int:
        """How many positions of any slot others may match now or after the next step."""
        return int(max(self._ready.max(), self._coming.max()))

    def place(self, tokens: Sequence[int]) -> Placement | None:
        """Hold a slot for a request that is to compute `tokens`, reusing the longest prefix.

        At least one token is left to compute, since its logits are wanted. Returns None, holding
        nothing, when another request is just computing a much longer prefix of the same tokens:
        ask again after the step. At least one slot must be idle.
        """
        ids = np.fromiter(tokens, dtype=np.int32, count=len(tokens))
        common = self._common_prefixes(ids)
        best = int(np.minimum(common, self._ready).argmax())
        cached = int(min(common[best], self._ready[best]))
        if int(np.minimum(common, self._coming).max()) >= cached + WORTH_WAITING:
            return None
        source = self.slots[best]
        if cached and not source.held and cached >= self._ready[best] - 1:
            # It extends what the slot has (but perhaps for its last token): nothing is lost.
            slot, copy_from = source, None
        else:
            slot = self._reclaim()
            copy_from = source if cached and slot is not source else None
        self._hold(slot)
        # What lies behind the prefix is overwritten from this step on.
        self._ready[slot.index] = cached
        self._coming[slot.index] = len(ids)
        self._tokens[slot.index, : len(ids)] = ids
        return Placement(slot, cached, copy_from)

    def computed(self, slot: CacheSlot) -> None:
        """The keys and values of the tokens given to `place` are there now."""
        self._ready[slot.index] = self._coming[slot.index]
        self._coming[slot.index] = 0

    def release(self, slot: CacheSlot, tokens: Sequence[int]) -> None:
        """Give the slot back with the keys and values of `tokens` in it; empty: with nothing."""
        assert slot.held
        slot.held = False
        self._idle += 1
        self._clock += 1
        slot.last_used = self._clock
        self._tokens[slot.index, : len(tokens)] = tokens
        self._ready[slot.index] = len(tokens)
        self._coming[slot.index] = 0

    def clear(self) -> None:
        """Forget all tokens, those of held slots too: they are no longer right for others."""
        self._ready[:] = 0
        self._coming[:] = 0

    def compact(self, decoding: Sequence[CacheSlot]) -> list[tuple[int, int]]:
        """Bring `decoding` to rows 0..n-1; returns the pairs of rows to swap, all distinct."""
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
        """For each slot, how many leading tokens it has in common with `ids`, all but the last."""
        reach = len(ids) - 1
        filled = np.maximum(self._ready, self._coming)
        reach = min(reach, int(filled.max()))
        if reach == 0:
            return np.zeros(len(self.slots), dtype=np.int64)
        differs = self._tokens[:, :reach] != ids[:reach]
        first = differs.argmax(axis=1)
        return np.where(differs[np.arange(len(first)), first], first, reach)

    def _reclaim(self) -> CacheSlot:
        """The idle slot to overwrite: an empty one, else the one longest unused."""
        return min(
            (slot for slot in self.slots if not slot.held),
            key=lambda slot: (self._ready[slot.index] > 0, slot.last_used, slot.row),
        )

    def _hold(self, slot: CacheSlot) -> None:
        assert not slot.held
        slot.held = True
        self._idle -= 1
