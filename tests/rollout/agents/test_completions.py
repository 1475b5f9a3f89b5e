"""Samplers that ask the model by `create_chat_completions`, as those for the original AgentRL."""

import json
import logging
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from stage import Stage, tool_call

from agentrl import AsyncSampler, register_agent
from agentrl.configs import ConfigError
from agentrl.databases.documents import Record, StopReason, TurnStatus
from agentrl.rollout.agents import completions, load_agents
from agentrl.rollout.agents.agent_registry import find_agent
from agentrl.rollout.groups.row_building import build_row
from agentrl.rollout.scorers import scorer_registry

LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a bin up.",
        "parameters": {"type": "object", "properties": {"bin": {"type": "string"}}},
    },
}


async def trained(stage: Stage, record: Record) -> tuple[list[int], list[list[int]]]:
    """The tokens that are trained of a record, and its paths."""
    row = build_row(record, await stage.turns(record), 1.0, 1.0, 0)
    ids, mask = row.tree["ids"], row.tree["mask"]
    paths: list[list[int]] = []
    for node in row.tree.nodes:
        before = paths[node.parent] if node.parent >= 0 else []
        paths.append(before + ids[node.start : node.end].tolist())
    return ids[mask == 1].tolist(), paths


async def test_an_agent_with_tools_of_its_own_is_trained_on_what_was_sampled(stage: Stage) -> None:
    class Own(AsyncSampler):
        async def run(self) -> None:
            messages: list[Any] = [{"role": "user", "content": self.task.query}]
            while True:
                response = await self.create_chat_completions(messages, tools=[LOOK_UP])
                assert isinstance(response, ChatCompletion)
                message = response.choices[0].message
                messages.append(message)  # the object, as with the openai client
                for call in message.tool_calls or []:
                    place = json.loads(call.function.arguments)["bin"]
                    result = {"role": "tool", "tool_call_id": call.id, "content": f"{place}: 42"}
                    messages.append(result)
                if response.choices[0].finish_reason == "stop":
                    self.record.meta_infos["asked"] = len(messages)
                    return

        async def evaluate_record(self, record: Record) -> float:
            return 0.5 if record.meta_infos["asked"] == 4 else 0.0

    register_agent("own", Own)
    call = "<think>Look  it up.</think>" + tool_call("look_up", '{"bin":   "K7"}')
    stage.lines = [call, "<answer>42</answer>"]
    record = await stage.attempt("own")
    assert (record.score, record.scores) == (0.5, {"own": 0.5})
    assert (record.stop_reason, record.final_answer) == (StopReason.ANSWERED, "42")
    assert (record.n_turns, record.n_segments, record.n_tool_calls) == (2, 1, 1)
    assert record.tools_offered == ["look_up"]
    # The second prompt has the first answer as it was sampled, odd spaces and thought included.
    first, second = stage.service.prompts
    assert second[: len(first) + len(stage.service.outputs[0])] == first + stage.service.outputs[0]
    ids, [path] = await trained(stage, record)
    assert ids == stage.service.outputs[0] + stage.service.outputs[1]
    assert path == second + stage.service.outputs[1]
    [turn, _] = await stage.turns(record)
    [kept] = turn.tool_calls
    assert (kept.name, kept.arguments, kept.result) == ("look_up", {"bin": "K7"}, "K7: 42")


async def test_the_answer_has_the_shape_of_the_openai_client(stage: Stage) -> None:
    seen: list[ChatCompletion] = []

    class Own(AsyncSampler):
        async def run(self) -> None:
            asked = [{"role": "user", "content": "Which?"}]
            seen.append(await self.create_chat_completions(messages=asked, tools=[LOOK_UP]))
            seen.append(await self.create_chat_completions(asked, max_tokens=3))

    register_agent("own", Own)
    stage.lines = ["So: " + tool_call("look_up", '{"bin": "K7"}'), "A long answer indeed."]
    await stage.attempt("own")
    called, cut = seen
    message = called.choices[0].message
    assert (message.role, message.content) == ("assistant", "So:")
    assert message.tool_calls is not None and message.tool_calls[0].type == "function"
    assert called.choices[0].finish_reason == "tool_calls"
    assert called.usage is not None
    assert called.usage.prompt_tokens == len(stage.service.prompts[0])
    assert called.usage.completion_tokens == len(stage.service.outputs[0])
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None and cut.usage.completion_tokens == 3


