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
from agentrl.databases.token_tree import TokenTree
from agentrl.policy_version import VersionSpan


@dataclass(frozen=True, slots=True)
class Branch:
    """Where a segment leaves the tokens of an earlier one.

    The first `shared_len` tokens are those of turn `turn` of segment `segment` (its prompt and its
    output), and belong to the new segment's prompt: no generated token is ever shared with another
    generated one.
    """

    segment: int
    turn: int
    shared_len: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of turns that extend each other; `TokenContext.line` has its tokens."""

    branch: Branch | None
    prompt_len: int  # tokens that it begins with
    turn_ends: list[tuple[int, int]] = field(default_factory=list)  # (turn, tokens at its end)


@dataclass(frozen=True, slots=True)
class PromptChange:
    """What happened to the tokens between generated turn `turn` and the next prompt.

    The next prompt is the first `kept` tokens of the turn's segment (its prompts and outputs up to
    and with the turn), then `separator`, then `appended`. `dropped` of the segment's tokens are not
    in it: none where the tokens are extended.

    separator: ids that the chat template adds to close the turn, which the model did not generate
    extends: whether the next prompt is in the same segment
    drift: why the chat template does not extend what was sampled; None if it does, or where the
        conversation was rewritten on purpose
    restyled: the template would write the turn in other characters; it stays as it was generated
    n_rewritten: generated turns whose ids the new prompt does not hold as they were sampled
    """

    turn: int
    kept: int
    dropped: int
    separator: tuple[int, ...]
    appended: tuple[int, ...]
    extends: bool
    drift: str | None = None
    restyled: bool = False
    n_rewritten: int = 0


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """What a turn added: the prompt's new ids, and the place of the turn in the record."""

    turn: int
    segment: int
    branch: Branch | None  # of the segment, on its first turn
    prompt_change: PromptChange | None  # between the last turn and this one
    prompt_delta: list[int]
    prompt_len: int


