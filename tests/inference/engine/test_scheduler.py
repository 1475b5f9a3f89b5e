"""Continuous batching on a real model, step by step: every logprob is a plain forward pass's."""

import random
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from agentrl.inference.engine.assembly import WeightsError
from agentrl.inference.engine.config import EngineConfig
from agentrl.inference.engine.model_runner import ModelRunner
from agentrl.inference.engine.request import LiveRequest
from agentrl.inference.engine.sampling import TokenSampling
from agentrl.inference.engine.scheduler import Scheduler
from agentrl.inference.engine.slots import Placement, SlotTable
from agentrl.inference.engine.weights import copy_weights, make_assembly, read_weights


class Bench:
    """A scheduler over a model of the test's own, and the plain model to compare with."""

    def __init__(self, folder: Path, *, running: int = 4, prefill: int = 4096) -> None:
        torch.set_num_threads(1)
        self.runner = ModelRunner(
            EngineConfig(folder, max_running_requests=running, context_length=256)
        )
        self.scheduler = Scheduler(
            self.runner, max_running=running, max_prefill_tokens=prefill, version="0", seed=0
        )
        self.ended: list[LiveRequest] = []

    def submit(
        self, prompt: list[int], tokens: int, end_ids: frozenset[int] = frozenset()
    ) -> LiveRequest:
        request = LiveRequest(
            rid=str(random.random()),
            prompt_ids=prompt,
            sampling=TokenSampling(temperature=0.8),
            max_new_tokens=tokens,
            end_ids=end_ids,
            on_finish=self.ended.append,
        )
        self.scheduler.submit(request)
        return request

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.step()

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.scheduler.step()


def error(folder: Path, request: LiveRequest, start: int = 0, end: int | None = None) -> float:
    """The largest difference of output logprobs `start..end-1` from a plain forward pass's."""
    model = Qwen3ForCausalLM.from_pretrained(folder).eval()
    ids = torch.tensor([request.tokens()])
    with torch.inference_mode():
        logprobs = (model(ids).logits[0] / 0.8).log_softmax(-1)
    prompt = len(request.prompt_ids)
    plain = logprobs[prompt - 1 : -1].gather(-1, ids[0, prompt:, None])[:, 0]
    return (plain - torch.tensor(request.output_logprobs))[start:end].abs().max().item()


def prompts(count: int, shared: int = 0) -> list[list[int]]:
    rng = random.Random(count)
    head = [rng.randrange(256) for _ in range(shared)]
    return [head + [rng.randrange(256) for _ in range(rng.randint(10, 60))] for _ in range(count)]


def test_requests_join_and_leave_at_any_step_without_changing_each_other(folders) -> None:
    bench = Bench(folders.first)
    lengths = [3, 30, 11, 20, 1, 25, 8, 14, 40, 2]
    for prompt, length in zip(prompts(10), lengths, strict=True):
        bench.submit(prompt, length)
        bench.steps(3)
    bench.finish()
    assert sorted(len(r.output_ids) for r in bench.ended) == sorted(lengths)
    assert max(error(folders.first, request) for request in bench.ended) < 1e-4


def test_at_most_as_many_run_as_allowed_and_the_rest_wait_in_order(folders) -> None:
    bench = Bench(folders.first, running=2)
    submitted = [bench.submit(prompt, 5) for prompt in prompts(6)]
    most = 0
    while bench.scheduler.has_work:
        bench.scheduler.step()
        most = max(most, bench.scheduler.running)
    assert most == 2
    assert bench.ended == submitted


def test_siblings_compute_their_prompt_once(folders) -> None:
    bench = Bench(folders.first)
    prompt = prompts(1)[0]
    for _ in range(4):
        bench.submit(list(prompt), 12)
    bench.finish()
    assert sorted(r.cached_tokens for r in bench.ended) == [0] + [len(prompt) - 1] * 3
    assert max(error(folders.first, request) for request in bench.ended) < 1e-4


def test_a_step_looks_at_a_bounded_part_of_a_long_queue(folders, monkeypatch) -> None:
    bench = Bench(folders.first, running=8, prefill=128)
    looks = 0
    place = SlotTable.place

    def counted(table: SlotTable, tokens: list[int]) -> Placement | None:
        nonlocal looks
        looks += 1
        return place(table, tokens)

    monkeypatch.setattr(SlotTable, "place", counted)
    waiting = prompts(200, shared=100)
    for prompt in waiting:
        bench.submit(prompt, 1)
    most = 0
    while bench.scheduler.has_work:
        looks = 0
        bench.scheduler.step()
        most = max(most, looks)
    assert most < 20
    assert sorted(r.cached_tokens for r in bench.ended)[:2] == [0, 100]


