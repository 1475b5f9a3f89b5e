"""The documents of the data chain, and the states each of them may be in.

    Task -> Record -> DispatchedSamplingTask -> DBRecordData

A document is what one collection holds. Writers: the feeder makes Tasks, samplers make Records and
DispatchedSamplingTasks, whoever finishes a group makes its DBRecordData, the trainer marks them.
All statuses change through the tables of `transitions.py`. Token arrays are little-endian `bytes`
(see `arrays.py`), and a row's are a `TokenTree`.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from agentrl.databases.token_tree import COLUMNS, TokenTree, packed_fields
from agentrl.policy_version import VersionSpan


class Split(StrEnum):
    """What a group of rollouts is made for."""

    TRAIN = "train"
    EVAL = "eval"


class TaskStatus(StrEnum):
    """A Task is the ledger of one group of rollouts."""

    CREATED = "created"  # nobody has claimed a slot yet
    RUNNING = "running"  # some slot is leased, pending again, or terminal
    FINALISING = "finalising"  # all slots are terminal and one process holds the finalisation
    COMPLETED = "completed"  # advantages and rows are written
    QUARANTINED = "quarantined"  # they could not be, and it waits for a person; `error` says why
    LEFT_OUT = "left_out"  # of other data than the run goes on with, and nobody had begun it


class SlotStatus(StrEnum):
    """A slot is one of a Task's rollouts."""

    PENDING = "pending"  # to be sampled
    LEASED = "leased"  # somebody samples it, or scores what is sampled: its Record says which
    SAMPLED = "sampled"  # its Record is to be scored, from `not_before` on
    COMPLETED = "completed"  # terminal: its Record is scored
    FAILED = "failed"  # terminal: `max_failures` Records ended in an error
    QUARANTINED = "quarantined"  # terminal: its Record could not be scored, and waits for a person


class RecordStatus(StrEnum):
    """A Record is the trajectory that one attempt at a rollout made."""

    SAMPLING = "sampling"
    SAMPLED = "sampled"  # its conversation is over and stored; it has no score yet
    SCORED = "scored"
    FAILED = "failed"  # it ended in an error, which it keeps; its slot was tried again or given up
    QUARANTINED = "quarantined"  # it cannot be scored, or not be trained; its `error` says why
    READY = "ready"  # the group is finalised and this Record became a training row
    ABANDONED = "abandoned"  # the group is finalised and a filter left this Record out


class RowStatus(StrEnum):
    """A DBRecordData (row, for short) is a Record as the trainer wants it."""

    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    EVICTED = "evicted"  # older than the staleness bound: not trained
    WITHDRAWN = "withdrawn"  # scored anew, and left out by its group's rewards since
    QUARANTINED = "quarantined"  # the trainer cannot use it; its `error` says why


class StopReason(StrEnum):
    """Why a Record's conversation ended."""

    ANSWERED = "answered"  # a turn without tool calls
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # the whole trajectory reached --max_tokens
    MAX_PROMPT_TOKENS = "max_prompt_tokens"
    MAX_NEW_TOKENS = "max_new_tokens"  # one turn was cut off
    REPETITION = "repetition"  # --repetition_early_stop_times turns repeated earlier ones


class TurnStatus(StrEnum):
    """What became of a turn. The group rules go by it."""

    COMPLETED = "completed"
    TOOL_FAILED = "toolfailed"  # a tool that it called failed
    FORMAT_ERROR = "formaterror"  # a tool call that cannot be read
    REPEAT_ERROR = "repeaterror"  # it repeats an earlier turn
    TRUNCATED = "truncated"  # cut off by a limit


class Rewrite(StrEnum):
    """How an agent rewrote its conversation before a turn, which begins a segment."""

    DISCARD_ALL_TOOLS = "discard_all_tools"  # earlier results made room
    SUMMARY = "summary"  # the last turn was put aside, to ask for a summary
    DISCARD_ALL = "discard_all"  # begun again with the summary
    REPETITION = "repetition"  # the last turn was taken out, because it repeated others
    AGENT = "agent"  # a user's agent went on from other messages


class Document(BaseModel):
    """A MongoDB document. `id` is its `_id`; unknown fields are an error on our side."""

    model_config = ConfigDict(populate_by_name=True, extra="forbid", use_enum_values=True)

    id: str = Field(alias="_id")

    def to_mongo(self) -> dict[str, Any]:
        """The document as MongoDB stores it."""
        return self.model_dump(by_alias=True)

    @classmethod
    def from_mongo(cls, document: dict[str, Any]) -> Self:
        """A document as read from its collection."""
        return cls.model_validate(document)


