"""The tokens of a whole prompt in which generated turns keep the ids that were sampled.

    rendered text   <header>turn<stop> results <header>turn<stop> results <header>
    ids             encoded  sampled   encoded          sampled   encoded

The tokenizer, given a turn's text, may divide it otherwise than the model did. So a turn is looked
up in the text at the place where the template writes it, and its ids are put there.
"""

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from agentrl.rollout.chat.escaping import EscapingCodec
from agentrl.rollout.chat.turns import SampledTurn


class Place(NamedTuple):
    """Where a turn stands in a text, `text[start:end]`, and its ids for that."""

    start: int
    end: int
    ids: tuple[int, ...]


def find_turn(turn: SampledTurn, text: str, position: int) -> Place | None:
    """The first place from `position` on where the text has a header of the turn, then the turn.

    With its stop token, if the text has it so anywhere; else without, as templates write a turn
    that nothing follows. None if the template does not write the turn, or nothing is left of it.
    """
    endings = [(turn.stop_text, turn.output_ids)]
    if turn.stop_id is not None:
        endings.append(("", turn.output_ids[:-1]))
    for (ending, ids), header in product(endings, turn.headers):
        found = text.find(header + turn.written + ending, position)
        if found >= 0 and ids:
            start = found + len(header)
            return Place(start, start + len(turn.written + ending), ids)
    return None


def encode_keeping(
    turns: Iterable[SampledTurn], text: str, codec: EscapingCodec
) -> tuple[tuple[int, ...], int]:
    """The ids of a whole prompt, with the sampled ids of those turns that its text has.

    `turns`: in the order in which they stand there. Returns the ids, and how many of the turns are
    not in the text as they were generated, so that their ids are lost.
    """
    ids: list[int] = []
    n_lost = 0
    position, after = 0, None
    for turn in turns:
        place = find_turn(turn, text, position)
        if place is None:
            n_lost += 1
            continue
        ids += codec.encode(text[position : place.start], after=after, start=not ids)
        ids += place.ids
        position = place.end
        after = turn.stop_id if place.ids[-1] == turn.stop_id else None
    ids += codec.encode(text[position:], after=after, start=not ids)
    return tuple(ids), n_lost
