"""Agents by name: built in, registered by a file, installed."""

import sys
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import pytest

from agentrl.configs import ConfigError, parse_config
from agentrl.rollout.agents import find_agent, known_agents, load_agents, register_agent
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.agents.function import FunctionSampler
from agentrl.rollout.agents.loop import LoopSampler
from agentrl.rollout.agents.math import MathSampler
from agentrl.rollout.agents.mcp import MCPSampler
from agentrl.rollout.agents.single_turn import SingleTurnSampler

pytestmark = pytest.mark.usefixtures("own_agents")


async def function(task: Any, llm: Any, tools: Any) -> str:
    """What it does."""
    return ""


def load(tmp_path: Path, code: str, *flags: str) -> None:
    file = tmp_path / "agents.py"
    file.write_text(code, encoding="utf-8")
    load_agents(parse_config(["--agent_module", str(file), *flags]))


def test_the_built_in_agents_are_there() -> None:
    assert known_agents() >= {"mcp", "tool_agent", "single_turn", "single_turn_agent", "math"}
    assert find_agent("mcp") is find_agent("tool_agent") is MCPSampler
    assert find_agent("single_turn") is find_agent("single_turn_agent") is SingleTurnSampler
    assert find_agent("math") is MathSampler


def test_a_sampler_class_a_function_and_a_loop_can_be_registered() -> None:
    class Mine(SingleTurnSampler): ...

    class Loop:
        async def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any: ...

    register_agent("mine", Mine)
    register_agent("function", function)
    register_agent("loop", Loop)
    assert find_agent("mine") is Mine
    assert issubclass(find_agent("function"), FunctionSampler)
    assert find_agent("function").__doc__ == "What it does."
    assert issubclass(find_agent("loop"), LoopSampler)
    assert known_agents() >= {"mine", "function", "loop"}
    register_agent("function", function)  # once more is no fault


def test_what_is_no_agent_is_refused_with_the_reason() -> None:
    class Idle(AsyncSampler): ...

    class Blocking:
        def run(self, sampling_params: dict[str, Any], **fields: Any) -> Any: ...

    class Unasked:
        async def run(self) -> Any: ...

    async def narrow(task: Any) -> str:
        return ""

    for agent, message in (
        (Idle, "Idle does not implement run"),
        (Blocking, "must be an AsyncSampler subclass, an async function"),
        (Unasked, r"must take \(sampling_params, \*\*fields\)"),
        (narrow, r"must take \(task, llm, tools\)"),
        (lambda task, llm, tools: "", "must be an AsyncSampler subclass"),
        ("text", "must be an AsyncSampler subclass"),
    ):
        with pytest.raises(ValueError, match=message):
            register_agent("bad", agent)  # type: ignore[arg-type]
        assert "bad" not in known_agents()


def test_a_name_has_one_agent() -> None:
    async def other(task: Any, llm: Any, tools: Any) -> str:
        return ""

    register_agent("mine", function)
    with pytest.raises(ValueError, match="there are two agents 'mine'"):
        register_agent("mine", other)
    with pytest.raises(ValueError, match="agent 'mcp' is built in"):
        register_agent("mcp", function)


def test_an_unknown_agent_is_refused_with_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"no agent 'other'; known: .*math, mcp, .*--agent_modu"):
        find_agent("other")


MODULE = """
from agentrl.rollout.agents import register_agent

async def ask(task, llm, tools):
    return (await llm.chat(llm.task_messages())).text

register_agent("asker", ask)
"""


def test_a_file_registers_agents_once_however_often_it_is_named(tmp_path: Path) -> None:
    load(tmp_path, MODULE, "--agent_name", "asker")
    load(tmp_path, MODULE, "--agent_name", "asker")
    assert issubclass(find_agent("asker"), FunctionSampler)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("\nraise KeyError('mine')", r"agents\.py cannot be used: KeyError: 'mine' \(line 2\)"),
        ("x = = 1", r"agents\.py cannot be used: SyntaxError: .*line 1"),
        (MODULE.replace("asker", "mcp"), r"cannot be used: ValueError: agent 'mcp' is built in"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(
    tmp_path: Path, code: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, code)


def test_a_missing_file_and_an_unknown_default_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--agent_module none\.py: there is no such Python file"):
        load_agents(parse_config(["--agent_module", "none.py"]))
    with pytest.raises(ConfigError, match="there is no agent 'other'"):
        load(tmp_path, MODULE, "--agent_name", "other")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed, with entry points for agents."""
    (tmp_path / "some_agents.py").write_text("async def planner(task, llm, tools): ...\n")
    info = tmp_path / "some_agents-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-agents\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[agentrl.agents]\nplanner = some_agents:planner\nbroken = some_agents:missing\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert Distribution.from_name("some-agents").version == "1"


@pytest.mark.usefixtures("installed")
def test_an_installed_package_brings_agents() -> None:
    assert known_agents() >= {"planner", "broken"}
    assert issubclass(find_agent("planner"), FunctionSampler)
    with pytest.raises(ConfigError, match=r"agent 'broken' of entry point some_agents:missing"):
        find_agent("broken")


def test_a_sampler_of_the_users_own_is_run_as_it_is(tmp_path: Path) -> None:
    load(
        tmp_path,
        "from agentrl import SingleTurnSampler, register_agent\n"
        "class Own(SingleTurnSampler):\n"
        "    async def evaluate_record(self, record): return record\n"
        "register_agent('own', Own)\n",
    )
    own = find_agent("own")
    assert own.__name__ == "Own" and own.evaluate_record is not AsyncSampler.evaluate_record
