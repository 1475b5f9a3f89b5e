"""Matches the tokens that an agent loop returns with its model calls: pure functions.

A loop returns a prompt, a response and a mask of the generated tokens. The mask is checked: a
marked token must follow exactly the prompt of a model call and be part of its output. Logprob and
policy version are known only for such tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol


class GenerateCall(Protocol):
    """A model call: the ids of its prompt and of its output."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class GeneratedSpan:
    """Tokens `start` to `end` (exclusive) of prompt + response, sampled by call number `call`.

    They begin at index `offset` of the call's output.
    """

    call: int
    offset: int
    start: int
    end: int


def generated_spans(
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    response_mask: Sequence[int],
    calls: Sequence[GenerateCall],
) -> list[GeneratedSpan]:
    """The spans of the response that the mask [n_response] marks, with their calls, in order.

    Sampled tokens that the mask does not mark are left out. Raises ValueError if the mask has
    another length than the response, marks nothing, or marks a token that no call sampled.
    """
    if len(response_mask) != len(response_ids):
        raise ValueError(
            f"response_mask has {len(response_mask)} entries for {len(response_ids)} response_ids"
        )
    if not prompt_ids:
        raise ValueError("prompt_ids is empty")
    if not any(response_mask):
        raise ValueError("response_mask marks no token, so there is nothing to train")
    whole = [*prompt_ids, *response_ids]
    made_by: list[int | None] = [None] * len(whole)
    matches = [(_n_matching(whole, call), number) for number, call in enumerate(calls)]
    for length, number in sorted(matches):  # the call that matches most tokens wins
        start = len(calls[number].prompt_ids)
        made_by[start : start + length] = [number] * length
    spans: list[GeneratedSpan] = []
    for place, marked in enumerate(response_mask, len(prompt_ids)):
        if not marked:
            continue
        maker = made_by[place]
        if maker is None:
            raise ValueError(
                f"response_mask marks token {place - len(prompt_ids)} of the response "
                f"(id {whole[place]}), which no call of server_manager.generate made after the "
                "tokens before it: return the ids that it gave, not ids of their text"
            )
        last = spans[-1] if spans else None
        if last is not None and last.end == place and last.call == maker:
            spans[-1] = GeneratedSpan(maker, last.offset, last.start, place + 1)
        else:
            offset = place - len(calls[maker].prompt_ids)
            spans.append(GeneratedSpan(maker, offset, place, place + 1))
    return spans


def _n_matching(whole: Sequence[int], call: GenerateCall) -> int:
    """How many output tokens of a call follow its prompt in `whole`; 0 if the prompt differs."""
    start = len(call.prompt_ids)
    if list(whole[:start]) != list(call.prompt_ids):
        return 0
    pairs = zip(whole[start:], call.output_ids, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
