r"""The mathematics agent: one turn that reasons and puts the answer in a box.

The task's scorer compares the answers; `math` does it by value. A task that is given as messages
is asked in its own words, and one with an `answer_schema` answers in its own form.
"""

from agentrl.rollout.agents.single_turn import SingleTurnSampler
from agentrl.rollout.chat import Message

INSTRUCTION = r"Reason step by step, and put your final answer in \boxed{}."


class MathSampler(SingleTurnSampler):
    r"""A single turn with its answer in `\boxed{}`."""

    def messages(self) -> list[Message]:
        """The task's messages, or its query with `INSTRUCTION`."""
        messages = self.opening_messages()
        if self.claim.task.messages is None and self.answer_schema == "boxed":
            messages[-1] = {"role": "user", "content": f"{self.record.query}\n\n{INSTRUCTION}"}
        return messages

    @property
    def answer_schema(self) -> str | None:
        """The task's schema, else `boxed`; None if the task is given as messages without one."""
        task = self.claim.task
        return task.answer_schema or ("boxed" if task.messages is None else None)
