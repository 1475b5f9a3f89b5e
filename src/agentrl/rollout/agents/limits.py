"""A record's limits, for agents that decide themselves what the model is asked next."""

from agentrl.configs import SamplingConfig
from agentrl.databases.documents import StopReason


class LimitReached(Exception):
    """The model may not be asked again for this record.

    An agent need not catch it: the record ends with the turns that it has.
    """

    def __init__(self, stop_reason: StopReason) -> None:
        super().__init__(f"the record has reached its limit: {stop_reason.value}")
        self.stop_reason = stop_reason


def room_left(limits: SamplingConfig, n_turns: int, n_tokens: int, prompt_len: int) -> int:
    """How many tokens may be generated from a prompt, the limit of a turn aside.

    `n_turns`: turns of the record so far. `n_tokens`: its tokens with this prompt's. Raises
    `LimitReached` if there is no room for a turn.
    """
    if n_turns >= limits.max_turns:
        raise LimitReached(StopReason.MAX_TURNS)
    if n_tokens >= limits.max_tokens:
        raise LimitReached(StopReason.MAX_TOKENS)
    if prompt_len > (limits.max_prompt_tokens or limits.max_tokens):
        raise LimitReached(StopReason.MAX_PROMPT_TOKENS)
    return limits.max_tokens - n_tokens
