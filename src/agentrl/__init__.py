"""AgentRL: reinforcement learning for language models that act through tools.

The public names, which guides and users' files import, for example

    from agentrl import register_scorer, Score

    agents     register_agent, AsyncSampler, SingleTurnSampler, MCPSampler, LimitReached,
               extract_answer, and the documents that they work on: Task, Record, StopReason
    scorers    register_scorer, Score, MCPScorerFactory
    losses     LossInputs, LossConfig, TokenLoss, token_ratio, sequence_mean, sequence_sum,
               depends_on, Scope, and to try one: Objective, BatchTotals
    scripts    train_supervised, SupervisedRow, StepStatistics, OptimizerConfig, ComputeConfig
    failures   InfrastructureFailure: raised by agents and scorers for an outage
    servers    admits, require_key, KeyNeeded: the key of a server that other machines reach
    databases  unpack_ints, unpack_floats, unpack_mask, find_mongod
    notebooks  open_run: the documents of a run as Arrow tables

A name is imported from its module when it is first asked for (PEP 562), so that `import agentrl`
loads neither torch nor a database driver. Modules of the package import one another directly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.access import KeyNeeded, admits, require_key
    from agentrl.configs import ComputeConfig, LossConfig, OptimizerConfig
    from agentrl.databases.arrays import unpack_floats, unpack_ints, unpack_mask
    from agentrl.databases.documents import Record, StopReason, Task
    from agentrl.databases.mongod import find_mongod
    from agentrl.failures import InfrastructureFailure
    from agentrl.launcher.run_tables import open_run
    from agentrl.rollout.agents import register_agent
    from agentrl.rollout.agents.answers import extract_answer
    from agentrl.rollout.agents.base import AsyncSampler
    from agentrl.rollout.agents.limits import LimitReached
    from agentrl.rollout.agents.mcp import MCPSampler
    from agentrl.rollout.agents.single_turn import SingleTurnSampler
    from agentrl.rollout.scorers import Score, register_scorer
    from agentrl.rollout.scorers.mcp_factory import MCPScorerFactory
    from agentrl.training.losses import (
        BatchTotals,
        LossInputs,
        Scope,
        TokenLoss,
        depends_on,
        sequence_mean,
        sequence_sum,
        token_ratio,
    )
    from agentrl.training.step.objective import Objective
    from agentrl.training.step.statistics import StepStatistics
    from agentrl.training.supervised.script import SupervisedRow, train_supervised

__version__ = "0.2.0"

__all__ = [
    "AsyncSampler",
    "BatchTotals",
    "ComputeConfig",
    "InfrastructureFailure",
    "KeyNeeded",
    "LimitReached",
    "LossConfig",
    "LossInputs",
    "MCPSampler",
    "MCPScorerFactory",
    "Objective",
    "OptimizerConfig",
    "Record",
    "Scope",
    "Score",
    "SingleTurnSampler",
    "StepStatistics",
    "StopReason",
    "SupervisedRow",
    "Task",
    "TokenLoss",
    "__version__",
    "admits",
    "depends_on",
    "extract_answer",
    "find_mongod",
    "open_run",
    "register_agent",
    "register_scorer",
    "require_key",
    "sequence_mean",
    "sequence_sum",
    "token_ratio",
    "train_supervised",
    "unpack_floats",
    "unpack_ints",
    "unpack_mask",
]

_HOMES = {
    "agentrl.access": "KeyNeeded admits require_key",
    "agentrl.configs": "ComputeConfig LossConfig OptimizerConfig",
    "agentrl.databases.arrays": "unpack_floats unpack_ints unpack_mask",
    "agentrl.databases.documents": "Record StopReason Task",
    "agentrl.databases.mongod": "find_mongod",
    "agentrl.failures": "InfrastructureFailure",
    "agentrl.launcher.run_tables": "open_run",
    "agentrl.rollout.agents": "register_agent",
    "agentrl.rollout.agents.limits": "LimitReached",
    "agentrl.rollout.agents.answers": "extract_answer",
    "agentrl.rollout.agents.mcp": "MCPSampler",
    "agentrl.rollout.scorers.mcp_factory": "MCPScorerFactory",
    "agentrl.rollout.agents.base": "AsyncSampler",
    "agentrl.rollout.scorers": "Score register_scorer",
    "agentrl.rollout.agents.single_turn": "SingleTurnSampler",
    "agentrl.training.losses": "BatchTotals LossInputs Scope TokenLoss "
    "depends_on sequence_mean sequence_sum token_ratio",
    "agentrl.training.step.objective": "Objective",
    "agentrl.training.supervised.script": "SupervisedRow train_supervised",
    "agentrl.training.step.statistics": "StepStatistics",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:  # with `__getattr__` a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name from its module at first use."""
        if name not in _HOME_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOME_OF[name]), name)
        globals()[name] = value  # later uses do not call `__getattr__`
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
