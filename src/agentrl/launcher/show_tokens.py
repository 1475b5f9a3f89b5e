"""`agentrl show RUN RECORD --tokens`: a line for each token, with all that is known of it."""

from collections.abc import Iterator, Sequence

from agentrl.launcher.trajectory_tokens import TurnTokens

# Columns of the model's own tokens, in order, with the format of a value.
_FORMS = {
    "mask": ".0f", "logprob": ".4f", "trainer": ".4f", "ratio": ".4f", "entropy": ".4f",
    "advantage": "+.4f", "version": ".0f",
}  # fmt: skip
_WIDTH = 10


def token_lines(turns: Sequence[TurnTokens]) -> Iterator[str]:
    """The lines: of each turn a head, the tokens of its prompt, and those that the model made.

    `place`: of the token in the model's context, from 0. A token of a prompt has only id and text,
    which is quoted as in Python, so that a line is a line and no terminal is told anything.
    """
    known = {name for turn in turns for name in turn.values}
    columns = [*(name for name in _FORMS if name in known), *sorted(known - _FORMS.keys())]
    yield _line(["place", "id", *columns], "text")
    for turn in turns:
        head = f"turn {turn.turn}, segment {turn.segment}"
        if turn.shared:
            head += f", the first {turn.shared} tokens are those of {turn.parent}"
        yield head
        place = turn.start
        for token, text in zip(turn.prompt_ids, turn.prompt_texts, strict=True):
            masked = ["0" if name == "mask" else "" for name in columns]
            yield _line([f"{place}", f"{token}", *masked], repr(text))
            place += 1
        for at, (token, text) in enumerate(zip(turn.output_ids, turn.output_texts, strict=True)):
            # A turn may lack a column, and a token a value.
            values = [turn.values[name][at] if name in turn.values else None for name in columns]
            shown = [
                "" if own is None else format(own, _FORMS.get(name, ".4f"))
                for name, own in zip(columns, values, strict=True)
            ]
            yield _line([f"{place}", f"{token}", *shown], repr(text))
            place += 1


def _line(cells: Sequence[str], text: str) -> str:
    return "".join(f"{cell:>{_WIDTH}}" for cell in cells) + f"  {text}"