class SubDocument(BaseModel):
    """A sub-document."""

    model_config = ConfigDict(extra="forbid", use_enum_values=True)


HANDED_BACK = "handed back: "  # begins the error of a Record whose end was nobody's fault
GROUPS_PER_EPOCH = 10**9  # room for the groups of one epoch in the group order


def group_order(epoch: int, seq: int) -> int:
    """The number of a group in the order of all epochs of its split."""
    return epoch * GROUPS_PER_EPOCH + seq


def epoch_places(epoch: int) -> dict[str, int]:
    """The filter of `group_order` for the groups of an epoch: indexes hold that, and no epoch."""
    return {"$gte": group_order(epoch, 0), "$lt": group_order(epoch + 1, 0)}


class Slot(SubDocument):
    """One rollout of a Task: a member of its group, numbered by `rollout` from 0.

    `attempt` counts the leases that ended without a trajectory, so that every trajectory has a
    Record id of its own; `failures` those among them that count against `max_failures`: errors and
    dead samplers, not slots handed back in order. `outages` counts those that were handed back
    because something was out of reach. In the same way `scorings` counts the leases that
    ended with the trajectory and without a score, and `scoring_failures` those that count.
    """

    rollout: int
    status: SlotStatus = SlotStatus.PENDING
    owner: str | None = None
    lease_expires: datetime | None = None  # on the server's clock
    attempt: int = 0
    failures: int = 0
    outages: int = 0
    scorings: int = 0
    scoring_failures: int = 0
    not_before: datetime | None = None  # of a sampled slot: when it may be scored
    record: str | None = None
    score: float | None = None
    error: str | None = None


class Finalisation(SubDocument):
    """Who computes the group's advantages and writes its rows.

    Without an owner it may be taken over when the lease has expired, as one that was put off.
    `tries` counts those that came to nothing, `failures` those among them that count.
    """

    owner: str | None
    lease_expires: datetime
    tries: int = 0
    failures: int = 0
    error: str | None = None  # of the last one


class GroupScore(SubDocument):
    """What a scorer that looks at the whole group said of one of its Records."""

    record: str
    scorer: str
    score: float | None  # None: not scored
    explanation: str | None = None


class GroupOutcome(SubDocument):
    """What a finalised training group gave to train."""

    rows: int
    left_out: dict[str, int] = Field(default_factory=dict)  # its other Records, by the reason


class Task(Document):
    """One line of the dataset in one epoch, and the ledger of its `num_generations` rollouts."""

    split: Split
    epoch: int
    seq: int  # its number in the epoch's order
    group_order: int  # of `group_order()`: groups are begun, and their rows trained, in this order
    status: TaskStatus = TaskStatus.CREATED
    data: int = 0  # which of the run's data sets it is of, see `Run`
    task_id: str  # the line's own id, the same in every epoch
    query: str
    answer: str | None = None
    scorer: str = "agentcpm"  # a name or a weighted sum: `scorer_notation.py`
    answer_schema: str | None = None
    agent_name: str | None = None  # the agent that works on it (None: --agent_name)
    messages: list[dict[str, Any]] | None = None  # a prompt given as a conversation
    fields: dict[str, Any] = Field(default_factory=dict)  # what else the line held
    pending: int  # slots to be sampled that nobody holds: what the claim query matches
    score_at: datetime | None = None  # when the first of its scorings is due: as `pending` is
    slots: list[Slot]
    finalisation: Finalisation | None = None
    group_scores: list[GroupScore] | None = None  # kept once, so that all who finalise see the same
    outcome: GroupOutcome | None = None  # once it is finalised; None for an evaluation
    error: str | None = None  # of a quarantined Task
    created_at: datetime | None = None
    completed_at: datetime | None = None  # or quarantined


class TokenCounts(SubDocument):
    """Tokens of a Record by origin."""

    prompt: int = 0  # system, question and tool definitions
    generated: int = 0
    observed: int = 0  # tool results and the headers around them


class VersionRange(SubDocument):
    """The oldest and the newest policy version among a Record's generated tokens."""

    min: int
    max: int


class ToolCall(SubDocument):
    """A call that the model made, or the agent's own code (`by_agent`), and what came back."""

    name: str
    arguments: dict[str, Any]
    result: str | None = None
    is_error: bool = False
    latency_s: float = 0.0
    kept: str | None = None  # the ToolResult with what the model did not read: `result` is cut
    summarised_by: str | None = None  # the browse agent's model that wrote `result`
    by_agent: bool = False


