"""Answers of the form {"status": ..., "content": ...}, which aggregators and handlers give."""

from typing import Any

from mcp_types import CallToolResult, TextContent
from pydantic import ValidationError

from agentrl.rollout.tools.results import json_text


def read_answer(body: Any, failed: bool = False) -> CallToolResult:
    """The answer as an MCP result. `failed`: whether its HTTP status is an error.

    Errors come as `status: error`, as an HTTP-like `status_code`, or as an `error` in the content.
    """
    content = body.get("content", body) if isinstance(body, dict) else body
    if isinstance(body, dict):
        status = body.get("status_code")
        failed = (
            failed
            or body.get("status") == "error"
            or bool(body.get("isError"))
            or (isinstance(status, int) and status >= 400)
        )
    if isinstance(content, dict) and content.get("error"):
        failed = True
        told = [str(content[key]) for key in ("error", "detail") if content.get(key)]
        content = ": ".join(dict.fromkeys(told))
    elif failed and isinstance(content, dict) and content.get("detail"):
        content = content["detail"]
    if isinstance(content, list):
        try:
            return CallToolResult.model_validate({"content": content, "isError": failed})
        except ValidationError:
            pass  # another list than MCP's content
    elif isinstance(content, dict) and set(content) == {"result"}:
        content = content["result"]
    text = content if isinstance(content, str) else json_text(content)
    return CallToolResult(content=[TextContent(text=text)], is_error=failed)
