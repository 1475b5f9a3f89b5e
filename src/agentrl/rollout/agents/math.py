r"""The mathematics agent: one turn that reasons and puts the answer in a box.

The task's scorer compares the answers; `math` does it by value. A task that is given as messages
is asked in its own words, and one with an `answer_schema` answers in its own form.
"""

from collections.abc import Sequence

from agentrl.databases.documents import Task
from agentrl.rollout.agents.single_turn import SingleTurnSampler
from agentrl.rollout.chat import Message

INSTRUCTION = r"Reason step by step, and put your final answer in \boxed{}."


def math_question(task: Task, opening: Sequence[Message]) -> list[Message]:
    """The task's messages, or its query with `INSTRUCTION`. `opening`: without it."""
    messages = list(opening)
    if task.messages is None and math_schema(task) == "boxed":
        messages[-1] = {"role": "user", "content": f"{task.query}\n\n{INSTRUCTION}"}
    return messages


def math_schema(task: Task) -> str | None:
    """The task's schema, else `boxed`; None if the task is given as messages without one."""
    return task.answer_schema or ("boxed" if task.messages is None else None)


class MathSampler(SingleTurnSampler):
    r"""A single turn with its answer in `\boxed{}`."""

    def messages(self) -> list[Message]:
        """See `math_question`."""
        return math_question(self.claim.task, self.opening_messages())

    @property
    def answer_schema(self) -> str | None:
        """See `math_schema`."""
        return math_schema(self.claim.task)
