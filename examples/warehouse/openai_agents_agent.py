"""An agent in the OpenAI Agents SDK on the demo's warehouse. Not one line of it is about training.

    pip install openai-agents==0.24.0
    ./grpo_example.sh openai-agents --agent_name program \\
        --agent_entry examples/warehouse/openai_agents_agent.py:run
"""

from typing import Any

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from warehouse_client import Warehouse

MOST_TURNS = 6

set_tracing_disabled(True)


async def run(task: dict[str, Any], session: Any) -> str:
    """Answer the task's question."""
    warehouse = Warehouse(task["id"])

    @function_tool
    async def find(item: str) -> str:
        """The bin that holds an item."""
        return await warehouse.call("find", item=item)

    @function_tool
    async def stock(bin: str) -> str:
        """The number of parts in a bin."""
        return await warehouse.call("stock", bin=bin)

    @function_tool
    async def add(a: int, b: int) -> str:
        """a plus b."""
        return await warehouse.call("add", a=a, b=b)

    @function_tool
    async def sub(a: int, b: int) -> str:
        """a minus b."""
        return await warehouse.call("sub", a=a, b=b)

    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        model = OpenAIResponsesModel(session.model, client)
        agent = Agent(name="clerk", tools=[find, stock, add, sub], model=model)
        result = await Runner.run(agent, task["query"], max_turns=MOST_TURNS)
    return str(result.final_output)
