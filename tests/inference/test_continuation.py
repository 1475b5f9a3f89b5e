"""A request in pieces: what is asked of each service, and the answer they make together."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.inference.answers import StreamedOutput
from agentrl.inference.continuation import Continuation
from agentrl.inference.protocol import FinishReason, GenerateRequest, SamplingParams, VersionSpan

PROMPT = (1, 2, 3)


def piece(ids: list[int], version: int, finish: FinishReason | None = None) -> StreamedOutput:
    return StreamedOutput(
        ids=ids,
        logprobs=[-float(i) for i in ids],
        spans=[VersionSpan(version, 0, len(ids))] if ids else [],
        prompt_tokens=99,
        cached_tokens=version,
        finish_reason=finish,
    )


@given(st.lists(st.lists(st.integers(10, 99), max_size=6), max_size=6))
def test_each_service_is_asked_for_the_rest_and_all_tokens_are_kept(parts: list[list[int]]) -> None:
    total = sum(len(part) for part in parts) + 2
    request = GenerateRequest("r", PROMPT, SamplingParams(total, temperature=0.5))
    answer = Continuation(request)
    seen: list[int] = []
    rids = set()
    for version, part in enumerate(parts):
        asked = answer.next_request()
        assert asked.input_ids == (*PROMPT, *seen)
        assert asked.sampling_params == SamplingParams(total - len(seen), temperature=0.5)
        rids.add(asked.rid)
        assert answer.add(piece(part, version)) == len(part)
        assert answer.finish_reason is None
        seen += part
    answer.next_request()
    answer.add(piece([7, 8], len(parts), "stop"))
    made = answer.generation(1.0)
    assert len(rids) == len(parts)
    assert made.output_ids == (*seen, 7, 8)
    assert made.output_logprobs == tuple(-float(i) for i in made.output_ids)
    assert made.prompt_tokens == len(PROMPT) and made.finish_reason == "stop"
    versions = [v for v, part in enumerate([*parts, [7, 8]]) for _ in part]
    assert [s.version for s in made.versions for _ in range(s.start, s.end)] == versions
    assert made.versions[-1].end == len(made.output_ids)


def test_a_service_that_dies_after_the_last_token_leaves_nothing_to_ask_for() -> None:
    full = Continuation(GenerateRequest("r", PROMPT, SamplingParams(2)))
    full.next_request()
    full.add(piece([5, 6], 0))
    assert full.finish_reason == "length"
    stopped = Continuation(GenerateRequest("r", PROMPT, SamplingParams(9, stop_token_ids=(6,))))
    stopped.next_request()
    stopped.add(piece([5, 6], 0))
    assert stopped.finish_reason == "stop"
    ignoring = SamplingParams(9, stop_token_ids=(6,), ignore_eos=True)
    going = Continuation(GenerateRequest("r", PROMPT, ignoring))
    going.next_request()
    going.add(piece([5, 6], 0))
    assert going.finish_reason is None
