"""Tools as a record uses them, in one line of a test."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from agentrl.configs import AgentConfig
from agentrl.databases.documents import Split, Task
from agentrl.databases.records import RecordLedger
from agentrl.rollout.tools.toolbox import ToolBox, ToolSession, open_tools


def a_task(task_id: str = "task", **fields: Any) -> Task:
    """A task whose line held these further fields."""
    return Task(
        _id=f"train-0-{task_id}", split=Split.TRAIN, epoch=0, seq=0, group_order=0, task_id=task_id,
        query="How many?", pending=0, slots=[], fields=fields,
    )  # fmt: skip


@asynccontextmanager
async def tools_of(
    servers: str | Path,
    *,
    startup_timeout_s: float = 30.0,
    records: RecordLedger | None = None,
    **flags: Any,
) -> AsyncIterator[ToolBox]:
    """The tools that `--mcp_manager_url servers` and these flags give."""
    agent = AgentConfig(mcp_manager_url=str(servers), **flags)
    async with open_tools(agent, startup_timeout_s, records) as box:
        yield box


@asynccontextmanager
async def session_with(
    servers: str | Path, task: Task | None = None, record: str = "record", **settings: Any
) -> AsyncIterator[ToolSession]:
    """The session of one record with them."""
    async with tools_of(servers, **settings) as box, box.session(task or a_task(), record) as tools:
        yield tools


def config_file(folder: Path, servers: Mapping[str, Any]) -> Path:
    """A config file in the `mcpServers` form."""
    path = folder / "tools.json"
    path.write_text(json.dumps({"mcpServers": servers}))
    return path


def names_of(box: ToolBox) -> list[str]:
    """The names of the tools as the chat template gets them."""
    return [schema["function"]["name"] for schema in box.schemas]