class Scoring(SubDocument):
    """What a Record's scoring was before it was scored anew."""

    scorer: str
    score: float | None
    scores: dict[str, float | None]
    explanations: dict[str, str]
    advantage: float | None
    until: datetime  # when it was replaced
    row_stayed: bool  # its row was trained, leased or evicted by then, and has that advantage still


class Record(Document):
    """A trajectory: one attempt at one rollout, from the first prompt to its score."""

    task: str  # Task._id
    task_id: str
    rollout: int
    attempt: int
    split: Split
    epoch: int
    owner: str
    agent_name: str | None = None
    status: RecordStatus = RecordStatus.SAMPLING
    query: str
    turns: list[str] = Field(default_factory=list)  # DispatchedSamplingTask ids, in order
    n_turns: int = 0
    n_tool_calls: int = 0
    n_tool_errors: int = 0
    n_segments: int = 0
    n_continuations: int = 0  # places where a turn was followed by more
    n_drifts: int = 0  # continuations where the chat template rewrites what was sampled
    turn_statuses: dict[str, int] = Field(default_factory=dict)  # how many turns of each
    tools_offered: list[str] = Field(default_factory=list)  # those that a prompt of it named
    own_calls: list[ToolCall] = Field(default_factory=list)  # of the agent's code, in no turn
    tokens: TokenCounts = Field(default_factory=TokenCounts)
    versions: VersionRange | None = None
    final_answer: str | None = None
    stop_reason: StopReason | None = None
    score: float | None = None  # None once it is scored: a scorer had nothing to say of it
    scores: dict[str, float | None] = Field(default_factory=dict)  # by scorer
    explanations: dict[str, str] = Field(default_factory=dict)  # by scorer, where it gives any
    score_history: list[Scoring] = Field(default_factory=list)  # by `agentrl rescore`, oldest first
    advantage: float | None = None
    left_out: str | None = None  # why an abandoned Record is not trained
    error: str | None = None
    started_at: datetime | None = None
    sampled_at: datetime | None = None  # its conversation was over
    finished_at: datetime | None = None  # it was scored, or given up


class ResultFile(SubDocument):
    """A part of a tool's result that is not text. `kind`: image, audio or resource."""

    kind: str
    mime_type: str
    uri: str | None = None  # of a resource
    data: bytes


class ToolResult(Document):
    """What a tool answered, whole, where the model did not read all of it."""

    record_id: str
    tool: str
    text: str
    files: list[ResultFile] = Field(default_factory=list)
    omitted: list[str] = Field(default_factory=list)  # what even this document has no room for
    created_at: datetime


class DispatchedSamplingTask(Document):
    """One turn: a request to an inference service and its answer.

    The prompt of a turn is the prompt of the segment's last turn, its output, and
    `prompt_delta_ids`. That of a segment's first turn is the first `shared_len` tokens of `parent`
    (its prompt and its output), and `prompt_delta_ids`.
    """

    record_id: str
    turn: int
    status: TurnStatus = TurnStatus.COMPLETED
    segment: int
    parent: str | None = None  # the turn whose tokens this segment shares, where it begins
    shared_len: int = 0  # how many of that turn's prompt + output tokens it shares
    rewrite: Rewrite | None = None  # of the conversation before this turn
    service: str
    messages: list[dict[str, Any]]  # what was added since the last turn, for people to read
    drift: str | None = None  # why its prompt does not extend what was sampled, where it does not
    prompt_delta_ids: bytes  # int32
    prompt_len: int
    output_ids: bytes  # int32
    output_logprobs: bytes  # float32
    output_text: str
    tool_calls: list[ToolCall] = Field(default_factory=list)
    format_error: str | None = None
    finish_reason: str
    versions: list[VersionSpan]
    cached_tokens: int = 0
    generate_latency_s: float
    tools_latency_s: float = 0.0
    created_at: datetime


class TrainedStep(SubDocument):
    """One optimizer step that a row was part of."""

    step: int
    trainer: str
    fence: int  # that trainer's number, see `Run`


