"""The documents of the data chain, and the states each of them may be in.

    Task -> Record -> DispatchedSamplingTask -> DBRecordData

Each collection contains one kind of document. The feeder writes Tasks. Samplers write Records and
DispatchedSamplingTasks. The process that finishes a group writes its DBRecordData, and the trainer
updates them. All statuses change by the tables of `transitions.py`. Token arrays are little-endian
`bytes` (`arrays.py`); a row's are a `TokenTree`.
"""

from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from agentrl.databases.token_tree import COLUMNS, TokenTree, packed_fields
from agentrl.policy_version import VersionSpan


class Split(StrEnum):
    """The purpose of a group of rollouts."""

    TRAIN = "train"
    EVAL = "eval"


class TaskStatus(StrEnum):
    """States of a Task, the ledger of one group of rollouts."""

    CREATED = "created"  # no slot was claimed yet
    RUNNING = "running"  # some slot is leased, pending again, or terminal
    FINALISING = "finalising"  # all slots are terminal; advantages and rows are still to be written
    COMPLETED = "completed"  # advantages and rows are written
    QUARANTINED = "quarantined"  # finalisation failed too often, see `error`; waits for a person
    LEFT_OUT = "left_out"  # the run changed its data before the first claim


class SlotStatus(StrEnum):
    """States of a slot, one of a Task's rollouts."""

    PENDING = "pending"  # to be sampled
    LEASED = "leased"  # being sampled or scored; the Record's status says which
    SAMPLED = "sampled"  # its Record is to be scored, from `not_before` on
    COMPLETED = "completed"  # terminal: its Record is scored
    FAILED = "failed"  # terminal: `max_failures` Records ended in an error
    QUARANTINED = "quarantined"  # terminal: its Record could not be scored; waits for a person


class RecordStatus(StrEnum):
    """States of a Record, the trajectory of one attempt at a rollout."""

    SAMPLING = "sampling"
    SAMPLED = "sampled"  # the conversation is over and stored; no score yet
    SCORED = "scored"
    FAILED = "failed"  # the attempt ended in `error`; the slot is retried or given up
    QUARANTINED = "quarantined"  # it cannot be scored or trained; `error` says why
    READY = "ready"  # the group is finalised and this Record became a training row
    ABANDONED = "abandoned"  # the group is finalised and this Record was left out


class RowStatus(StrEnum):
    """States of a DBRecordData (a row), the training data of one Record."""

    READY = "ready"
    LEASED = "leased"
    TRAINED = "trained"
    EVICTED = "evicted"  # older than the staleness bound: not trained
    WITHDRAWN = "withdrawn"  # left out after its group was scored again
    QUARANTINED = "quarantined"  # the trainer cannot use it; `error` says why


class StopReason(StrEnum):
    """Why a Record's conversation ended."""

    ANSWERED = "answered"  # a turn without tool calls
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"  # a context reached --max_tokens
    MAX_PROMPT_TOKENS = "max_prompt_tokens"
    MAX_NEW_TOKENS = "max_new_tokens"  # one turn was truncated
    REPETITION = (
        "repetition"  # --repetition_early_stop_times turns said the same, or --repeated_turns_limit
    )


class TurnStatus(StrEnum):
    """The outcome of a turn, an input of the group rules."""

    COMPLETED = "completed"
    TOOL_FAILED = "toolfailed"  # a tool call failed
    FORMAT_ERROR = "formaterror"  # a tool call could not be parsed
    REPEAT_ERROR = "repeaterror"  # the turn repeats an earlier one
    TRUNCATED = "truncated"  # a limit cut it off


class Rewrite(StrEnum):
    """How an agent rewrote its conversation before a turn. The turn begins a new segment."""

    DISCARD_ALL_TOOLS = "discard_all_tools"  # earlier tool results were removed
    SUMMARY = "summary"  # the last turn was set aside, to ask for a summary
    DISCARD_ALL = "discard_all"  # the conversation began again with the summary
    REPETITION = "repetition"  # the last turn was removed because it repeated earlier ones
    AGENT = "agent"  # a user's agent continued from other messages


