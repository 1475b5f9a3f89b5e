"""Agent loops: classes written for `run(sampling_params, **fields)` run as they are."""

import asyncio
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest
from stage import END, Stage

from agentrl.databases.documents import Record, StopReason
from agentrl.rollout.agents import register_agent
from agentrl.rollout.groups.row_building import build_row


@dataclass
class Output:
    """As verl's AgentLoopOutput, as far as it matters here."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    num_turns: int = 0
    reward_score: float | None = None


class TwoTurns:
    """A loop as they are written for verl: three arguments, tokens in hand, a cut at the end."""

    def __init__(self, config: Any, server_manager: Any, tokenizer: Any, **kwargs: Any) -> None:
        self.template_options = config.data.get("apply_chat_template_kwargs", {})
        self.response_length = config.actor_rollout_ref.rollout.response_length
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.loop = asyncio.get_running_loop()

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(
                messages,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **self.template_options,
            ),
        )
        ids, mask = list(prompt_ids), []
        observation = self.encode(f"\n<|im_start|>user\nSure?{END}\n<|im_start|>assistant\n")
        for turn in range(2):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=ids, sampling_params=sampling_params
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            assert len(output.log_probs) == len(output.token_ids)
            if turn == 0:
                ids += observation
                mask += [0] * len(observation)
        response = ids[len(prompt_ids) :]
        return self.output(prompt_ids, response[: self.response_length], mask)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def output(self, prompt: list[int], response: list[int], mask: list[int]) -> Any:
        return Output(prompt, response, mask[: len(response)])


async def row_of(stage: Stage, record: Record) -> tuple[list[int], list[int], list[float]]:
    row = build_row(record, await stage.turns(record), 1.0, 1.0, 0)
    assert len(row.tree.nodes) == 1
    return (
        row.tree["ids"].tolist(),
        row.tree["mask"].tolist(),
        row.tree["logprobs"].tolist(),
    )


async def test_a_loop_runs_as_it_is_and_its_tokens_are_the_row(stage: Stage) -> None:
    register_agent("loop", TwoTurns)
    stage.lines = ["Perhaps 7.", "<answer>42</answer>"]
    record = await stage.attempt("loop")
    assert (record.stop_reason, record.final_answer, record.score) == ("answered", "42", 1.0)
    assert (record.n_turns, record.n_segments, record.n_continuations) == (2, 1, 1)
    [first, second] = stage.service.prompts
    assert first == stage.renderer.render_prompt([{"role": "user", "content": "How many?"}])
    ids, mask, logprobs = await row_of(stage, record)
    assert ids == second + stage.service.outputs[1]
    trained = [place for place, one in enumerate(mask) if one]
    assert [ids[place] for place in trained] == stage.service.outputs[0] + stage.service.outputs[1]
    assert [logprobs[place] for place in trained] == pytest.approx(
        [-ids[place] / 1000 for place in trained]
    )
    turns = await stage.turns(record)
    assert [turn.output_text for turn in turns] == ["Perhaps 7.", "<answer>42</answer>"]
    assert turns[0].messages == [{"role": "user", "content": "How many?"}]


async def test_what_a_loop_masks_is_in_the_row_and_not_trained(stage: Stage) -> None:
    class Ashamed(TwoTurns):
        def output(self, prompt: list[int], response: list[int], mask: list[int]) -> Any:
            n_first = mask.index(0)
            return {  # a mapping will do
                "prompt_ids": prompt,
                "response_ids": response[:-1],
                "response_mask": [0] * n_first + mask[n_first:-1],
            }

    register_agent("ashamed", Ashamed)
    stage.lines = ["Perhaps 7.", "<answer>42</answer>"]
    record = await stage.attempt("ashamed")
    ids, mask, _ = await row_of(stage, record)
    cut = stage.service.outputs[1][:-1]
    assert ids == stage.service.prompts[1] + cut
    assert [token for token, one in zip(ids, mask, strict=True) if one] == cut
    assert record.n_turns == 1


async def test_a_loop_that_returns_other_tokens_than_were_sampled_fails_with_the_reason(
    stage: Stage,
) -> None:
    class Retokenizing(TwoTurns):
        def output(self, prompt: list[int], response: list[int], mask: list[int]) -> Any:
            again = self.encode(self.tokenizer.decode(response).replace("7", "8"))
            return Output(prompt, again, [1] * len(again))

    register_agent("retokenizing", Retokenizing)
    stage.lines = ["Perhaps 7.", "<answer>42</answer>"]
    async with stage.sampler("retokenizing") as sampler:
        with pytest.raises(ValueError, match="return the ids that it gave, not ids of their text"):
            await sampler.run()
        # What it did is there to be looked at.
        stored = await stage.turns(sampler.record)
        assert [turn.output_text for turn in stored] == ["Perhaps 7.", "<answer>42</answer>"]


async def test_a_loops_own_score_counts(stage: Stage) -> None:
    class Judging(TwoTurns):
        def output(self, prompt: list[int], response: list[int], mask: list[int]) -> Any:
            return Output(prompt, response, mask, reward_score=0.25)

    register_agent("judging", Judging)
    stage.lines = ["Perhaps 7.", "<answer>42</answer>"]
    record = await stage.attempt("judging")
    assert (record.score, record.scores) == (0.25, {"reward_score": 0.25})


async def test_a_loop_that_asks_beyond_the_limits_ends_there(stage: Stage) -> None:
    stage.flags = ("--max_turns", "1")
    register_agent("loop", TwoTurns)
    stage.lines = ["Perhaps 7."]
    record = await stage.attempt("loop")
    assert (record.stop_reason, record.score) == (StopReason.MAX_TURNS, 0.0)
    assert [turn.output_text for turn in await stage.turns(record)] == ["Perhaps 7."]


async def test_a_loop_gets_the_tasks_fields_by_name(stage: Stage) -> None:
    class Named:
        def __init__(self, server_manager: Any) -> None:
            self.server_manager = server_manager

        async def run(
            self, sampling_params: dict[str, Any], raw_prompt: Any, reward_model: Any, level: int
        ) -> Any:
            assert (reward_model["ground_truth"], level) == ("42", 3)
            limited = {**sampling_params, "max_tokens": 2, "logprobs": True}
            prompt = [1, 2, 3]
            output = await self.server_manager.generate(
                "one", prompt_ids=prompt, sampling_params=limited
            )
            assert (len(output.token_ids), output.stop_reason) == (2, "length")
            return Output(prompt, output.token_ids, [1, 1])

    register_agent("named", Named)
    stage.lines = ["A long answer."]
    record = await stage.attempt("named", fields={"level": 3})
    # Cut off: no answer, as with every agent.
    assert (record.stop_reason, record.final_answer) == (StopReason.MAX_NEW_TOKENS, None)
    with pytest.raises(ValueError, match=r"Named\.run of task line-1 wants level"):
        await stage.attempt("named")


@pytest.mark.parametrize(
    ("parameters", "others", "message"),
    [
        ({"temperature": 0.2}, {}, "sampling parameter temperature = 0.2 is not the run's"),
        ({"stop": ["</a>"]}, {}, "sampling parameter stop"),
        ({}, {"image_data": ["picture"]}, "takes token ids only, not image_data"),
    ],
)
async def test_what_would_make_other_logprobs_than_the_trainers_is_refused(
    stage: Stage, parameters: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    class Odd:
        def __init__(self, server_manager: Any) -> None:
            self.server_manager = server_manager

        async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any:
            await self.server_manager.generate(
                "one", prompt_ids=[1], sampling_params={**sampling_params, **parameters}, **others
            )

    register_agent("odd", Odd)
    with pytest.raises(ValueError, match=message):
        await stage.attempt("odd")


async def test_a_constructor_that_wants_more_than_there_is_is_refused_when_registered() -> None:
    class Greedy:
        def __init__(self, server_manager: Any, ray_cluster: Any) -> None: ...

        async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any: ...

    with pytest.raises(ValueError, match=r"Greedy\(\) wants ray_cluster; given are config, "):
        register_agent("greedy", Greedy)
