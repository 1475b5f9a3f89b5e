"""The limits of a record: its turns, and the tokens of each context; why it ends at one.

    --max_turns           turns of the record
    --max_tokens          tokens of a context: a prompt and its answer. It is the longest sequence
                          that is trained
    --max_prompt_tokens   tokens of a prompt; left out, as many as --max_tokens
    --max_new_tokens      tokens of one turn

A record may have any number of contexts: each time that its conversation is rewritten, another one
begins. With a larger `--max_prompt_tokens` than `--max_tokens`, contexts are longer than what is
trained of them (`groups/row_building.py`).

`Limits` decides for every kind of agent; what is counted comes from outside. A service's context
may end a record earlier, as `--max_prompt_tokens` does: what it leaves is the client's business
(`inference/context.py`), and `check_context` says so before a run.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from agentrl.configs import ConfigError, SamplingConfig
from agentrl.databases.documents import StopReason
from agentrl.inference.context import longest_prompt, read_model_limits


class LimitReached(Exception):
    """A limit of the record is reached: the model cannot be called again.

    An agent need not catch it; the record then ends with its turns so far.
    """

    def __init__(self, stop_reason: StopReason) -> None:
        super().__init__(f"the record has reached its limit: {stop_reason.value}")
        self.stop_reason = stop_reason


@dataclass(frozen=True, slots=True)
class TurnLimit:
    """The maximum number of tokens of one turn, and the limit that sets it."""

    max_new_tokens: int
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of each record of a run, in turns and tokens.

    `max_tokens`: of a context, its prompt and the answer.
    """

    max_turns: int
    max_tokens: int
    max_prompt_tokens: int
    max_new_tokens: int

    @classmethod
    def of(cls, sampling: SamplingConfig) -> Self:
        """The limits that a run's flags set."""
        longest, prompt = sampling.max_tokens, sampling.max_prompt_tokens or sampling.max_tokens
        if prompt > longest:
            longest = prompt + sampling.max_new_tokens
        return cls(sampling.max_turns, longest, prompt, sampling.max_new_tokens)

    def reached(self, n_turns: int, prompt_len: int) -> StopReason | None:
        """Why no further turn may be generated; None if one may.

        `n_turns`: turns so far. `prompt_len`: tokens of the next prompt.
        """
        if n_turns >= self.max_turns:
            return StopReason.MAX_TURNS
        if prompt_len >= self.max_tokens:
            return StopReason.MAX_TOKENS
        if prompt_len > self.max_prompt_tokens:
            return StopReason.MAX_PROMPT_TOKENS
        return None

    def tokens_left(self, prompt_len: int) -> int:
        """The number of tokens that the answer to a prompt of `prompt_len` may have."""
        return self.max_tokens - prompt_len

    def room(self, n_turns: int, prompt_len: int) -> int:
        """The tokens left for an answer. Raises `LimitReached` if a limit is reached.

        For agents that choose their prompts themselves; the arguments are those of `reached`.
        """
        reason = self.reached(n_turns, prompt_len)
        if reason is not None:
            raise LimitReached(reason)
        return self.tokens_left(prompt_len)

    def of_turn(self, left: int, max_new_tokens: int | None = None) -> TurnLimit:
        """The limit of a turn in a context that has room for `left` tokens.

        `max_new_tokens`: a further limit of the agent, besides `--max_new_tokens`.
        """
        longest = self.max_new_tokens
        if max_new_tokens is not None:
            longest = min(longest, max_new_tokens)
        if longest <= left:
            return TurnLimit(longest, StopReason.MAX_NEW_TOKENS)
        return TurnLimit(left, StopReason.MAX_TOKENS)


def check_context(sampling: SamplingConfig, context_length: int, whose: str) -> str | None:
    """Check the flags against a context of `context_length` tokens; `whose`: its model or service.

    Returns a sentence if the context can end records before `--max_tokens` does. Raises
    `ConfigError` if `--max_prompt_tokens` leaves no room for an answer.
    """
    longest = longest_prompt(context_length)
    asked = sampling.max_prompt_tokens
    if asked is not None and asked > longest:
        raise ConfigError(
            f"--max_prompt_tokens {asked}: {whose} has a context of {context_length} tokens, in "
            f"which a prompt may have {longest} at the most; give so many or fewer, or a longer "
            "context"
        )
    if asked is None and sampling.max_tokens > context_length:
        return (
            f"records end at the context of {whose}, {context_length} tokens, before --max_tokens "
            f"{sampling.max_tokens}"
        )
    return None


def check_model_context(sampling: SamplingConfig, model: str | Path) -> str | None:
    """`check_context` with the context length in a model folder's config.json, if it has one."""
    length = read_model_limits(model).context_length
    return None if length is None else check_context(sampling, length, f"model {model}")