@pytest.mark.parametrize("shown", ["object", "dump", "content"])
async def test_an_answer_is_recognised_however_it_is_shown(stage: Stage, shown: str) -> None:
    class Own(AsyncSampler):
        async def run(self) -> None:
            asked = {"role": "user", "content": "Which?"}
            message = (await self.create_chat_completions([asked])).choices[0].message
            back: Any = {
                "object": message,
                "dump": message.model_dump(),
                "content": {"role": "assistant", "content": message.content},
            }[shown]
            again = {"role": "user", "content": "Sure?"}
            await self.create_chat_completions([asked, back, again])

    register_agent("own", Own)
    stage.lines = ["K7,  or  so", "Yes."]
    record = await stage.attempt("own")
    first, second = stage.service.prompts
    assert second[: len(first)] == first and record.n_segments == 1
    assert second[len(first) :][: len(stage.service.outputs[0])] == stage.service.outputs[0]


async def test_an_agent_that_changes_an_answer_trains_what_it_said_and_reads_the_change(
    stage: Stage,
) -> None:
    class Own(AsyncSampler):
        async def run(self) -> None:
            asked = {"role": "user", "content": "Which?"}
            await self.create_chat_completions([asked])
            changed = {"role": "assistant", "content": "Something else."}
            again = {"role": "user", "content": "Sure?"}
            await self.create_chat_completions([asked, changed, again])

    register_agent("own", Own)
    stage.lines = ["K7.", "Yes."]
    record = await stage.attempt("own")
    assert record.n_segments == 2
    ids, _ = await trained(stage, record)
    assert sorted(ids) == sorted(stage.service.outputs[0] + stage.service.outputs[1])
    assert "Something else." in stage.renderer.codec.decode(stage.service.prompts[1])


async def test_results_are_kept_with_the_calls_that_they_answer(stage: Stage) -> None:
    class Own(AsyncSampler):
        async def run(self) -> None:
            messages: list[Any] = [{"role": "user", "content": "Which?"}]
            for results in (["one", "two"], ["three"], []):
                response = await self.create_chat_completions(messages, tools=[LOOK_UP])
                messages.append(response.choices[0].message)
                # Without ids, in the order of the calls; they are sent again with each request.
                messages += [{"role": "tool", "content": result} for result in results]

    register_agent("own", Own)
    first, second, third = (tool_call("look_up", f'{{"bin": "K{n}"}}') for n in (1, 2, 3))
    stage.lines = [first + second, third, "Done."]
    record = await stage.attempt("own")
    kept = [
        [(call.arguments["bin"], call.result) for call in turn.tool_calls]
        for turn in await stage.turns(record)
    ]
    assert kept == [[("K1", "one"), ("K2", "two")], [("K3", "three")], []]
    assert (record.n_tool_calls, record.n_segments) == (3, 1)


async def test_calls_that_cannot_be_read_stay_in_the_text(stage: Stage) -> None:
    class Own(AsyncSampler):
        async def run(self) -> None:
            asked = [{"role": "user", "content": "Which?"}]
            message = (
                (await self.create_chat_completions(asked, tools=[LOOK_UP])).choices[0].message
            )
            assert message.tool_calls is None and "{nonsense" in (message.content or "")

    register_agent("own", Own)
    stage.lines = ["<tool_call>\n{nonsense\n</tool_call>"]
    record = await stage.attempt("own")
    [turn] = await stage.turns(record)
    assert turn.status == TurnStatus.FORMAT_ERROR


async def test_a_limit_ends_the_record_with_its_turns(stage: Stage) -> None:
    class Endless(AsyncSampler):
        async def run(self) -> None:
            messages: list[Any] = [{"role": "user", "content": "Go on."}]
            while True:
                response = await self.create_chat_completions(messages)
                messages += [response.choices[0].message, {"role": "user", "content": "Go on."}]

        async def evaluate_record(self, record: Record) -> int:
            return record.n_turns

    register_agent("own", Endless)
    stage.flags = ("--max_turns", "3")
    stage.lines = ["one", "two", "three"]
    record = await stage.attempt("own")
    assert (record.stop_reason, record.n_turns) == (StopReason.MAX_TURNS, 3)
    assert (record.score, record.final_answer) == (3.0, None)


async def test_an_option_that_cannot_have_an_effect_is_said_once(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "_told", set())

    class Own(AsyncSampler):
        async def run(self) -> None:
            asked = [{"role": "user", "content": "Which?"}]
            for _ in range(2):
                await self.create_chat_completions(asked, temperature=0.7, repeat_penalty=1.2)

    register_agent("own", Own)
    stage.lines = ["K7.", "K8."]
    with caplog.at_level(logging.WARNING):
        await stage.attempt("own")
    said = [line for line in caplog.messages if "has no effect" in line]
    assert len(said) == 2 and any("temperature=..." in line for line in said)


