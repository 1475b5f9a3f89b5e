"""Functions for `--agent_of_turn`."""

from typing import Any


def by_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | None:
    return "worker" if tools else None


def raises(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    return messages[7]["content"]
