"""An agent in LangGraph on the demo's warehouse. Not one line of it is about training.

    pip install langgraph==1.2.24 langchain-openai==1.7.4
    ./grpo_example.sh langgraph --agent_name program \\
        --agent_entry examples/warehouse/langgraph_agent.py:run
"""

from typing import Any

from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from warehouse_client import Warehouse

MOST_STEPS = 12  # of the graph: two for each turn with tools


async def run(task: dict[str, Any], session: Any) -> str:
    """Answer the task's question."""
    warehouse = Warehouse(task["id"])

    async def find(item: str) -> str:
        """The bin that holds an item."""
        return await warehouse.call("find", item=item)

    async def stock(bin: str) -> str:
        """The number of parts in a bin."""
        return await warehouse.call("stock", bin=bin)

    async def add(a: int, b: int) -> str:
        """a plus b."""
        return await warehouse.call("add", a=a, b=b)

    async def sub(a: int, b: int) -> str:
        """a minus b."""
        return await warehouse.call("sub", a=a, b=b)

    tools = [
        StructuredTool.from_function(coroutine=tool, handle_tool_error=True)
        for tool in (find, stock, add, sub)
    ]
    model = ChatOpenAI(model=session.model, base_url=session.base_url, api_key=session.api_key)
    agent = create_react_agent(model, tools)
    question = {"messages": [("user", task["query"])]}
    state = await agent.ainvoke(question, {"recursion_limit": MOST_STEPS})
    return str(state["messages"][-1].content)