class Document(BaseModel):
    """A MongoDB document. `id` is its `_id`. Unknown fields raise a validation error."""

    model_config = ConfigDict(populate_by_name=True, extra="forbid", use_enum_values=True)

    id: str = Field(alias="_id")

    def to_mongo(self) -> dict[str, Any]:
        """The document as MongoDB stores it."""
        return self.model_dump(by_alias=True)

    @classmethod
    def from_mongo(cls, document: dict[str, Any]) -> Self:
        """The document as read from its collection. Raises `ValueError` if it does not validate."""
        return cls.model_validate(document)


class SubDocument(BaseModel):
    """A part of a document."""

    model_config = ConfigDict(extra="forbid", use_enum_values=True)


HANDED_BACK = "handed back: "  # prefix of the error of a Record that does not count as a failure
GROUPS_PER_EPOCH = 10**9  # group orders reserved for each epoch


def group_order(epoch: int, seq: int) -> int:
    """The position of group `seq` of `epoch` among all groups of its split."""
    return epoch * GROUPS_PER_EPOCH + seq


def epoch_places(epoch: int) -> dict[str, int]:
    """The filter of `group_order` for the groups of an epoch: indexes hold that, and no epoch."""
    return {"$gte": group_order(epoch, 0), "$lt": group_order(epoch + 1, 0)}


class Fork(SubDocument):
    """Where a rollout branches off: it has the turns of `record` before `turn`, and its own."""

    record: str
    turn: int


class Slot(SubDocument):
    """One rollout of a Task, numbered by `rollout` from 0. Forks follow the others.

    `attempt`: leases that ended without a trajectory; part of the Record's id.
    `failures`: attempts that count against `max_failures`.
    `losses`: attempts whose sampler went silent; the first few are no failures.
    `outages`: attempts that were handed back because a dependency was unreachable.
    `scorings`: leases that ended with a trajectory but without a score.
    `scoring_failures`: scorings that count against `max_scoring_failures`.
    """

    rollout: int
    status: SlotStatus = SlotStatus.PENDING
    owner: str | None = None
    lease_expires: datetime | None = None  # by the server's clock
    attempt: int = 0
    failures: int = 0
    losses: int = 0
    outages: int = 0
    scorings: int = 0
    scoring_failures: int = 0
    not_before: datetime | None = None  # of a sampled slot: the earliest time to score it
    record: str | None = None
    fork: Fork | None = None  # None: it begins with the prompt
    score: float | None = None
    error: str | None = None


class Finalisation(SubDocument):
    """The lease on computing a group's advantages and writing its rows.

    When it has expired, anyone may take it. It has no owner if the last try was put off. `tries`:
    tries that ended without a result. `failures`: those that count against the limit.
    """

    owner: str | None
    lease_expires: datetime
    tries: int = 0
    failures: int = 0
    error: str | None = None  # of the last try


class GroupScore(SubDocument):
    """The score that a scorer of whole groups gave to one Record."""

    record: str
    scorer: str
    score: float | None  # None: not scored
    explanation: str | None = None


class GroupOutcome(SubDocument):
    """The result of a finalised training group."""

    rows: int  # training rows
    left_out: dict[str, int] = Field(default_factory=dict)  # number of other Records, by reason


class Task(Document):
    """One line of the dataset in one epoch, and the ledger of its `num_generations` rollouts."""

    split: Split
    epoch: int
    seq: int  # its position in the epoch
    group_order: int  # `group_order(epoch, seq)`: the order of claims and of training
    status: TaskStatus = TaskStatus.CREATED
    data: int = 0  # index of its data set in `Run.data`
    task_id: str  # the line's own id, the same in every epoch
    query: str
    answer: str | None = None
    scorer: str = "agentcpm"  # a name or a weighted sum: `scorer_notation.py`
    answer_schema: str | None = None
    agent_name: str | None = None  # None: --agent_name
    system_prompt: str | None = None  # None: --system_prompt
    messages: list[dict[str, Any]] | None = None  # a prompt given as a conversation
    fields: dict[str, Any] = Field(default_factory=dict)  # further fields of the line
    pending: int  # number of pending slots, for the claim query
    score_at: datetime | None = None  # when its first scoring is due, for the claim of scorings
    slots: list[Slot]
    finalisation: Finalisation | None = None
    group_scores: list[GroupScore] | None = None  # stored once: a repeated finalisation reuses them
    outcome: GroupOutcome | None = None  # of a finalised training group
    error: str | None = None  # of a quarantined Task
    created_at: datetime | None = None
    completed_at: datetime | None = None  # when it was completed or quarantined


