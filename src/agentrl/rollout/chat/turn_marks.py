"""The text that a template writes around a thought and around a turn's content, found by probing.

    prompt                ...<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>
    a turn as written     probe-turn<|END_RESPONSE|><|END_OF_TURN_TOKEN|>
                                    the frame's end, the turn's end

A model also generates the frame. It is removed before the turn is passed to the template, which
writes it again, and from the turn's content.
"""

from collections.abc import Callable, Mapping, Sequence

from agentrl.rollout.chat.escaping import EscapingCodec
from agentrl.rollout.chat.turns import THOUGHT_FIELDS, Message, ThoughtMarks, TurnFrame

# Renders messages, with or without the next turn's header; "" if the template rejects them.
Try = Callable[[Sequence[Message], None, bool], str]

_THOUGHT = "probe-thought"
_DEFAULT_MARKS = ThoughtMarks("<think>", "</think>")
# Marks of templates that do not write thoughts but remove them from the content.
_KNOWN_MARKS = (
    _DEFAULT_MARKS,
    ThoughtMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ThoughtMarks("[THINK]", "[/THINK]"),  # Magistral
    ThoughtMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
)


def find_thought_marks(
    render: Try, codec: EscapingCodec, user: Message, turns: Mapping[str, Message]
) -> tuple[ThoughtMarks, bool]:
    """The marks around a thought, and whether the template writes thoughts or removes them.

    `turns`: probe turns by a text that each contains; some templates write thoughts only in turns
    with calls. The marks are `<think>` and `</think>` if the template shows none.
    """
    found = False
    for text, turn in turns.items():
        given = {**turn, **dict.fromkeys(THOUGHT_FIELDS, _THOUGHT)}
        header = render([user], None, True)
        marks, written = _marks_in(codec, header, render([user, given], None, False), text)
        if marks is not None:
            return marks, True
        found = found or written
    said = next(iter(turns))
    for known in _KNOWN_MARKS:
        inline = f"{known.open}\n{_THOUGHT}\n{known.close}\n\n{said}"
        text = render([user, {"role": "assistant", "content": inline}], None, False)
        if said in text and _THOUGHT not in text:
            return known, True
    return _DEFAULT_MARKS, found


def _marks_in(
    codec: EscapingCodec, header: str, text: str, said: str
) -> tuple[ThoughtMarks | None, bool]:
    """The marks around the probe's thought (None if unclear), and whether `text` contains it."""
    before, found, after = text.partition(_THOUGHT)
    open_mark = before[len(header) :].strip() if before.startswith(header) else ""
    close_mark = after.partition(said)[0].strip()
    specials = codec.specials(close_mark)
    if specials and close_mark.startswith(specials[0][0]):
        close_mark = specials[0][0]  # the rest is the header of the content
    if found and close_mark.startswith("</"):
        return ThoughtMarks(open_mark or f"<{close_mark[2:]}", close_mark), True
    if found and open_mark and close_mark:
        return ThoughtMarks(open_mark, close_mark), True
    return None, bool(found)


def find_frame(
    codec: EscapingCodec, prompt: str, closed: str, said: str, ends: Sequence[str]
) -> TurnFrame:
    """The control text before and after the content of a turn.

    `closed`: the conversation up to the turn. `said`: its content. `ends`: tokens that end turns.
    Text without a control token is no frame, because a model may write it differently.
    """
    before, _, rest = closed.removeprefix(prompt).partition(said)
    places = [place for end in ends if (place := rest.find(end)) >= 0]
    after = rest[: min(places, default=0)]
    return TurnFrame(
        before if closed.startswith(prompt) and codec.specials(before) else "",
        after if codec.specials(after) else "",
    )
