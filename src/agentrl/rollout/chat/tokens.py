"""The turns of a record as tokens: what was asked and what was generated, in their order.

    TokenContext   initial prompt, generated ids verbatim, deltas, in segments; its tokens are a
                   token tree that grows, one branch for each segment
    PromptChange   what changed between a generated turn and the next prompt

A record is made of segments. A segment begins with a rendered prompt and grows by appending only:
the ids that the model generated, verbatim, then the ids that the chat template adds for tool
results and the next header. Where appending does not hold, the conversation is rendered anew and a
new segment begins; it may share a prefix with one before it. Nothing is ever tokenised in here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agentrl.databases.documents import TokenCounts, VersionRange
from agentrl.databases.growing_tree import GrowingTree, Ids
from agentrl.databases.token_tree import TokenTree, common_prefix
from agentrl.policy_version import VersionSpan, show_spans, spans_cover


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a segment branches off from an earlier one.

    It shares the first `shared_len` tokens of turn `turn` (prompt and output) of segment `segment`.
    They are part of the new segment's prompt, so no token is generated in two segments.
    """

    segment: int
    turn: int
    shared_len: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive turns that extend each other; `TokenContext.line` has the tokens."""

    branch: Branch | None
    prompt_len: int  # tokens of its first prompt
    turn_ends: list[tuple[int, int]] = field(default_factory=list)  # (turn, tokens up to its end)


@dataclass(frozen=True, slots=True)
class PromptChange:
    """The change of tokens between generated turn `turn` and the next prompt.

    The next prompt is the first `kept` tokens of the turn's segment, then `appended` others. The
    segment's other tokens, `dropped` of them, are not in it.

    n_separator: how many of the appended ids the chat template adds to close the turn
    extends: whether the next prompt is in the same segment; `dropped` is then 0
    drift: why the chat template does not extend the sampled tokens; None if it does, or if the
        conversation was rewritten on purpose
    restyled: the template would write the turn in other characters; the sampled ones are kept
    n_rewritten: generated turns whose sampled ids are not in the new prompt
    """

    turn: int
    kept: int
    dropped: int
    appended: int
    n_separator: int
    extends: bool
    drift: str | None = None
    restyled: bool = False
    n_rewritten: int = 0


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """The new ids of a turn's prompt, and the place of the turn in the record.

    prompt_delta: the prompt's ids [n] after the segment's previous turn; in the segment's first
        turn, after the tokens that its branch shares
    """

    turn: int
    segment: int
    branch: Branch | None  # the segment's, in its first turn
    prompt_change: PromptChange | None  # between the last turn and this one
    prompt_delta: NDArray[np.int32]
    prompt_len: int


class TokenContext:
    """The tokens of one record, segment by segment.

    Order of calls: `begin_segment`, `add_turn`, then repeatedly `observe` or `begin_segment`, and
    `add_turn`.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.n_turns = 0
        self.n_generated = 0
        self.n_continuations = 0
        self.n_drifts = 0
        self.versions: VersionRange | None = None  # oldest and newest of the generated tokens
        self._tokens = GrowingTree()  # a branch for each segment
        self._delta: NDArray[np.int32] | None = None  # prompt ids that no turn has followed yet
        self._pending: PromptChange | None = None  # the change that `_delta` belongs to

    @property
    def ids(self) -> NDArray[np.int32]:
        """The current segment's tokens: the prompt of the next turn."""
        return self._tokens.ids(-1)

    @property
    def prompt_len(self) -> int:
        """Number of tokens in the next turn's prompt."""
        return self._tokens.length(-1)

    @property
    def n_tokens(self) -> int:
        """Number of tokens in all segments; a shared prefix counts once."""
        return len(self._tokens)

    @property
    def counts(self) -> TokenCounts:
        """Tokens by origin: the first prompt, generated, and all others (observed)."""
        if not self.segments:
            return TokenCounts()
        prompt = self.segments[0].prompt_len
        observed = self.n_tokens - prompt - self.n_generated
        return TokenCounts(prompt=prompt, generated=self.n_generated, observed=observed)

    def tree(self) -> TokenTree:
        """The token tree of all segments so far."""
        return self._tokens.tree()

    def line(self, segment: int) -> TokenTree:
        """The tokens of a segment, shared ones included, as a tree of one node."""
        return self._tokens.line(segment)

    def begin_segment(
        self, prompt_ids: Ids, drift: str | None = None, n_rewritten: int = 0
    ) -> PromptChange | None:
        """Begin a segment with a whole prompt [n].

        `drift`, `n_rewritten`: see `PromptChange`. Returns the change since the last turn; None
        before the first turn. Raises ValueError for an empty prompt.
        """
        if not len(prompt_ids):
            raise ValueError("a segment cannot begin with an empty prompt")
        prompt_change = None
        self._withdraw_delta()
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        if self.segments:
            last = self._tokens.ids(-1)
            kept = common_prefix(last, prompt)
            prompt_change = PromptChange(
                turn=self._last_turn,
                kept=kept,
                dropped=len(last) - kept,
                appended=len(prompt) - kept,
                n_separator=0,
                extends=False,
                drift=drift,
                n_rewritten=n_rewritten,
            )
            self.n_continuations += 1
            self.n_drifts += drift is not None
        self._pending = prompt_change
        branch = self._find_branch(prompt)
        self._begin(branch, prompt[branch.shared_len if branch else 0 :])
        return prompt_change

    def begin_branch(self, turn: int | None, shared_len: int, delta_ids: Ids) -> None:
        """Begin a segment at a known branch, as stored in `TurnTokens`.

        turn, shared_len: of the branch; None and 0 if there is none. delta_ids: the prompt's ids
        after the shared tokens. Raises ValueError if the turn has no token `shared_len - 1`.
        """
        self._withdraw_delta()
        self.n_continuations += bool(self.segments)
        delta = np.asarray(delta_ids, dtype=np.int32)
        if turn is None and not shared_len:
            self._begin(None, delta)
            return
        for index, segment in enumerate(self.segments):
            before = segment.branch.shared_len if segment.branch else 0
            for number, end in segment.turn_ends:
                if number == turn and before < shared_len <= end:
                    self._begin(Branch(index, number, shared_len), delta)
                    return
                before = end
        raise ValueError(f"turn {turn} has no token {shared_len - 1} of its own to branch off from")

    def _begin(self, branch: Branch | None, delta: NDArray[np.int32]) -> None:
        if branch is None:
            self._tokens.begin()
        else:
            self._tokens.begin(branch.segment, branch.shared_len)
        self._tokens.append(delta)
        self.segments.append(Segment(branch, self.prompt_len))
        self._delta = delta

    def observe(self, delta_ids: Ids, n_separator: int = 0, restyled: bool = False) -> PromptChange:
        """Append the ids [n] that follow a turn: tool results and the next header.

        The first `n_separator` ids close the turn. `restyled`: see `PromptChange`. Raises
        ValueError if no generated turn precedes.
        """
        if not self.segments[-1].turn_ends or self._delta is not None:
            raise ValueError("a delta follows a generated turn")
        delta = np.asarray(delta_ids, dtype=np.int32)
        prompt_change = PromptChange(
            turn=self._last_turn,
            kept=self.prompt_len,
            dropped=0,
            appended=len(delta),
            n_separator=n_separator,
            extends=True,
            restyled=restyled,
        )
        self.n_continuations += 1
        self._pending = prompt_change
        self._tokens.append(delta)
        self._delta = delta
        return prompt_change

    def go_on(
        self,
        prompt_ids: Ids,
        *,
        n_separator: int = 0,
        restyled: bool = False,
        drift: str | None = None,
        n_rewritten: int = 0,
    ) -> PromptChange | None:
        """Make `prompt_ids` [n] the prompt of the next turn.

        They extend the current segment if they begin with all of its tokens, else they begin a new
        one. Returns the change since the last turn; None before the first turn or without a change.
        The other arguments are those of `observe` and `begin_segment`.
        """
        if not self.segments or not self.segments[-1].turn_ends or self._delta is not None:
            return self.begin_segment(prompt_ids, drift, n_rewritten)
        held = self.prompt_len
        if not np.array_equal(prompt_ids[:held], self.ids):
            return self.begin_segment(prompt_ids, drift, n_rewritten)
        if len(prompt_ids) == held:
            return None
        return self.observe(prompt_ids[held:], n_separator, restyled)

    def add_turn(
        self,
        output_ids: Ids,
        logprobs: Sequence[float] | NDArray[np.floating[Any]],
        versions: Sequence[VersionSpan],
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> TurnTokens:
        """Append a generated turn.

        `output_ids`, `logprobs`: [n]. `versions`: spans that cover the n tokens. `columns`: further
        columns by name (`token_tree.COLUMNS`), one value per token or one for all. Raises
        ValueError if their lengths differ or the turn is empty.
        """
        if not len(output_ids):
            raise ValueError(f"turn {self.n_turns} has no generated token")
        if len(logprobs) != len(output_ids):
            raise ValueError(
                f"turn {self.n_turns} has {len(output_ids)} tokens but {len(logprobs)} logprobs"
            )
        segment = self.segments[-1]
        first = not segment.turn_ends
        tokens = TurnTokens(
            turn=self.n_turns,
            segment=len(self.segments) - 1,
            branch=segment.branch if first else None,
            prompt_change=self._pending,
            prompt_delta=np.empty(0, np.int32) if self._delta is None else self._delta,
            prompt_len=self.prompt_len,
        )
        of_each = _version_of_each(versions, len(output_ids), self.n_turns)
        self._tokens.append(
            output_ids, {"mask": 1, "logprobs": logprobs, "versions": of_each, **(columns or {})}
        )
        known = [self.versions.min, self.versions.max] if self.versions else []
        seen = [int(of_each.min()), int(of_each.max()), *known]
        self.versions = VersionRange(min=min(seen), max=max(seen))
        segment.turn_ends.append((self.n_turns, self.prompt_len))
        self._delta, self._pending = None, None
        self.n_turns += 1
        self.n_generated += len(output_ids)
        return tokens

    def pass_turn(self) -> int:
        """Count a turn that another model made: it has no tokens here. Returns its number."""
        self.n_turns += 1
        return self.n_turns - 1

    @property
    def _last_turn(self) -> int:
        """The last generated turn."""
        return self.segments[-1].turn_ends[-1][0]

    def _withdraw_delta(self) -> None:
        """Remove the ids appended since the last turn: no turn was generated from them."""
        if self._delta is None:
            return
        segment = self.segments[-1]
        if segment.turn_ends:
            self._tokens.cut(segment.turn_ends[-1][1])
        else:
            self._tokens.drop()
            self.segments.pop()
        if self._pending is not None:
            self.n_continuations -= 1
            self.n_drifts -= self._pending.drift is not None
        self._delta, self._pending = None, None

    def _find_branch(self, prompt: NDArray[np.int32]) -> Branch | None:
        """The branch with the longest prefix of `prompt` among the turns of earlier segments.

        Each segment's own tokens are compared at most once, so the cost does not grow with the
        number of segments.
        """
        best: Branch | None = None
        matching: list[int] = []  # for each segment: length of its common prefix with the prompt
        for index, segment in enumerate(self.segments):
            shared, length = 0, 0
            if segment.branch is not None:
                shared, length = segment.branch.shared_len, matching[segment.branch.segment]
            if segment.turn_ends and length >= shared:
                # Only up to the last turn: a later delta is not stored.
                own = self._tokens.own_ids(index)[: segment.turn_ends[-1][1] - shared]
                length = shared + common_prefix(own, prompt[shared:])
            matching.append(length)
            if segment.turn_ends and length > (best.shared_len if best else 0):
                turn = next(turn for turn, end in segment.turn_ends if end >= length)
                best = Branch(index, turn, length)
        return best


def _version_of_each(spans: Sequence[VersionSpan], length: int, turn: int) -> NDArray[np.int32]:
    """The policy version of each output token, [length]. Raises ValueError if spans have gaps."""
    if not spans_cover(spans, length):
        raise ValueError(
            f"the version spans of turn {turn} do not cover its {length} tokens: "
            f"{show_spans(spans)}"
        )
    versions = [span.version for span in spans]
    return np.repeat(np.array(versions, np.int32), [span.end - span.start for span in spans])