class TokenCounts(SubDocument):
    """Tokens of a Record by origin."""

    prompt: int = 0  # system, question and tool definitions
    generated: int = 0
    observed: int = 0  # tool results and the headers around them


class VersionRange(SubDocument):
    """The oldest and the newest policy version among a Record's generated tokens."""

    min: int
    max: int


class Stretch(SubDocument):
    """Turns of a Record with the same advantage: from `turn` on, up to the next stretch."""

    turn: int
    advantage: float


class Replay(SubDocument):
    """What of a Record was answered by stored turns and not sampled again."""

    turns: int = 0
    tokens: int = 0  # generated ones
    diverged: int | None = None  # the first turn whose request equals none that was left


class ToolCall(SubDocument):
    """A tool call of the model or of the agent's code (`by_agent`), and its result.

    `lasting`: it may have left a state that no fork of the rollout can have.
    """

    name: str
    arguments: dict[str, Any]
    result: str | None = None
    is_error: bool = False
    started_at: datetime | None = None
    latency_s: float = 0.0
    kept: str | None = None  # id of the ToolResult with the whole result, if `result` is cut
    summarised_by: str | None = None  # model of the browse agent that wrote `result`
    by_agent: bool = False
    lasting: bool = False


class Scoring(SubDocument):
    """An earlier scoring of a Record that was scored again."""

    scorer: str
    score: float | None
    scores: dict[str, float | None]
    explanations: dict[str, str]
    advantage: float | None
    until: datetime  # when it was replaced
    row_stayed: bool  # the row was trained, leased or evicted then, and keeps this advantage


class Record(Document):
    """A trajectory: one attempt at one rollout, from the first prompt to the score."""

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
    n_continuations: int = 0  # prompts that follow a generated turn
    n_drifts: int = 0  # continuations where the chat template does not extend the sampled tokens
    turn_statuses: dict[str, int] = Field(default_factory=dict)  # number of turns by TurnStatus
    tools_offered: list[str] = Field(default_factory=list)  # tools named in its prompts
    tool_list: str | None = None  # id of the ToolList of its first prompt with tools
    own_calls: list[ToolCall] = Field(default_factory=list)  # calls of the agent's code
    tokens: TokenCounts = Field(default_factory=TokenCounts)
    versions: VersionRange | None = None
    replay: Replay | None = None
    fork: Fork | None = None
    agent_rewards: dict[str, float] = Field(default_factory=dict)  # that a program reported
    final_answer: str | None = None
    stop_reason: StopReason | None = None
    score: float | None = None  # of a scored Record, None means that a scorer gave no score
    scores: dict[str, float | None] = Field(default_factory=dict)  # by scorer
    explanations: dict[str, str] = Field(default_factory=dict)  # by scorer
    meta_infos: dict[str, Any] = Field(default_factory=dict)  # what an agent notes, for its scoring
    score_history: list[Scoring] = Field(default_factory=list)  # by `agentrl rescore`, oldest first
    advantage: float | None = None
    stretches: list[Stretch] = Field(default_factory=list)  # of a group with forks: by turns
    agent_advantages: dict[str, float] = Field(default_factory=dict)  # of `agent_rewards`
    left_out: str | None = None  # why an abandoned Record is not trained
    error: str | None = None
    started_at: datetime | None = None
    sampled_at: datetime | None = None  # end of the conversation
    finished_at: datetime | None = None  # when it was scored, failed or was quarantined


class ResultFile(SubDocument):
    """A part of a tool's result that is not text. `kind`: image, audio or resource."""

    kind: str
    mime_type: str
    uri: str | None = None  # of a resource
    data: bytes


class ToolList(Document):
    """The tools that a prompt offered, with their parameters. `_id` is a digest of the list."""

    schemas: str  # JSON: OpenAI's function schemas, whose keys MongoDB might not take


class ToolResult(Document):
    """A whole tool result of which the model saw only a part."""

    record_id: str
    tool: str
    text: str
    files: list[ResultFile] = Field(default_factory=list)
    omitted: list[str] = Field(default_factory=list)  # parts that exceed the document's size
    created_at: datetime