@pytest.fixture
def own_scorers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_registry, "_registered", {})


@pytest.fixture
def free_names() -> Iterator[None]:
    """What a user's file imports is imported anew: folders of these tests have the same names."""
    names = ("configs", "databases", "log", "rollout")
    before = {name: m for name, m in sys.modules.items() if name.partition(".")[0] in names}
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]
    sys.modules.update(before)


# As the guide of the first version writes them: a task's class, a sampler, a scorer.
SAMPLER_FILE = """
from databases import register_new_model, Task
from rollout.sampler import AsyncSampler
from rollout.mcp.scorer import MCPScorerFactory
from configs import AgentTrainingConfig
from log import logger
from typing import Dict, Any


@register_new_model
class RFTTask(Task):
    inputs: list[dict]
    target: str


class MySampler(AsyncSampler):
    async def run(self):
        messages = [{"role": "user", "content": "Hello, who are you?"}] + self.task.inputs
        response = await self.create_chat_completions(messages)
        logger.info("said %s", response.choices[0].message.content)
        self.record.meta_infos["said"] = response.choices[0].message.content

    async def evaluate_record(self, record):
        return 1 if record.meta_infos["said"] == self.task.target else 0


async def my_custom_scorer(
    model_answer: str,
    ground_truth: Dict[str, Any],
    scorer_agent_config: Dict[str, Any]
) -> float:
    judges = [model["model"] for model in scorer_agent_config["models"]]
    return float(model_answer == ground_truth["answer"] and judges == ["judge"]
                 and ground_truth["query"] == "How many?")


MCPScorerFactory.register_scorer("custom_scorer", my_custom_scorer)
"""


async def test_a_file_of_the_first_version_runs_unedited(
    stage: Stage, own_scorers: None, free_names: None, tmp_path: Path
) -> None:
    file = tmp_path / "my_sampler.py"
    file.write_text(SAMPLER_FILE)
    models = "{models: [{api_key: k, base_url: 'http://127.0.0.1:1/v1', model: judge}]}"
    (tmp_path / "agents.yml").write_text(f"scorer_agent: {models}")
    agents = str(tmp_path / "agents.yml")
    stage.flags = ("--agent_module", str(file), "--agent_name", "MySampler",
                   "--agent_config_path", agents)  # fmt: skip
    load_agents(stage.config)
    stage.lines = ["A model.", "I do not know.", "<answer>42</answer>"]
    fields = {"inputs": [{"role": "user", "content": "Briefly."}], "target": "A model."}
    scores = [(await stage.attempt("MySampler", fields=fields)).score for _ in range(2)]
    assert scores == [1.0, 0.0]
    assert "Briefly." in stage.renderer.codec.decode(stage.service.prompts[0])
    assert (await stage.attempt("mcp", scorer="custom_scorer")).score == 1.0
    with pytest.raises(ValueError, match="task line-1 is no RFTTask: `inputs`: Field required"):
        await stage.attempt("MySampler", fields={"target": "a"})


def test_a_scheduler_that_a_file_starts_itself_is_refused_with_what_to_do(
    tmp_path: Path, own_agents: None, free_names: None, stage: Stage
) -> None:
    file = tmp_path / "scheduled.py"
    file.write_text(
        textwrap.dedent(
            """
            from rollout.sampler import AsyncSampler
            from rollout.scheduler import SamplingScheduler

            class Mine(AsyncSampler):
                async def run(self): ...

            SamplingScheduler(config=None, sampler_class=Mine, dataset=[], split="train").run()
            """
        )
    )
    stage.flags = ("--agent_module", str(file))
    with pytest.raises(ConfigError, match="--agent_name Mine, and the tasks of its dataset"):
        load_agents(stage.config)


def test_names_that_the_user_has_are_the_users(
    tmp_path: Path, free_names: None, stage: Stage
) -> None:
    (tmp_path / "configs.py").write_text("mine = 1")
    (tmp_path / "own_names.py").write_text(
        "import configs\nfrom agentrl import AsyncSampler\nassert configs.mine == 1\n"
        "class Named(AsyncSampler):\n    async def run(self): ...\n"
    )
    stage.flags = ("--agent_module", str(tmp_path / "own_names.py"), "--agent_name", "Named")
    load_agents(stage.config)
    assert find_agent("Named").__name__ == "Named"
