"""Encodes the whole prompts of one conversation incrementally.

If a chat template rewrites sampled tokens, each turn needs a whole new prompt. Encoding all of it
again would cost the conversation's length times its turns. The tokenizer first splits a text at
special tokens, so the ids of the parts between them (`Piece`) do not depend on each other and are
reused in the next prompt.
"""

from array import array

from agentrl.rollout.chat.escaping import EscapingCodec, Piece


class PieceEncoder:
    """Encodes one prompt after the other, reusing the ids of the last prompt's pieces."""

    def __init__(self, codec: EscapingCodec) -> None:
        self._codec = codec
        self._last: dict[Piece, array[int]] = {}
        self._current: dict[Piece, array[int]] = {}

    def encode(self, escaped: str, after: int | None = None, *, start: bool = True) -> list[int]:
        """`EscapingCodec.encode` for a text of the current prompt."""
        if after is not None:
            token = self._codec.token(after)
            ids = self.encode(token + escaped)
            if ids[0] != after:
                raise ValueError(f"the token {token!r} is not read as itself before other text")
            return ids[1:]
        ids = []
        for piece in self._codec.pieces(escaped, start=start):
            of_piece = self._last.get(piece)
            if of_piece is None:
                of_piece = array("i", self._codec.encode(piece.text, start=piece.start))
            self._current[piece] = of_piece
            ids.extend(of_piece)
        return ids

    def end_prompt(self) -> None:
        """The current prompt is complete: forget pieces that it does not contain."""
        self._last, self._current = self._current, {}
