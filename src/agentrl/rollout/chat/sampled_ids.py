"""The tokens of a whole prompt in which generated turns keep the ids that were sampled.

    rendered text   <header>turn<stop> results <header>turn<stop> results <header>
    ids             encoded  sampled   encoded          sampled   encoded

The tokenizer may split a turn's text into other tokens than the model generated. So the turn is
located in the rendered text, and its sampled ids are inserted there.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from agentrl.rollout.chat.piece_encoder import PieceEncoder
from agentrl.rollout.chat.turns import SampledTurn


class Place(NamedTuple):
    """The place of a turn in a text, `text[start:end]`, and the sampled ids for it."""

    start: int
    end: int
    ids: tuple[int, ...]


class _Headers:
    """The places of turn headers in a text. Each header is searched once."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._places: dict[str, list[int]] = {}

    def find(self, header: str, position: int, written: str, ending: str) -> int:
        """The first index from `position` on of the header followed by `written` and `ending`; -1
        if there is none."""
        text = self._text
        if not header:
            return text.find(written + ending, position)
        places = self._places.get(header)
        if places is None:
            places = self._places[header] = _occurrences(header, text)
        for index in range(bisect_left(places, position), len(places)):
            start = places[index] + len(header)
            if text.startswith(written, start) and text.startswith(ending, start + len(written)):
                return places[index]
        return -1


def find_turn(turn: SampledTurn, text: str, position: int) -> Place | None:
    """The first place from `position` on where a header of the turn and the turn follow each other.

    A place with the stop token is preferred: templates may omit it after the last turn. None if the
    text does not contain the turn, or no ids are left of it.
    """
    return _find_turn(turn, _Headers(text), position)


def encode_keeping(
    turns: Iterable[SampledTurn], text: str, encoder: PieceEncoder
) -> "tuple[array[int], int]":
    """Encode a whole prompt, with the sampled ids of the turns that its text contains.

    `turns`: in the order of the text. `encoder`: of the conversation. Returns the ids (int32), and
    the number of turns that the text does not contain as they were generated.
    """
    headers = _Headers(text)
    ids = array("i")  # a list of them would be looked through by the garbage collector
    n_lost = 0
    position, after = 0, None
    for turn in turns:
        place = _find_turn(turn, headers, position)
        if place is None:
            n_lost += 1
            continue
        ids.extend(encoder.encode(text[position : place.start], after, start=not ids))
        ids.extend(place.ids)
        position = place.end
        after = turn.stop_id if place.ids[-1] == turn.stop_id else None
    ids.extend(encoder.encode(text[position:], after, start=not ids))
    encoder.end_prompt()
    return ids, n_lost


def _find_turn(turn: SampledTurn, headers: _Headers, position: int) -> Place | None:
    endings = [(turn.stop_text, turn.output_ids)]
    if turn.stop_id is not None:
        endings.append(("", turn.output_ids[:-1]))
    for (ending, ids), header in product(endings, turn.headers):
        found = headers.find(header, position, turn.written, ending)
        if found >= 0 and ids:
            start = found + len(header)
            return Place(start, start + len(turn.written + ending), ids)
    return None


def _occurrences(part: str, text: str) -> list[int]:
    """The start indices of a part in a text, overlapping ones included."""
    places = []
    found = text.find(part)
    while found >= 0:
        places.append(found)
        found = text.find(part, found + 1)
    return places