def test_turns_of_interleaved_conversations_compute_only_what_is_new(folders) -> None:
    bench = Bench(folders.first)
    conversations = prompts(4, shared=20)
    for turn in range(3):
        requests = [bench.submit(list(tokens), 9) for tokens in conversations]
        bench.finish()
        for tokens, request in zip(conversations, requests, strict=True):
            if turn:
                # All of the last turn but its last token, which was sampled and never fed.
                assert request.cached_tokens == len(tokens) - 3 - 1
            assert error(folders.first, request) < 1e-4
        conversations = [[*request.tokens(), 1, 2, 3] for request in requests]


def test_a_long_prompt_prefills_in_chunks_while_others_decode(folders) -> None:
    bench = Bench(folders.first, prefill=16)
    short = bench.submit([5, 6, 7], 40)
    bench.steps(2)
    long = bench.submit([i % 250 for i in range(100)], 10)
    bench.steps(3)
    assert len(short.output_ids) == 5 and long.computed == 48 and not long.output_ids
    bench.finish()
    assert max(error(folders.first, request) for request in (short, long)) < 1e-4


def test_a_long_prompt_prefills_in_chunks_alone(folders) -> None:
    bench = Bench(folders.first, prefill=8)
    long = bench.submit(list(range(60)), tokens=3)
    bench.finish()
    assert len(long.output_ids) == 3
    assert error(folders.first, long) < 1e-4


def test_nothing_follows_the_token_that_ends_a_turn(folders) -> None:
    ends = frozenset(range(0, 256, 5))
    bench = Bench(folders.first)
    for prompt in prompts(12):
        bench.submit(prompt, 50, ends)
    bench.finish()
    stopped = [r for r in bench.ended if r.finish is not None and r.finish.kind == "stop"]
    assert len(stopped) > 6
    for request in stopped:
        assert request.finish is not None
        assert request.output_ids[-1] == request.finish.matched
        assert not ends & set(request.output_ids[:-1])


def load_folder(bench: "Bench", folder: Path) -> None:
    model = bench.runner.model
    copy_weights(model, read_weights(model, make_assembly(model, folder), folder))


@pytest.mark.parametrize("update", [True, False])
def test_retracted_requests_go_on_under_the_weights_that_are_there_then(
    folders, update: bool
) -> None:
    bench = Bench(folders.first)
    requests = [bench.submit(prompt, 30) for prompt in prompts(3)]
    bench.steps(11)
    bench.scheduler.pause("retract")
    assert not bench.scheduler.has_work
    if update:
        load_folder(bench, folders.second)
        bench.scheduler.weights_changed("1")
        assert bench.scheduler.flush_cache()
    bench.scheduler.resume()
    bench.finish()
    for request in requests:
        assert request.retractions == 1 and len(request.output_ids) == 30
        if update:
            assert [(s.version, s.start) for s in request.spans] == [("0", 0), ("1", 11)]
            assert error(folders.first, request, 0, 11) < 1e-4
            assert error(folders.second, request, 11, 30) < 1e-4
        else:
            assert [(s.version, s.start) for s in request.spans] == [("0", 0)]
            assert error(folders.first, request) < 1e-4


def test_requests_paused_in_place_are_no_prefix_for_others_after_an_update(folders) -> None:
    bench = Bench(folders.first)
    old = bench.submit(prompts(1)[0], 20)
    bench.steps(5)
    bench.scheduler.pause("in_place")
    assert not bench.scheduler.flush_cache()
    load_folder(bench, folders.second)
    bench.scheduler.weights_changed("1")
    bench.scheduler.resume()
    sibling = bench.submit(list(old.prompt_ids), 5)
    bench.finish()
    later = bench.submit(old.tokens(), 5)
    bench.finish()
    assert [(s.version, s.start) for s in old.spans] == [("0", 0), ("1", 5)]
    assert sibling.cached_tokens == 0 and error(folders.second, sibling) < 1e-4
    assert later.cached_tokens == len(old.prompt_ids) and error(folders.second, later) < 1e-4


def test_wrong_weights_leave_the_model_as_it_was(folders, tmp_path: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(folders.first)
    config = model.config.to_dict() | {"hidden_size": 48}
    Qwen3ForCausalLM(type(model.config)(**config)).save_pretrained(tmp_path / "wide")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assembly = make_assembly(model, folders.first)
    with pytest.raises(WeightsError, match="shape"):
        read_weights(model, assembly, tmp_path / "wide")
    partial = {k: v for k, v in model.state_dict().items() if "layers.1" not in k}
    model.save_pretrained(tmp_path / "partial", state_dict=partial)
    with pytest.raises(WeightsError, match=r"lacks 11 tensors, for instance 'model\.layers\.1"):
        read_weights(model, assembly, tmp_path / "partial")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(WeightsError, match="cannot read"):
        read_weights(model, assembly, tmp_path / "broken")
    assert all(torch.equal(before[name], model.state_dict()[name]) for name in before)
