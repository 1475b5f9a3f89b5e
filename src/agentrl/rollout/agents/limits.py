"""A record's limits and tokens, for agents that decide themselves what the model is asked next."""

from collections.abc import Sequence

from agentrl.configs import SamplingConfig
from agentrl.databases.documents import StopReason
from agentrl.rollout.context import TokenContext


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


def follow(context: TokenContext, prompt_ids: Sequence[int]) -> None:
    """Make `prompt_ids` the tokens that the next turn continues.

    They extend the current segment if they begin with its tokens, and else begin a new one.
    """
    if not context.segments:
        context.begin_segment(prompt_ids)
        return
    held = len(context.ids)
    if list(prompt_ids[:held]) != context.ids:
        context.begin_segment(prompt_ids)
    elif len(prompt_ids) > held:
        context.observe(list(prompt_ids[held:]))
