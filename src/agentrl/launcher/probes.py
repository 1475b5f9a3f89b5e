"""Checks tools, auxiliary models and the reward service before anything is launched.

Each check makes one small request and reads the answer with the code that the samplers use.
Services that the launch starts itself do not exist yet, and are not checked.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from agentrl.configs import Config, ConfigError
from agentrl.databases.documents import Record, Split, StopReason, Task
from agentrl.databases.feeder import make_tasks
from agentrl.databases.task_file import TaskKind, TaskLine
from agentrl.failures import InfrastructureFailure
from agentrl.launcher.preflight import scorers_in_use
from agentrl.rollout.llm.client import LLMClient, NoModelAnswered
from agentrl.rollout.llm.models import AgentModel, load_agent_models
from agentrl.rollout.scorers.functions import Messages
from agentrl.rollout.scorers.judge import Judge, JudgeError
from agentrl.rollout.scorers.reward_service import RewardService, RewardServiceError
from agentrl.rollout.scorers.ruler import Ruler, RulerError
from agentrl.rollout.tools.browse import try_browsing
from agentrl.rollout.tools.server_list import ToolTransport, read_servers
from agentrl.rollout.tools.toolbox import open_tools

Say = Callable[[str], None]
Ask = Callable[[LLMClient], Awaitable[object]]

PATIENCE_S = 10.0  # for tool servers that listen: one may be on its way up
_SILENT_S = 2.0  # a wait that is longer is told
_HIDDEN = logging.getLogger("agentrl.rollout")
_HIDDEN.addHandler(logging.NullHandler())  # what it would warn of is raised here


def try_services(config: Config, kinds: Sequence[TaskKind], say: Say) -> None:
    """Try what the run of `config` needs on tasks of these kinds and is given from elsewhere.

    `say`: told what is waited for, and of models that fail while others of their list do not.
    Raises `ConfigError`, or `ToolServerUnreachable`.
    """
    asyncio.run(_try_all(config, kinds, say))


async def _try_all(config: Config, kinds: Sequence[TaskKind], say: Say) -> None:
    file = config.agent.agent_config_path
    agents = load_agent_models(file)
    used = scorers_in_use(kinds, config)
    trials: list[Awaitable[None]] = []
    if read_servers(config.agent):
        trials.append(_try_tools(config, say))
        trials.append(_try_models("browse_agent", agents.browse_agent, file, try_browsing, say))
    if "agentcpm" in used:
        trials.append(_try_models("scorer_agent", agents.scorer_agent, file, _judge, say))
    if "ruler" in used:
        key = "ruler_agent" if agents.ruler_agent else "scorer_agent"
        trials.append(_try_models(key, agents.ranking_models, file, _rank, say))
    if "http" in used and agents.http_scorer is not None:
        service = RewardService(agents.http_scorer)
        trials.append(_try_reward_service(service, used["http"], say))
    failures = await asyncio.gather(*trials, return_exceptions=True)
    for failure in failures:
        if failure is not None:
            raise failure


async def _try_tools(config: Config, say: Say) -> None:
    agent = config.agent
    patience_s = min(PATIENCE_S, config.sampling.startup_timeout)
    if any(spec.transport is ToolTransport.STDIO for spec in read_servers(agent)):
        patience_s = config.sampling.startup_timeout  # it may have to be installed first
    waits = f"the tools of --mcp_manager_url {agent.mcp_manager_url} (up to {patience_s:g} s)"
    async with _told(waits, say), open_tools(agent, patience_s, None) as box:
        if not box.catalogue.tools:
            raise ConfigError(
                f"--mcp_manager_url {agent.mcp_manager_url}: the servers offer no tool: "
                "check --mcp_server_name, --mcp_allow_tools and --mcp_block_tools"
            )


async def _try_models(
    key: str, models: Sequence[AgentModel], file: str | None, ask: Ask, say: Say
) -> None:
    """Each model of a list by itself: others would hide one that fails."""
    failures = []
    async with _told(f"the models of `{key}` in {file}", say):
        for model in models:
            # One more try than none: a model may be asked its first question for minutes.
            once = model.model_copy(update={"retries": min(model.retries, 1)})
            alone = LLMClient([once], f"the model of `{key}`")
            async with alone:
                try:
                    await ask(alone)
                except (InfrastructureFailure, JudgeError, NoModelAnswered, RulerError) as error:
                    failures.append(
                        f"`{key}` in {file}: {model.model} at {model.base_url} cannot be used: "
                        f"{error} (what it must reply: docs/reference/rewards.md)"
                    )
    if failures and len(failures) == len(models):
        raise ConfigError(failures[0])
    for failure in failures:
        say(failure)


async def _try_reward_service(service: RewardService, line: TaskLine, say: Say) -> None:
    task, record, messages = _answered(line, "probe", line.answer or "")
    async with _told("the reward service of `http_scorer`", say), service:
        try:
            await service.score(task, record, messages)
        except (InfrastructureFailure, RewardServiceError) as error:
            raise ConfigError(
                f"`http_scorer`: {error} (what it must answer: docs/reference/rewards.md)"
            ) from None


async def _judge(models: LLMClient) -> None:
    await Judge(models).score("What is 2 + 2?", "4", "4")


async def _rank(models: LLMClient) -> None:
    line = TaskLine(id="probe", query="What is 2 + 2?")
    rollouts = [_answered(line, str(number), said) for number, said in enumerate(("4", "5"))]
    task = rollouts[0][0]
    await Ruler(models).score_group(
        task, [record for _, record, _ in rollouts], [messages for _, _, messages in rollouts]
    )


def _answered(line: TaskLine, name: str, answer: str) -> tuple[Task, Record, Messages]:
    """A task, and a rollout of it that said this answer at once; neither is stored."""
    (task,) = make_tasks([line], Split.TRAIN, 0, 1, [0])
    record = Record(
        id=name, task=task.id, task_id=line.id, rollout=0, attempt=0, split=Split.TRAIN, epoch=0,
        owner="probe", query=line.query, n_turns=1, final_answer=answer,
        stop_reason=StopReason.ANSWERED,
    )  # fmt: skip
    asked = line.messages or [{"role": "user", "content": line.query}]
    return task, record, [*asked, {"role": "assistant", "content": answer}]


@asynccontextmanager
async def _told(what: str, say: Say) -> AsyncIterator[None]:
    """Say what is waited for, once that takes long."""
    telling = asyncio.get_running_loop().call_later(_SILENT_S, say, f"waiting for {what}")
    try:
        yield
    finally:
        telling.cancel()
