"""An agent in LangGraph on the demo's warehouse. Not one line of it is about training.

README.md beside it has the commands. The graph is compiled once, and so is the HTTP client made:
loading certificates takes longer than a conversation. What differs between conversations is
handed to the graph as its context.
"""

import asyncio
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, ToolCall, ToolMessage
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from mcp import Client

sys.path.append(str(Path(__file__).parents[2] / "assets" / "demo"))

from warehouse_tools import TASK_ID_KEY, server

MOST_STEPS = 12  # of the graph: two for each turn with tools


@dataclass(frozen=True)
class Conversation:
    """The model, which knows the tools; the tools; and the task whose warehouse they show."""

    model: Any
    tools: Client
    task_id: str


async def think(state: MessagesState, runtime: Runtime[Conversation]) -> dict[str, Any]:
    """Ask the model."""
    return {"messages": [await runtime.context.model.ainvoke(state["messages"])]}


async def act(state: MessagesState, runtime: Runtime[Conversation]) -> dict[str, Any]:
    """Make the calls of the model's last turn, all at once."""
    said = state["messages"][-1]
    assert isinstance(said, AIMessage)
    return {"messages": await asyncio.gather(*(call(one, runtime) for one in said.tool_calls))}


async def call(one: ToolCall, runtime: Runtime[Conversation]) -> ToolMessage:
    """The answer of a tool; an error's text too, for the model to read."""
    meta: Any = {TASK_ID_KEY: runtime.context.task_id}
    result = await runtime.context.tools.call_tool(one["name"], one["args"], meta=meta)
    text = "".join(part.text for part in result.content if part.type == "text")
    return ToolMessage(text, tool_call_id=one["id"], name=one["name"])


def wants_tools(state: MessagesState) -> str:
    """Where the graph goes after the model's turn."""
    said = state["messages"][-1]
    return "act" if isinstance(said, AIMessage) and said.tool_calls else END


@cache
def agent() -> Any:
    """Thinks and acts in turns, until it calls no tool."""
    graph = StateGraph(MessagesState, context_schema=Conversation)
    graph.add_node("think", think)
    graph.add_node("act", act)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", wants_tools, ["act", END])
    graph.add_edge("act", "think")
    return graph.compile()


@cache
def http_clients() -> dict[str, Any]:
    """For all conversations of the process."""
    return {"http_client": httpx2.Client(), "http_async_client": httpx2.AsyncClient(timeout=None)}


async def run(task: dict[str, Any], session: Any) -> str:
    """Answer the task's question."""
    model: BaseChatModel = ChatOpenAI(
        model=session.model, base_url=session.base_url, api_key=session.api_key, **http_clients()
    )
    async with Client(server) as tools:
        listed = (await tools.list_tools()).tools
        schemas = [
            {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
            for tool in listed
        ]
        conversation = Conversation(model.bind_tools(schemas), tools, task["id"])
        question = {"messages": [("user", task["query"])]}
        limit = {"recursion_limit": MOST_STEPS}
        try:
            state = await agent().ainvoke(question, limit, context=conversation)
        except GraphRecursionError:
            return "no answer"
    return str(state["messages"][-1].content)
