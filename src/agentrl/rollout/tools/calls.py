"""What a call to a server is, and how calls, sessions and servers fail.

CallFailed               the call's own failure: a text for the model
ToolSessionFailed        the server refuses a record its session: that attempt fails
ToolBlocks               the call blocks its server, which is in our process: that attempt fails
ToolServerUnreachable    nobody's: the server is out of reach, or died under the call
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mcp_types import CallToolResult

from agentrl.failures import InfrastructureFailure, Need, Probe

TASK_ID_KEY = "agentrl/task_id"
RECORD_ID_KEY = "agentrl/record_id"
CREATE_KWARGS_KEY = "agentrl/create_kwargs"


class ToolServerUnreachable(InfrastructureFailure):
    """A tool server does not answer, or refuses us. The message is one sentence for the user.

    `label`: the server's name in messages. `text`: the text for the model
    (`--on_tool_outage text`).
    """

    need = Need.TOOLS

    def __init__(
        self, message: str, label: str, *, text: str | None = None, probe: Probe | None = None
    ) -> None:
        super().__init__(message, dependency=f"the tool server {label}", probe=probe)
        self.text = text or message


class ToolSessionFailed(RuntimeError):
    """A server refused to open a record's session, which the record requires."""


class ToolBlocks(Exception):
    """A call blocked the event loop of its server, and with it all other calls, beyond its time."""


class CallFailed(Exception):
    """A call gave no result. The message is for the model."""


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call to a server. `meta`: metadata that is sent with the arguments."""

    tool: str
    arguments: dict[str, Any]
    meta: Mapping[str, Any]


def why_unsendable(arguments: Mapping[str, Any]) -> str | None:
    """Why these arguments cannot be sent; None if they can.

    Checked before a call: a message that fails while it is sent ends the shared connection.
    """
    try:
        json.dumps(arguments, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return "they hold half of a surrogate pair, which is no character"
    except RecursionError:
        return "they are nested too deeply"
    except (TypeError, ValueError) as error:
        return str(error)
    return None


class Callee(Protocol):
    """The target of calls: a server, or a record's session with it."""

    async def call(self, call: ToolRequest) -> CallToolResult:
        """The tool's result, which may be an error.

        Raises `CallFailed`, and `ToolServerUnreachable` if the tool was not reached or its answer
        was lost.
        """
