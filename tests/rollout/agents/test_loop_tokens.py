"""Which tokens of a loop's response were made by its model calls: exactly those that were."""

from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.agents.loop_tokens import GeneratedSpan, generated_spans


@dataclass(frozen=True)
class GenerateCall:
    prompt_ids: list[int]
    output_ids: list[int]


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(prompt=TOKENS, turns=st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=5))
def test_a_linear_loop_gets_back_each_call_as_one_span(
    prompt: list[int], turns: list[tuple[list[int], list[int]]]
) -> None:
    calls: list[GenerateCall] = []
    response: list[int] = []
    mask: list[int] = []
    expected = []
    for number, (output, observed) in enumerate(turns):
        calls.append(GenerateCall([*prompt, *response], output))
        start = len(prompt) + len(response)
        expected.append(GeneratedSpan(number, 0, start, start + len(output)))
        response += output + observed
        mask += [1] * len(output) + [0] * len(observed)
    assert generated_spans(prompt, response, mask, calls) == expected


@given(
    prompt=TOKENS,
    outputs=st.lists(TOKENS, min_size=1, max_size=4),
    mask=st.data(),
)
def test_every_marked_token_is_in_one_span_and_its_call_made_it_there(
    prompt: list[int], outputs: list[list[int]], mask: st.DataObject
) -> None:
    calls: list[GenerateCall] = []
    whole = list(prompt)
    for output in outputs:
        calls.append(GenerateCall(list(whole), output))
        whole += output
    response = whole[len(prompt) :]
    kept = mask.draw(st.integers(1, len(response)))  # a loop may cut its response
    marked = mask.draw(st.lists(st.integers(0, 1), min_size=kept, max_size=kept).filter(any))
    spans = generated_spans(prompt, response[:kept], marked, calls)
    places = list(chain(*(range(span.start, span.end) for span in spans)))
    assert places == [place + len(prompt) for place, one in enumerate(marked) if one]
    for span in spans:
        call = calls[span.call]
        assert len(call.prompt_ids) + span.offset == span.start
        assert whole[: len(call.prompt_ids)] == call.prompt_ids
        made = call.output_ids[span.offset : span.offset + span.end - span.start]
        assert whole[span.start : span.end] == made


CALL = GenerateCall([1, 2], [5, 6, 7])


@pytest.mark.parametrize(
    ("response", "mask", "calls", "message"),
    [
        ([5, 6, 8], [1, 1, 1], [CALL], r"marks token 2 of the response \(id 8\)"),
        ([5, 6, 7, 9], [1, 1, 1, 1], [CALL], r"marks token 3 of the response"),
        ([5, 6, 7], [1, 1, 1], [], "which no call of server_manager.generate made"),
        ([5, 6, 7], [1, 1, 1], [GenerateCall([1, 3], [5, 6, 7])], "which no call"),
        ([5, 6, 7], [0, 0, 0], [CALL], "marks no token"),
        ([5, 6, 7], [1, 1], [CALL], "has 2 entries for 3 response_ids"),
        ([], [], [CALL], "marks no token"),
    ],
)
def test_what_was_not_sampled_is_refused(
    response: list[int], mask: list[int], calls: list[GenerateCall], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generated_spans([1, 2], response, mask, calls)


def test_the_call_that_was_returned_is_told_from_others_with_the_same_prompt() -> None:
    calls = [GenerateCall([1, 2], [5, 9]), GenerateCall([1, 2], [5, 6, 7])]
    assert generated_spans([1, 2], [5, 6, 7], [1, 1, 1], calls) == [GeneratedSpan(1, 0, 2, 5)]
    assert generated_spans([1, 2], [5, 6, 7], [1, 1, 1], calls[::-1]) == [GeneratedSpan(0, 0, 2, 5)]
