"""The agent without tools: one question, one turn, which is the answer."""

from agentrl.databases.documents import Record, StopReason
from agentrl.rollout.agents.answers import extract_answer
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.chat import Message


class SingleTurnSampler(AsyncSampler):
    """One turn of the model on the task's messages or query."""

    async def run(self) -> Record:
        """Generate one turn. A truncated turn is no answer."""
        messages = self.messages()
        await self.begin_conversation(messages, None)
        reason = self.limit_reached()
        if reason is None:
            turn = await self.generate()
            reason = turn.stop_reason or StopReason.ANSWERED
            if reason is StopReason.ANSWERED:
                answer = self.resources.renderer.said(turn.text)
                self.record.final_answer = extract_answer(answer, self.answer_schema)
            await self.write_turn(turn, messages)
        self.record.stop_reason = reason
        return self.record

    def messages(self) -> list[Message]:
        """The messages of the prompt."""
        return self.opening_messages()