class DBRecordData(Document):
    """A Record as the trainer wants it: its token tree, and what is said of it as a whole.

    The document has the tree's nodes and columns as fields of its own (`TokenTree.pack`).
    """

    task: str
    status: RowStatus = RowStatus.READY
    group_order: int  # the Task's: rows are leased in it, the oldest first
    reward: float
    n_train_tokens: int
    cost: float  # pairs of a token and one it sees: what attention costs, beside `n_tokens`
    policy_versions: list[int]  # of its generated tokens, sorted, each once
    temperature: float  # of the sampling: the trainer's logprobs are taken at the same
    tree: InstanceOf[TokenTree] = Field(exclude=True)
    n_segments: int = 1  # of the Record, as are the next two
    n_continuations: int = 0
    n_drifts: int = 0
    prefix_hash: str  # of the first prompt: siblings that share it have the same
    prompt_len: int = 0  # tokens of that prompt
    trained: list[TrainedStep] = Field(default_factory=list)
    not_before: int = 0  # the earliest step that may train it (again)
    trainer: str | None = None  # who leases it
    fence: int | None = None  # that trainer's number, see `Run`; or of the one that evicted it
    step: int | None = None  # for which step it is leased, or was too old
    error: str | None = None  # of a quarantined row
    created_at: datetime | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of the tree."""
        return len(self.tree)

    def to_mongo(self) -> dict[str, Any]:
        """The document as MongoDB stores it."""
        return {**super().to_mongo(), **self.tree.pack()}

    @classmethod
    def from_mongo(cls, document: dict[str, Any]) -> Self:
        """A document as read from its collection. Raises `ValueError` for a damaged one."""
        try:
            tree = TokenTree.unpack(document)
        except ValueError as error:
            raise ValueError(
                f"row {document['_id']}: {error}; the document is damaged, remove it from "
                "record_data"
            ) from None
        of_tree = packed_fields()
        rest = {name: value for name, value in document.items() if name not in of_tree}
        return cls.model_validate({**rest, "tree": tree})


def _refuse_columns_over_fields() -> None:
    """Raise ValueError if a column is stored where a row has something else: it would be lost."""
    taken = {"n_tokens", "nodes", "_id", *DBRecordData.model_fields}
    for name, column in COLUMNS.items():
        if column.stored is None:
            continue
        if column.stored in taken:
            raise ValueError(
                f"column {name!r} of token_tree.COLUMNS is stored as {column.stored!r}, which a "
                "DBRecordData has already: give it another name"
            )
        taken.add(column.stored)


_refuse_columns_over_fields()


class InferenceService(Document):
    """An inference service that samplers may use. `_id` is its URL."""

    url: str
    model: str
    weight_version: int  # -1: the weights it was started with
    capacity: int  # requests it runs at once; 0: not known
    heartbeat: datetime | None  # None: given by URL, it sends none
    memory: str = "held"  # whether it has its GPU memory: inference.memory.MemoryState


class PolicyVersion(Document):
    """One publication of weights. `_id` is the version."""

    version: int
    step: int
    path: str
    created_at: datetime
    served: bool = False  # all services that were there and answered have had it


class TrainerStart(SubDocument):
    """Where a trainer began: the optimizer steps in the checkpoint that it went on from."""

    fence: int
    step: int


class DataSet(SubDocument):
    """What a run learns from, by content: its tasks, the model it began with, and its world.

    A run goes on with another one if it is told to (`--change_data`), and with the same one anew
    if it begins again from its start weights. Then what belongs to those before is not trained any
    more, and their evaluations are not counted with its own.
    """

    fence: int = 0  # of the trainer that began it
    epoch: int = 0  # its first epoch of training tasks
    step: int = 0  # optimizer steps done before it
    seed: int = 0  # of the order of its tasks, for as long as it lasts
    train_file: str | None = None
    train_digest: str | None = None
    eval_file: str | None = None
    eval_digest: str | None = None
    model: str | None = None
    model_digest: str | None = None
    tools: str = "none"  # none | demo | given
    world: dict[str, str | None] = Field(default_factory=dict)  # flags that make the agent's world


class Run(Document):
    """The run itself, in one document: who trains it and how far it is. `_id` is its name.

    `identity` tells it from another run of that name: its folder has the same. `flags` are those of
    its last start, for what joins, and `digests` says what the files among them hold
    (`configs/run_flags.py`).
    """

    identity: str | None = None
    flags: dict[str, Any] | None = None
    digests: dict[str, str] = Field(default_factory=dict)
    data: list[DataSet] = Field(default_factory=list)  # one after the other; the last one is its
    status: str = "created"  # created | training | evaluating | finished | hopeless
    failure: str | None = None  # why it is hopeless, for people
    trainer: str | None = None
    trainer_host: str | None = None
    lease_expires: datetime | None = None
    fence: int = 0  # grows with every trainer that takes the run
    starts: list[TrainerStart] = Field(default_factory=list)  # of its trainers, in that order
    step: int = 0
    max_steps: int = 0
    rows_per_step: int = 0  # of all data-parallel ranks: samplers' staleness bound needs it
    version: int = -1
    heartbeat: datetime | None = None
