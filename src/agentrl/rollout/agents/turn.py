"""A turn as it was generated."""

from dataclasses import dataclass

from agentrl.databases.documents import StopReason
from agentrl.inference.protocol import Generation
from agentrl.rollout.chat.tokens import TurnTokens


@dataclass(frozen=True, slots=True)
class Turn:
    """A generated turn, before its calls are parsed.

    `text`: without the stop token. `stop_reason`: the limit that truncated the turn and ends the
    record; None if the model ended the turn. `tokens`: the turn's tokens and place in the record.
    """

    generation: Generation
    text: str
    stop_reason: StopReason | None
    tokens: TurnTokens
