"""An attempt whose turns are requests to a session: what it comes to when the session is over."""

from agentrl.databases.documents import Record, StopReason
from agentrl.gateway.reported import REWARD
from agentrl.gateway.sessions import Session
from agentrl.rollout.agents.answers import extract_answer
from agentrl.rollout.agents.base import AsyncSampler


class SessionSampler(AsyncSampler):
    """The end and the score of an attempt by a program, wherever the program runs."""

    resumes = True

    def conclude(self, session: Session, said: str | None, error: Exception | None) -> Record:
        """The Record of a session that is over.

        `said`: what the program gave as its answer. `error`: what it ended with, which is raised
        unless a limit of the Record was its cause. Raises ValueError if it never asked the model.
        """
        if session.fault is not None:
            raise session.fault
        if session.limit is not None:  # whatever the code made of that
            self.record.stop_reason = session.limit
            return self.record
        if session.error is not None:
            raise RuntimeError(session.error)
        if error is not None:
            raise error
        last = session.last
        if last is None:
            raise ValueError("the program did not ask the model, so there is nothing to train")
        # The program decides whether a truncated turn is an answer.
        self.record.stop_reason = StopReason.MAX_NEW_TOKENS if last.cut_off else StopReason.ANSWERED
        answer = session.answer or said or last.content
        self.record.final_answer = extract_answer(answer, self.claim.task.answer_schema)
        return self.record

    async def evaluate_record(self, record: Record) -> Record | float:
        """The reward that the program reported, if it did, else the score of the task's scorer.

        If it reported rewards of agents only, it is their mean.
        """
        reward, of_agents = record.scores.get(REWARD), record.agent_rewards.values()
        if reward is None and of_agents:
            reward = sum(of_agents) / len(of_agents)
        if reward is None:
            return await super().evaluate_record(record)
        return record.model_copy(update={"score": reward})
