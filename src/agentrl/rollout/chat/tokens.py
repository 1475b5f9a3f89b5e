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
    """What a turn added: the prompt's new ids, and the place of the turn in the record.

    prompt_delta: what the prompt has after the last turn of the segment; on the segment's first
        turn, after what its branch shares
    """

    turn: int
    segment: int
    branch: Branch | None  # of the segment, on its first turn
    prompt_change: PromptChange | None  # between the last turn and this one
    prompt_delta: NDArray[np.int32]
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
        self._delta: NDArray[np.int32] | None = None  # of the prompt that no turn followed yet
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
        self, prompt_ids: Ids, drift: str | None = None, n_rewritten: int = 0
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
            kept = common_prefix(last, prompt)
            prompt_change = PromptChange(
                turn=self.n_turns - 1,
                kept=kept,
                dropped=len(last) - kept,
                separator=(),
                appended=tuple(prompt[kept:].tolist()),
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
        """Begin a segment as `TurnTokens` says that one began: without a search for its branch.

        turn, shared_len: of the branch, None and 0 if there is none; delta_ids: what follows what
        it shares. Raises ValueError if that turn has no token at that place.
        """
        self._withdraw_delta()
        self.n_continuations += self.n_turns > 0
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
        """Append what the template adds after a turn: tool results and the next header.

        The first `n_separator` ids close the turn. `restyled`: see `PromptChange`.
        """
        if not self.segments[-1].turn_ends or self._delta is not None:
            raise ValueError("a delta follows a generated turn")
        delta = np.asarray(delta_ids, dtype=np.int32)
        prompt_change = PromptChange(
            turn=self.n_turns - 1,
            kept=self.prompt_len,
            dropped=0,
            separator=tuple(delta[:n_separator].tolist()),
            appended=tuple(delta[n_separator:].tolist()),
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
        if not self.segments or not self.segments[-1].turn_ends or self._delta is not None:
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

    def _withdraw_delta(self) -> None:
        """Take back what was appended since the last turn, as no turn was generated from it."""
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
        """The longest prefix of `prompt` among the turns of earlier segments.

        Each segment's own tokens are looked at once at most, so that a record whose every turn
        begins a segment costs no more than one that has a single one.
        """
        best: Branch | None = None
        matching: list[int] = []  # of each segment: how many of its first tokens the prompt has
        for index, segment in enumerate(self.segments):
            shared, length = 0, 0
            if segment.branch is not None:
                shared, length = segment.branch.shared_len, matching[segment.branch.segment]
            if segment.turn_ends and length >= shared:
                # A delta after the last turn is in no document.
                own = self._tokens.own_ids(index)[: segment.turn_ends[-1][1] - shared]
                length = shared + common_prefix(own, prompt[shared:])
            matching.append(length)
            if segment.turn_ends and length > (best.shared_len if best else 0):
                turn = next(turn for turn, end in segment.turn_ends if end >= length)
                best = Branch(index, turn, length)
        return best


def _version_of_each(spans: Sequence[VersionSpan], length: int, turn: int) -> NDArray[np.int32]:
    """The policy version of each output token. Spans must cover the output without a gap."""
    if not spans_cover(spans, length):
        raise ValueError(
            f"the version spans of turn {turn} do not cover its {length} tokens: "
            f"{show_spans(spans)}"
        )
    versions = [span.version for span in spans]
    return np.repeat(np.array(versions, np.int32), [span.end - span.start for span in spans])
