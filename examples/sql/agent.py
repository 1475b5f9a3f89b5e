"""A text-to-SQL agent in LangGraph: question, write, execute, check, rewrite.

                      ┌──────────────── rewrite ◄──────┐
                      ▼                                │ wrong
    write ──────► execute ──► check, by the model ─────┤
                                                       │ right
                                                      end

It reports its own reward: whether the last query gives what the reference gives.
"""

import asyncio
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from execution import QueryError, judge, open_for_reading, run_query, shown
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from schemas import SCHEMA_OF, other

RIGHT = "right"  # what the model says of a query that it keeps
CHECK, REWRITE = "is it right?", "write it again."
MOST_REWRITES = 2


class State(MessagesState):
    """The conversation, the latest query, and how many were written."""

    sql: str
    written: int


@dataclass(frozen=True)
class Context:
    """What one question's conversation goes through: the model, and the database."""

    model: ChatOpenAI
    database: Path


async def write(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
    """Ask the model for a query."""
    said = await runtime.context.model.ainvoke(state["messages"])
    return {"messages": [said], "sql": said.text, "written": state["written"] + 1}


def execute(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
    """Run the query, and tell the model what came of it."""
    try:
        with closing(open_for_reading(runtime.context.database)) as connection:
            came = shown(run_query(connection, state["sql"]))
    except QueryError as error:
        came = f"error: {error}"
    return {"messages": [("user", f"{came}\n{CHECK}")]}


async def check(state: State, runtime: Runtime[Context]) -> dict[str, Any]:
    """Ask the model whether the query is right."""
    return {"messages": [await runtime.context.model.ainvoke(state["messages"])]}


def rewrite(state: State) -> dict[str, Any]:
    """Ask for another query."""
    return {"messages": [("user", REWRITE)]}


def after_check(state: State) -> str:
    """Whether another query is wanted, and is still allowed."""
    right = state["messages"][-1].text.strip() == RIGHT
    return END if right or state["written"] > MOST_REWRITES else "rewrite"


@cache
def agent() -> Any:
    """The graph, compiled once."""
    graph = StateGraph(State, context_schema=Context)
    for node in (write, execute, check, rewrite):
        graph.add_node(node)
    graph.add_edge(START, "write")
    graph.add_edge("write", "execute")
    graph.add_edge("execute", "check")
    graph.add_conditional_edges("check", after_check, ["rewrite", END])
    graph.add_edge("rewrite", "write")
    return graph.compile()


@cache
def http_clients() -> dict[str, Any]:
    """Of all conversations: loading certificates takes longer than one of them."""
    return {"http_client": httpx2.Client(), "http_async_client": httpx2.AsyncClient(timeout=None)}


async def run(task: dict[str, Any], session: Any) -> str:
    """Answer a question of the task file, and report the reward."""
    model = ChatOpenAI(
        model=session.model, base_url=session.base_url, api_key=session.api_key, **http_clients()
    )
    file = Path(task["database"])
    question = [("system", SCHEMA_OF[task["schema"]].text), ("user", task["query"])]
    state = await agent().ainvoke(
        {"messages": question, "sql": "", "written": 0}, context=Context(model, file)
    )
    sql: str = state["sql"]
    session.reward(*await asyncio.to_thread(judge, sql, task["answer"], [file, other(file)]))
    return sql
