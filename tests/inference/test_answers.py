"""Chunks of an answer put together: what is believed, and which version each token counts as."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.inference.answers import (
    ChunkReader,
    parse_loads,
    read_events,
    stream_error,
)
from agentrl.inference.generation_builder import GenerationBuilder
from agentrl.inference.protocol import (
    GenerateRequest,
    InferenceError,
    RequestRejected,
    SamplingParams,
    ServiceLoad,
    ServiceUnreachable,
)
from agentrl.policy_version import VersionSpan

SOURCE = "http://x"


def reader() -> ChunkReader:
    """A reader of the one answer to a request for up to 99 tokens."""
    building = GenerationBuilder(GenerateRequest("r", (7, 8, 9), SamplingParams(99)))
    building.next_request()
    return ChunkReader(building, SOURCE, 99)


def chunk(ids: list[int], total: int | None = None, **meta: Any) -> dict[str, Any]:
    """A `/generate` chunk as SGLang gives it; token i has logprob -i."""
    return {
        "text": None,
        "output_ids": ids,
        "meta_info": {
            "finish_reason": None,
            "prompt_tokens": 3,
            "completion_tokens": len(ids) if total is None else total,
            "cached_tokens": 1,
            "weight_version": "3",
            "output_token_logprobs": [[-float(i), i, None] for i in ids],
        }
        | meta,
    }


def last(ids: list[int], spans: list[tuple[int, int, int]], **meta: Any) -> dict[str, Any]:
    versions = [{"version": str(v), "start": start, "end": end} for v, start, end in spans]
    finish = {"type": "length", "length": len(ids)}
    return chunk(ids, **({"finish_reason": finish, "weight_versions": versions} | meta))


@given(st.lists(st.integers(0, 9), max_size=30), st.data())
def test_whole_and_incremental_chunks_give_the_same_output(ids: list[int], data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    whole, incremental = reader(), reader()
    begin = 0
    for cut in cuts:
        whole.add(chunk(ids[:cut]))
        incremental.add(chunk(ids[begin:cut], total=cut))
        begin = cut
    spans = [(3, 0, len(ids))]
    whole.add(last(ids, spans))
    incremental.add(last(ids[begin:], spans, completion_tokens=len(ids)))
    made = whole.building.generation(SOURCE, 0.5)
    assert made == incremental.building.generation(SOURCE, 0.5)
    assert made.output_ids == tuple(ids)
    assert made.output_logprobs == tuple(-float(i) for i in ids)


def test_tokens_of_a_chunk_in_which_the_version_changed_count_as_the_older_one_s() -> None:
    output = reader()
    output.add(chunk([1]))
    output.add(chunk([1, 2, 3], weight_version="4"))
    output.add(chunk([1, 2, 3, 4], weight_version="4"))
    assert output.building.versions == [VersionSpan(3, 0, 3), VersionSpan(4, 3, 4)]
    # The last chunk knows better.
    output.add(last([1, 2, 3, 4, 5], [(3, 0, 2), (4, 2, 5)]))
    assert output.building.versions == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 5)]


@pytest.mark.parametrize(
    "broken",
    [
        {"weight_versions": [{"version": "3", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "3", "start": 1, "end": 2}]},
        {"weight_versions": [{"version": "v9", "start": 0, "end": 2}]},
        {"output_token_logprobs": [[-1.0, 5, None]]},
        {"output_token_logprobs": [[-1.0, 5, None], [-2.0, 7, None]]},
        {"finish_reason": {"type": "boredom"}},
        {"completion_tokens": 7},
    ],
)
def test_tokens_without_their_logprob_or_version_are_not_believed(broken: dict[str, Any]) -> None:
    output = reader()
    with pytest.raises(InferenceError):
        output.add(last([5, 6], [(3, 0, 2)], **broken))
    assert output.building.ids == []


def test_an_abort_keeps_its_tokens_unless_the_request_was_wrong() -> None:
    aborted = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    output = reader()
    output.add(last([5, 6], [(3, 0, 2)], finish_reason=aborted))
    made = output.building.generation(SOURCE, 0.1)
    assert made.finish_reason == "abort" and made.output_ids == (5, 6)
    with pytest.raises(RequestRejected, match="too long"):
        reader().add(
            last([], [], finish_reason=aborted | {"message": "too long", "status_code": 400})
        )


def test_an_abort_in_the_queue_which_says_less_keeps_the_tokens_that_came_before_it() -> None:
    output = reader()
    output.add(chunk([5, 6], total=2))
    # As SGLang 0.5.23 ends a retracted request under --incremental-streaming-output: the last id
    # again, all logprobs, no count of cached tokens.
    ended = chunk([6], total=2, output_token_logprobs=[[-5.0, 5, None], [-6.0, 6, None]])
    ended["meta_info"]["finish_reason"] = {"type": "abort", "message": "Abort in waiting queue"}
    del ended["meta_info"]["cached_tokens"]
    output.add(ended)
    made = output.building.generation(SOURCE, 0.1)
    assert (made.finish_reason, made.output_ids) == ("abort", (5, 6))


def test_events_are_read_as_they_become_whole() -> None:
    events, rest = read_events(b'data: {"a":1}\n\ndata: {"b')
    assert (events, rest) == ([b'{"a":1}'], b'data: {"b')
    assert read_events(rest + b'":2}\n\n') == ([b'{"b":2}'], b"")


def test_an_error_in_a_stream_says_whether_another_service_can_help() -> None:
    assert isinstance(
        stream_error({"error": {"message": "bad", "code": 400}}, SOURCE), RequestRejected
    )
    assert isinstance(
        stream_error({"error": {"message": "busy", "code": 503}}, SOURCE), ServiceUnreachable
    )
    assert stream_error(chunk([1]), SOURCE) is None


def test_loads_are_summed_over_the_data_parallel_ranks() -> None:
    rank = {
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_used_tokens": 10,
        "max_total_num_tokens": 100,
        "queues": {"retracted": 1},
    }
    assert parse_loads({"loads": [rank, rank]}, SOURCE) == ServiceLoad(4, 2, 20, 200, 2)
    with pytest.raises(InferenceError, match="not SGLang's"):
        parse_loads({"loads": [{}]}, SOURCE)