class ProgramRequest(SubDocument):
    """The request of a program that a turn answers.

    `number`: of the request in its session, counted from 0; its answers have `choice` 0 to n - 1.
    `digest`: equal for equal requests. `stopped_by`: the text of the request that ended the answer.
    `delivered`: whether the answer has left for the program.
    """

    number: int
    choice: int
    digest: str
    stopped_by: str | None = None
    delivered: bool = False


NO_SEGMENT = -1  # that of a turn of another model


class DispatchedSamplingTask(Document):
    """One turn: a request to an inference service and its answer.

    The prompt is the prompt and output of the previous turn in the segment, plus
    `prompt_delta_ids`. In the first turn of a segment it is the first `shared_len` tokens of turn
    `parent` (prompt and output), plus `prompt_delta_ids`.

    Where a program or a user's agent asks, the messages of the prompt are the first `n_continued`
    of turn `continues` (those of its prompt, and then its reply), plus `messages`.

    A turn of another model has texts and no tokens. Its segment is `NO_SEGMENT`.
    """

    record_id: str
    turn: int
    agent: str | None = None  # which agent of a program
    trained: bool = True  # whether its tokens may be trained; if not, they have mask 0
    status: TurnStatus = TurnStatus.COMPLETED
    segment: int
    parent: str | None = None  # in a segment's first turn: the turn whose tokens it shares
    shared_len: int = 0  # number of shared tokens of the parent's prompt + output
    rewrite: Rewrite | None = None  # of the conversation before this turn
    service: str
    messages: list[dict[str, Any]]  # messages added since the last turn
    continues: int | None = None
    n_continued: int = 0
    request: ProgramRequest | None = None
    drift: str | None = None  # why the prompt does not extend the sampled tokens, if it does not
    prompt_delta_ids: bytes  # int32
    prompt_len: int
    output_ids: bytes  # int32
    output_logprobs: bytes  # float32
    output_text: str
    tool_calls: list[ToolCall] = Field(default_factory=list)
    format_error: str | None = None
    finish_reason: str
    params: dict[str, Any] | None = None  # sampling parameters of the request; None: of old turns
    replayed: str | None = None  # the stored turn whose answer this is, if it was not sampled
    versions: list[VersionSpan]
    cached_tokens: int = 0
    answered_at: datetime | None = None  # when its last token had come
    generate_latency_s: float
    tools_latency_s: float = 0.0
    created_at: datetime


class TrainedStep(SubDocument):
    """One optimizer step that trained a row."""

    step: int
    trainer: str
    fence: int  # the trainer's fencing number, see `Run`
    logprobs: bytes | None = None  # float32, the trainer's: `trained_logprobs.py`
    entropies: bytes | None = None  # float16, of the trainer's policy at these tokens


class DBRecordData(Document):
    """A training row: the token tree of a Record, and values of the whole row.

    The document stores the tree's nodes and columns as top-level fields (`TokenTree.pack`).
    """

    task: str
    status: RowStatus = RowStatus.READY
    group_order: int  # the Task's; rows are leased in this order
    reward: float
    n_train_tokens: int
    cost: float  # attention pairs (token, visible token): see `TokenTree.pairs`
    policy_versions: list[int]  # of the generated tokens, sorted, without duplicates
    temperature: float  # of sampling; the trainer computes logprobs at the same temperature
    tree: InstanceOf[TokenTree] = Field(exclude=True)
    n_segments: int = 1  # this and the next two: the Record's
    n_continuations: int = 0
    n_drifts: int = 0
    prefix_hash: str  # hash of the first prompt, equal for siblings with the same prompt
    prompt_len: int = 0  # tokens of the first prompt
    trained: list[TrainedStep] = Field(default_factory=list)
    not_before: int = 0  # the earliest step that may train it (again)
    trainer: str | None = None  # the trainer that leases it
    fence: int | None = None  # fencing number of the trainer that leases it, or evicted it
    step: int | None = None  # the step for which it is leased, or at which it was evicted
    error: str | None = None  # of a quarantined row

    @property
    def n_tokens(self) -> int:
        """Number of tokens in the tree."""
        return len(self.tree)

    def to_mongo(self) -> dict[str, Any]:
        """The document as MongoDB stores it."""
        return {**super().to_mongo(), **self.tree.pack()}

    @classmethod
    def from_mongo(cls, document: dict[str, Any]) -> Self:
        """The row as read from its collection. Raises `ValueError` if it is damaged."""
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
    """Raise ValueError if a column is stored under the name of another field of the row."""
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


