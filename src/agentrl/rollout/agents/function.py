"""Agents that are a function: `async def agent(task, llm, tools) -> answer`.

    async def agent(task, llm, tools):
        messages = llm.task_messages()
        while True:
            reply = await llm.chat(messages, tools.schemas)
            if not reply.tool_calls:
                return reply.content
            messages += [reply.message, *await tools.answer(reply)]

`task` is the Task, `llm` a `ChatModel` (`llm.py`), `tools` the run's MCP tools (`tools.py`). The
answer is a text, from which the task's `answer_schema` takes the part to be scored, or None.
"""

from collections.abc import Awaitable, Callable
from typing import ClassVar, Self

from agentrl.databases.documents import Record, StopReason, Task
from agentrl.rollout.agents.answers import extract_answer
from agentrl.rollout.agents.limits import LimitReached
from agentrl.rollout.agents.llm import ChatModel
from agentrl.rollout.agents.tool_sampler import ToolSampler
from agentrl.rollout.agents.tools import AgentTools
from agentrl.rollout.contained import sole_cause

AgentFunction = Callable[[Task, ChatModel, AgentTools], Awaitable[str | None]]


class FunctionSampler(ToolSampler):
    """An attempt by an agent function."""

    function: ClassVar[AgentFunction]

    @classmethod
    def of(cls, function: AgentFunction) -> type[Self]:
        """A sampler class that runs `function`."""
        return type(
            getattr(function, "__name__", "agent"),
            (cls,),
            {"function": staticmethod(function), "__doc__": function.__doc__},
        )

    async def converse(self) -> Record:
        """Run the function until it answers or reaches a limit.

        Raises ValueError if it returns no text, or never calls the model.
        """
        llm = ChatModel(self)
        try:
            # A copy: other rollouts have the same Task, and scorers read its answer.
            task = self.claim.task.model_copy(deep=True)
            answer = await type(self).function(task, llm, AgentTools(self, llm))
        except LimitReached as limit:
            self.record.stop_reason = limit.stop_reason
            return self.record
        except ExceptionGroup as group:
            reached = sole_cause(group, LimitReached)
            if reached is None:
                raise
            self.record.stop_reason = reached.stop_reason
            return self.record
        finally:
            await llm.finish()
        if answer is not None and not isinstance(answer, str):
            raise ValueError(f"the agent returned {answer!r:.200}, not a text or None")
        if llm.last is None:
            raise ValueError("the agent did not ask the model, so there is nothing to train")
        # The agent decides whether a truncated turn is an answer.
        self.record.stop_reason = llm.last.generated.stop_reason or StopReason.ANSWERED
        if answer is not None:
            self.record.final_answer = extract_answer(answer, self.answer_schema)
        return self.record
