"""A program in a framework of agents, with two tools: `python program.py FRAMEWORK`.

It knows nothing of training: where the model is says the environment that the frameworks read.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterable
from pathlib import Path

TASK = json.loads(Path(os.environ["AGENTRL_TASK_FILE"]).read_text())
MODEL = os.environ["AGENTRL_MODEL"]


def find(item: str) -> str:
    """Finds the bin of an item.

    Args:
        item: name of the item
    """
    return f"{item} is in B7"


def stock(bin: str, unit: str = "parts") -> str:
    """Counts what is in a bin.

    Args:
        bin: name of the bin
        unit: what is counted
    """
    return f"42 {unit} in {bin}"


def with_langgraph() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model=MODEL), [find, stock], prompt="Be brief.")
    messages = agent.invoke({"messages": [("user", TASK["query"])]})["messages"]
    return messages[-1].content


def with_langgraph_streaming() -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent = create_react_agent(ChatOpenAI(model=MODEL, streaming=True), [find, stock])
    *_, last = agent.stream({"messages": [("user", TASK["query"])]}, stream_mode="values")
    return last["messages"][-1].content


def with_openai_agents() -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    tools = [function_tool(find), function_tool(stock)]
    agent = Agent(name="clerk", instructions="Be brief.", tools=tools, model=MODEL)
    return Runner.run_sync(agent, TASK["query"]).final_output


def with_openai_agents_streaming() -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    tools = [function_tool(find), function_tool(stock)]
    agent = Agent(name="clerk", instructions="Be brief.", tools=tools, model=MODEL)

    async def run() -> str:
        result = Runner.run_streamed(agent, TASK["query"])
        async for _ in result.stream_events():
            pass
        return result.final_output

    return asyncio.run(run())


def with_pydantic_ai() -> str:
    from pydantic_ai import Agent

    agent = Agent(f"openai-chat:{MODEL}", tools=[find, stock], instructions="Be brief.")
    return agent.run_sync(TASK["query"]).output


def with_pydantic_ai_anthropic() -> str:
    from pydantic_ai import Agent

    agent = Agent(f"anthropic:{MODEL}", tools=[find, stock], instructions="Be brief.")
    return agent.run_sync(TASK["query"]).output


def with_pydantic_ai_streaming() -> str:
    from pydantic_ai import Agent

    agent = Agent(f"openai-chat:{MODEL}", tools=[find, stock], instructions="Be brief.")

    async def read(context: object, events: AsyncIterable[object]) -> None:
        async for _ in events:
            pass

    async def run() -> str:
        return (await agent.run(TASK["query"], event_stream_handler=read)).output

    return asyncio.run(run())


def with_smolagents() -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel(
        model_id=MODEL, api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )  # fmt: skip
    agent = ToolCallingAgent(tools=[tool(find), tool(stock)], model=model, verbosity_level=0)
    return str(agent.run(TASK["query"]))


def with_smolagents_code() -> str:
    from smolagents import CodeAgent, OpenAIServerModel, tool

    model = OpenAIServerModel(
        model_id=MODEL, api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
    )  # fmt: skip
    agent = CodeAgent(tools=[tool(find), tool(stock)], model=model, verbosity_level=0)
    return str(agent.run(TASK["query"]))


def with_litellm(provider: str = "openai") -> str:
    import litellm

    base = os.environ["OPENAI_BASE_URL" if provider == "openai" else "ANTHROPIC_BASE_URL"]
    text = {"type": "string"}
    tools = [
        {"type": "function", "function": {
            "name": name, "description": name,
            "parameters": {"type": "object", "properties": {"item": text, "bin": text}}}}
        for name in ("find", "stock")
    ]  # fmt: skip
    messages = [{"role": "user", "content": TASK["query"]}]
    while True:
        answer = litellm.completion(
            f"{provider}/{MODEL}", messages=messages, tools=tools, api_base=base, max_tokens=256,
            api_key=os.environ["OPENAI_API_KEY"],
        )  # fmt: skip
        message = answer.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            tool = {"find": find, "stock": stock}[call.function.name]
            result = tool(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def with_litellm_anthropic() -> str:
    return with_litellm("anthropic")


if __name__ == "__main__":
    print(globals()[f"with_{sys.argv[1]}"]())