class StoredLoad(SubDocument):
    """The load of an inference service, as a sampler saw it (`inference.protocol.ServiceLoad`)."""

    running: int  # requests
    waiting: int
    used_tokens: int  # of the KV cache
    total_tokens: int
    retractions: int
    at: datetime


class InferenceService(Document):
    """An inference service for samplers. `_id` is its URL."""

    url: str
    model: str
    weight_version: int  # -1: the weights it was started with
    capacity: int  # concurrent requests; 0: unknown
    heartbeat: datetime | None  # None: a service given by URL, which sends none
    memory: str = "held"  # state of its GPU memory: `inference.memory.MemoryState`
    load: StoredLoad | None = None  # the newest that was stored: `loads.py`


class SamplerLoad(Document):
    """The newest load of a sampler. `_id` is its owner's name."""

    sampling: int  # trajectories in progress
    limit: int  # and how many may be
    late_s: float  # by how much its event loop was late at most, in the time before
    cpu: float  # processor time of its process by time, 1: one core
    at: datetime


class DeviceUse(Document):
    """The time for which a process had its devices (`device_use.py`). `_id`: the process's name."""

    part: str  # trainer | service
    gpus: int
    cores: int  # of a process without a GPU
    in_turns: bool  # with the trainer, whose they are too
    began: datetime
    until: datetime


class PolicyVersion(Document):
    """One publication of weights. `_id` is the version."""

    version: int
    step: int
    path: str
    created_at: datetime
    served: bool = False  # all services that answered were updated to it


class TrainerStart(SubDocument):
    """The start of a trainer: `step` is the optimizer step of the checkpoint that it resumed."""

    fence: int
    step: int


class DataSet(SubDocument):
    """What a run learns from: task files and start model (by digest), and the agent's world.

    A new one begins with `--change_data`, or when the run begins again from its start weights.
    From then on, rows of earlier data sets are not trained, and earlier evaluations do not count.
    """

    fence: int = 0  # fencing number of the trainer that began it
    epoch: int = 0  # its first epoch of training tasks
    step: int = 0  # optimizer steps before it
    seed: int = 0  # of the order of its tasks
    train_file: str | None = None
    train_digest: str | None = None
    eval_file: str | None = None
    eval_digest: str | None = None
    model: str | None = None
    model_digest: str | None = None
    tools: str = "none"  # none | demo | given
    world: dict[str, str | None] = Field(default_factory=dict)  # flags that define the environment


class Evaluation(Document):
    """An evaluation by `agentrl eval`. Its Tasks have split `eval` and a negative `epoch`.

    What is evaluated anew is equal in all fields but these two and `created_at`.
    """

    epoch: int
    model: str  # its name in the report
    model_digest: str
    task_digest: str  # of the task file
    rollouts: int
    flags: dict[str, Any]  # by which its trajectories are made
    digests: dict[str, str] = Field(default_factory=dict)  # of the files among the flags
    created_at: datetime


class Run(Document):
    """The run: its trainer and its progress. `_id` is the run's name.

    `identity` distinguishes runs of the same name; the run's folder has the same identity. `flags`:
    of the last start, for processes that join. `digests`: of the files among the flags
    (`configs/run_flags.py`).
    """

    identity: str | None = None
    flags: dict[str, Any] | None = None
    digests: dict[str, str] = Field(default_factory=dict)
    data: list[DataSet] = Field(default_factory=list)  # in order of use; the last one is current
    status: str = "created"  # created | training | evaluating | sampling | finished | hopeless
    failure: str | None = None  # why it is hopeless, one sentence
    trainer: str | None = None
    trainer_host: str | None = None
    lease_expires: datetime | None = None
    fence: int = 0  # fencing number: each trainer that takes the run increments it
    starts: list[TrainerStart] = Field(default_factory=list)  # of all trainers, in order
    step: int = 0
    max_steps: int = 0
    rows_per_step: int = 0  # over all data-parallel ranks; samplers' staleness bound uses it
    version: int = -1
    n_groups: int = 0  # groups to sample, of a run without a trainer
    heartbeat: datetime | None = None


class Note(Document):
    """What a person wrote on a Record, in `agentrl view`. `_id` is the Record's."""

    text: str = ""
    labels: list[str] = Field(default_factory=list)
    changed_at: datetime
