"""Checks tools, auxiliary models and the reward service before a launch.

Each check sends a small request and reads the answer with the samplers' code. Services that the
launch starts itself are not checked.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from agentrl.configs import Config, ConfigError
from agentrl.databases.documents import Record, Split, StopReason, Task
from agentrl.databases.feeder import make_tasks
from agentrl.databases.task_file import TaskKind, TaskLine
from agentrl.failures import InfrastructureFailure
from agentrl.launcher.console import Say
from agentrl.launcher.preflight import scorers_in_use
from agentrl.rollout.llm.client import LLMClient, NoModelAnswered
from agentrl.rollout.llm.models import AgentModel, load_agent_models
from agentrl.rollout.scorers.functions import Messages
from agentrl.rollout.scorers.judge import Judge, JudgeError
from agentrl.rollout.scorers.reward_service import RewardService, RewardServiceError
from agentrl.rollout.scorers.ruler import Ruler, RulerError
from agentrl.rollout.scorers.scorer_registry import JUDGE_NAMES
from agentrl.rollout.tools.browse import try_browsing
from agentrl.rollout.tools.server_list import read_servers
from agentrl.rollout.tools.toolbox import ToolBox, open_tools

Ask = Callable[[LLMClient], Awaitable[object]]

_PATIENCE_S = 10.0  # wait for tool servers by URL, which may still be starting
_SILENT_S = 2.0  # a longer wait is reported
_HIDDEN = logging.getLogger("agentrl.rollout")
_HIDDEN.addHandler(logging.NullHandler())  # failures are raised or reported here instead


def try_services(config: Config, kinds: Sequence[TaskKind], say: Say) -> None:
    """Send a request to each external service that tasks of these kinds need.

    `say`: called with a sentence for a long wait, and for a model that fails while another one of
    its list works. Raises `ConfigError` or `ToolServerUnreachable`.
    """
    asyncio.run(_try_all(config, kinds, say))


async def _try_all(config: Config, kinds: Sequence[TaskKind], say: Say) -> None:
    file = config.agent.agent_config_path
    agents = load_agent_models(file)
    used = scorers_in_use(kinds, config)
    trials: list[Awaitable[None]] = []
    if read_servers(config.agent):
        trials.append(_try_tools(config, say))
        if agents.browsing is None or agents.browsing.status:
            trials.append(_try_models("browse_agent", agents.browse_agent, file, try_browsing, say))
    if not used.keys().isdisjoint(JUDGE_NAMES):
        ask = partial(_judge, agents.judge.judge_prompt_template)
        trials.append(_try_models("scorer_agent", agents.scorer_agent, file, ask, say))
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
    async with tried_tools(config, say) as box:
        if not box.catalogue.tools:
            raise ConfigError(
                f"--mcp_manager_url {config.agent.mcp_manager_url}: the servers offer no tool: "
                "check --mcp_server_name, --mcp_allow_tools and --mcp_block_tools"
            )


@asynccontextmanager
async def tried_tools(config: Config, say: Say) -> AsyncIterator[ToolBox]:
    """The tools, opened as before a launch. Raises as `open_tools`.

    A server that is started here may first install or load something: it has `--startup_timeout`.
    """
    agent, patience_s = config.agent, config.sampling.startup_timeout
    if not any(spec.started_here for spec in read_servers(agent)):
        patience_s = min(_PATIENCE_S, patience_s)
    waits = f"the tools of --mcp_manager_url {agent.mcp_manager_url} (up to {patience_s:g} s)"
    async with _told(waits, say), open_tools(agent, patience_s, None) as box:
        yield box


async def _try_models(
    key: str, models: Sequence[AgentModel], file: str | None, ask: Ask, say: Say
) -> None:
    """Ask each model of a list separately, so that no model hides the failure of another.

    Raises `ConfigError` if all fail.
    """
    failures = []
    async with _told(f"the models of `{key}` in {file}", say):
        for model in models:
            # At most one retry: each attempt may take minutes.
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


async def _judge(template: str | None, models: LLMClient) -> None:
    await Judge(models, template).score("What is 2 + 2?", "4", "4")


async def _rank(models: LLMClient) -> None:
    line = TaskLine(id="probe", query="What is 2 + 2?")
    rollouts = [_answered(line, str(number), said) for number, said in enumerate(("4", "5"))]
    task = rollouts[0][0]
    await Ruler(models).score_group(
        task, [record for _, record, _ in rollouts], [messages for _, _, messages in rollouts]
    )


def _answered(line: TaskLine, name: str, answer: str) -> tuple[Task, Record, Messages]:
    """Make a task and a rollout of it whose only message is `answer`. Neither is stored."""
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
    """Report the wait for `what` if the block takes longer than `_SILENT_S` seconds."""
    telling = asyncio.get_running_loop().call_later(_SILENT_S, say, f"waiting for {what}")
    try:
        yield
    finally:
        telling.cancel()
