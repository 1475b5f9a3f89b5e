"""A request in pieces: what is asked of each service, and the answer they make together."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.inference.generation_builder import GenerationBuilder
from agentrl.inference.protocol import FinishReason, GenerateRequest, SamplingParams
from agentrl.policy_version import VersionSpan

PROMPT = (1, 2, 3)


def add_piece(
    building: GenerationBuilder, ids: list[int], version: int, finish: FinishReason | None = None
) -> None:
    """What one service makes: token i has logprob -i."""
    spans = [VersionSpan(version, 0, len(ids))] if ids else []
    building.add(ids, [-float(i) for i in ids], spans, cached_tokens=version)
    building.piece_ending = finish


@given(st.lists(st.lists(st.integers(10, 99), max_size=6), max_size=6))
def test_each_service_is_asked_for_the_rest_and_all_tokens_are_kept(parts: list[list[int]]) -> None:
    total = sum(len(part) for part in parts) + 2
    request = GenerateRequest("r", PROMPT, SamplingParams(total, temperature=0.5))
    answer = GenerationBuilder(request)
    seen: list[int] = []
    rids = set()
    for version, part in enumerate(parts):
        asked = answer.next_request()
        assert asked.input_ids.tolist() == [*PROMPT, *seen]
        assert asked.sampling_params == SamplingParams(total - len(seen), temperature=0.5)
        rids.add(asked.rid)
        add_piece(answer, part, version)
        assert answer.n_piece == len(part)
        assert answer.ending is None
        seen += part
    answer.next_request()
    add_piece(answer, [7, 8], len(parts), "stop")
    made = answer.generation("http://last", 1.0)
    assert len(rids) == len(parts)
    assert made.output_ids == (*seen, 7, 8)
    assert made.output_logprobs == tuple(-float(i) for i in made.output_ids)
    assert made.prompt_tokens == len(PROMPT) and made.finish_reason == "stop"
    versions = [v for v, part in enumerate([*parts, [7, 8]]) for _ in part]
    assert [s.version for s in made.versions for _ in range(s.start, s.end)] == versions
    assert made.versions[-1].end == len(made.output_ids)


def test_a_service_that_dies_after_the_last_token_leaves_nothing_to_ask_for() -> None:
    full = GenerationBuilder(GenerateRequest("r", PROMPT, SamplingParams(2)))
    full.next_request()
    add_piece(full, [5, 6], 0)
    assert full.ending == "length"
    stopped = GenerationBuilder(
        GenerateRequest("r", PROMPT, SamplingParams(9, stop_token_ids=(6,)))
    )
    stopped.next_request()
    add_piece(stopped, [5, 6], 0)
    assert stopped.ending == "stop"
    ignoring = SamplingParams(9, stop_token_ids=(6,), ignore_eos=True)
    going = GenerationBuilder(GenerateRequest("r", PROMPT, ignoring))
    going.next_request()
    add_piece(going, [5, 6], 0)
    assert going.ending is None


def test_an_aborted_piece_goes_on_and_is_an_aborted_answer_if_nobody_goes_on() -> None:
    answer = GenerationBuilder(GenerateRequest("r", PROMPT, SamplingParams(9)))
    answer.next_request()
    add_piece(answer, [5, 6], 0, "abort")
    assert answer.ending is None
    made = answer.generation("http://a", 1.0)
    assert (made.finish_reason, made.output_ids) == ("abort", (5, 6))
    assert answer.next_request().input_ids.tolist() == [*PROMPT, 5, 6]


def test_a_service_may_correct_the_versions_of_its_own_piece_only() -> None:
    answer = GenerationBuilder(GenerateRequest("r", PROMPT, SamplingParams(9)))
    answer.next_request()
    add_piece(answer, [5], 0)
    answer.next_request()
    answer.add([6, 7], [-6.0, -7.0], [VersionSpan(1, 0, 2)], cached_tokens=0)
    corrected = [VersionSpan(1, 0, 1), VersionSpan(2, 1, 3)]
    answer.add([8], [-8.0], corrected, cached_tokens=0)
    assert answer.versions == [VersionSpan(0, 0, 1), VersionSpan(1, 1, 2), VersionSpan(2, 2, 4)]
