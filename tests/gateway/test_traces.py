"""A program behind the gateway is traced like any other agent, its own tools too."""

import json
import sys
from pathlib import Path

from sampler_at_work import ECHO, add, at_work
from scripted_run import completed, until
from stage import END, Stage
from trace_receiver import attributes, receiving

PROGRAM = """
import json, os, time, urllib.request

def ask(messages):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    schema = {"name": "echo", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}
    told = {"model": "any", "messages": messages, "tools": [{"type": "function", "function": schema}]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(told).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": "Where?"}]
reply = ask(messages)
[call] = reply["tool_calls"]
time.sleep(0.2)
result = {"role": "tool", "tool_call_id": call["id"], "content": "in B7"}
print(ask([*messages, reply, result])["content"])
"""  # noqa: E501


async def test_a_programs_turns_and_its_own_tools_are_a_trace(stage: Stage, tmp_path: Path) -> None:
    async def answer(prompt: str) -> str:
        return (f"<answer>42</answer>{END}") if "in B7" in prompt else ECHO + END

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    stage.service.answer = answer
    await add(stage.database, 1)
    command = ("--agent_name", "program", "--agent_command", f"{sys.executable} {program}")
    with receiving() as receiver:
        flags = (*command, "--otlp_endpoint", receiver.url)
        async with at_work(stage, "program", *flags):
            await until(completed(stage.database, 1))
        traces = receiver.traces()
    assert len(traces) == 2
    for spans in traces.values():
        root, first, call, last, scoring = spans
        assert [span.name for span in (root, call, scoring)] == [
            "invoke_agent program", "execute_tool echo", "score",
        ]  # fmt: skip
        told = attributes(call)
        assert json.loads(told["gen_ai.tool.call.arguments"]) == {"text": "B7"}
        assert told["gen_ai.tool.call.result"] == "in B7"
        assert call.start_time_unix_nano == first.end_time_unix_nano
        assert call.end_time_unix_nano == last.start_time_unix_nano
        assert call.end_time_unix_nano - call.start_time_unix_nano > 0.2e9
        assert attributes(root)["agentrl.score"] == 1.0