class TokenContext:
    """The tokens of one record, segment by segment.

    Order of calls: `begin_segment`, `add_turn`, then again and again `observe` (or another
    `begin_segment`) and `add_turn`.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.n_turns = 0
        self.n_generated = 0
        self.n_continuations = 0
        self.n_drifts = 0
        self.versions: VersionRange | None = None  # oldest and newest of the generated tokens
        self._tokens = GrowingTree()  # a branch for each segment
        self._delta: list[int] = []
        self._pending: PromptChange | None = None  # the one that `_delta` comes from

    @property
    def ids(self) -> list[int]:
        """The current segment's tokens: the prompt of the next turn."""
        ids: list[int] = self._tokens.ids(-1).tolist()
        return ids

    @property
    def prompt_len(self) -> int:
        """Tokens of the next turn's prompt."""
        return self._tokens.length(-1)

    @property
    def n_tokens(self) -> int:
        """Tokens of all segments; a shared prefix counts once."""
        return len(self._tokens)

    @property
    def counts(self) -> TokenCounts:
        """Tokens by origin. `prompt` is the first prompt; the rest is generated or observed."""
        if not self.segments:
            return TokenCounts()
        prompt = self.segments[0].prompt_len
        observed = self.n_tokens - prompt - self.n_generated
        return TokenCounts(prompt=prompt, generated=self.n_generated, observed=observed)

    def tree(self) -> TokenTree:
        """The tokens of all segments, as far as they are."""
        return self._tokens.tree()

    def line(self, segment: int) -> TokenTree:
        """The tokens of a segment, with those that it shares."""
        return self._tokens.line(segment)

    def begin_segment(
        self, prompt_ids: Sequence[int], drift: str | None = None, n_rewritten: int = 0
    ) -> PromptChange | None:
        """Begin a segment with a whole rendered prompt.

        `drift`, `n_rewritten`: see `PromptChange`. Returns what changed since the last turn, or
        None before the first turn.
        """
        if not len(prompt_ids):
            raise ValueError("a segment cannot begin with an empty prompt")
        prompt_change = None
        self._withdraw_delta()
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        if self.n_turns:
            last = self._tokens.ids(-1)
            kept = _common_prefix(last, prompt)
            prompt_change = PromptChange(
                turn=self.n_turns - 1,
                kept=kept,
                dropped=len(last) - kept,
                separator=(),
                appended=tuple(prompt_ids[kept:]),
                extends=False,
                drift=drift,
                n_rewritten=n_rewritten,
            )
            self.n_continuations += 1
            self.n_drifts += drift is not None
        self._pending = prompt_change
        branch = self._find_branch(prompt)
        if branch is None:
            self._tokens.begin()
            self._tokens.append(prompt)
        else:
            self._tokens.begin(branch.segment, branch.shared_len)
            self._tokens.append(prompt[branch.shared_len :])
        self.segments.append(Segment(branch, len(prompt)))
        self._delta = list(prompt_ids)
        return prompt_change

    def observe(
        self, delta_ids: Sequence[int], n_separator: int = 0, restyled: bool = False
    ) -> PromptChange:
        """Append what the template adds after a turn: tool results and the next header.

        The first `n_separator` ids close the turn. `restyled`: see `PromptChange`.
        """
        if not self.segments[-1].turn_ends or self._delta:
            raise ValueError("a delta follows a generated turn")
        prompt_change = PromptChange(
            turn=self.n_turns - 1,
            kept=self.prompt_len,
            dropped=0,
            separator=tuple(delta_ids[:n_separator]),
            appended=tuple(delta_ids[n_separator:]),
            extends=True,
            restyled=restyled,
        )
        self.n_continuations += 1
        self._pending = prompt_change
        self._tokens.append(delta_ids)
        self._delta = list(delta_ids)
        return prompt_change

    def go_on(
        self,
        prompt_ids: Sequence[int],
        *,
        n_separator: int = 0,
        restyled: bool = False,
        drift: str | None = None,
        n_rewritten: int = 0,
    ) -> PromptChange | None:
        """Make `prompt_ids` what the next turn continues, whatever they are.

        They extend the current segment if they begin with all of its tokens, and begin a new one
        otherwise. Returns what changed since the last turn, or None if there is none or nothing
        did. See `observe` and `begin_segment` for the rest.
        """
        if not self.segments or not self.segments[-1].turn_ends or self._delta:
            return self.begin_segment(prompt_ids, drift, n_rewritten)
        held = self.prompt_len
        if list(prompt_ids[:held]) != self.ids:
            return self.begin_segment(prompt_ids, drift, n_rewritten)
        if len(prompt_ids) == held:
            return None
        return self.observe(prompt_ids[held:], n_separator, restyled)

    def n_new(self, prompt_ids: Sequence[int]) -> int:
        """How many tokens a prompt would add to those of the record."""
        branch = self._find_branch(np.asarray(prompt_ids, dtype=np.int32))
        return len(prompt_ids) - (branch.shared_len if branch else 0)

    def add_turn(
        self,
        output_ids: Ids,
        logprobs: Sequence[float] | NDArray[np.floating[Any]],
        versions: Sequence[VersionSpan],
        columns: Mapping[str, ArrayLike] | None = None,
    ) -> TurnTokens:
        """Append a turn as the model generated it, and say what the turn added.

        `columns`: further columns of the output's tokens, by name (`token_tree.COLUMNS`), an entry
        for each token or one for all. Raises ValueError where ids, logprobs and version spans do
        not fit together.
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
            prompt_delta=self._delta,
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
        self._delta, self._pending = [], None
        self.n_turns += 1
        self.n_generated += len(output_ids)
        return tokens

    def _withdraw_delta(self) -> None:
        """Take back what was appended since the last turn, as no turn was generated from it."""
        if not self._delta:
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
        self._delta, self._pending = [], None

    def _find_branch(self, prompt: NDArray[np.int32]) -> Branch | None:
        """The longest prefix of `prompt` among the turns of earlier segments."""
        best: Branch | None = None
        for index, segment in enumerate(self.segments):
            if not segment.turn_ends:
                continue
            covered = segment.turn_ends[-1][1]  # a delta after the last turn is in no document
            shared = _common_prefix(self._tokens.ids(index, covered), prompt)
            if shared > (best.shared_len if best else 0):
                turn = next(turn for turn, end in segment.turn_ends if end >= shared)
                best = Branch(index, turn, shared)
        return best


def _common_prefix(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    length = min(len(first), len(second))
    differs = np.flatnonzero(first[:length] != second[:length])
    return int(differs[0]) if len(differs) else length


def _version_of_each(spans: Sequence[VersionSpan], length: int, turn: int) -> NDArray[np.int32]:
    """The policy version of each output token. Spans must cover the output without a gap."""
    versions = np.empty(length, dtype=np.int32)
    covered = 0
    for span in spans:
        if span.start != covered or span.end < span.start:
            break
        versions[span.start : span.end] = span.version
        covered = span.end
    if covered != length:
        shown = ", ".join(f"v{span.version} [{span.start}, {span.end})" for span in spans)
        raise ValueError(
            f"the version spans of turn {turn} do not cover its {length} tokens: {shown or 'none'}"
        )
    return versions
