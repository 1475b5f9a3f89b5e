"""Whole optimizer steps on trees against the same steps on their branches, on one CPU thread.

A random Qwen3 of 12.6 million parameters. Four workloads:

    group     8 siblings on a prompt of 512 tokens, each 6 turns of 128 generated and 128 observed
    short     8 siblings of 256 generated tokens on a prompt of 1,024
    segments  one record of 4 segments, 128 generated tokens each, that share 512
    bushy     one tree of depth 3 with 18 leaves, as bushy as published agent trees are

Each is trained three ways by the trainer's own step: one sequence per turn (its loss on that turn),
one sequence per record (per leaf of a tree), and as a tree; the first two with transformers'
attention on lines of one length. Operations are counted exactly (`FlopsModel`: matrices, pairs of
query and key, head), and the speed-up is held against their reduction: `fraction_of_bound` is the
smallest quotient of the two. Also the peak memory of `group`: rows two by two, the tree at once,
and the tree in parts behind its prompt. All ways give the same gradient norm, which is asserted.

    python benchmarks/prefix_merge.py [--quick] [--save]

Rounds of all ways are interleaved; the last line is a JSON object with the medians. `--quick` takes
an eighth of every length, where calls cost more than operations: its figures are no claim.
"""

import multiprocessing
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from clock import clock
from report import finish, parse_flags
from torch.optim import Optimizer
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, OptimizerConfig
from agentrl.databases.token_tree import TokenTree
from agentrl.training.attention import TreeLayout
from agentrl.training.data.flops import FlopsModel
from agentrl.training.data.forest import merge
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.prepare import prepare_model
from agentrl.training.parallel import Mesh, exit_process, make_mesh
from agentrl.training.step.objective import Objective
from agentrl.training.step.optimizer import make_optimizer, make_scheduler
from agentrl.training.step.train_step import train_step

VOCABULARY = 8192
WAYS = ("per_turn", "per_record", "tree")
# Tokens of a pass, whichever way they stand. Small passes are the faster ones on a CPU.
BUDGET = 2048

Rows = list[list[TrainingSequence]]


@dataclass(frozen=True)
class Workload:
    """The same trained tokens in sequences of two kinds, by row."""

    name: str
    per_turn: Rows
    per_record: Rows  # a tree is these, merged


@dataclass(frozen=True)
class Piece:
    """A run of tokens. Paths that contain the same piece share it."""

    name: int
    length: int
    generated: bool


@dataclass(frozen=True)
class Work:
    """The tokens and operations of one way."""

    tokens: int
    operations: float


def make_workload(
    name: str, paths: Sequence[Sequence[Piece]], rows: Sequence[int], scale: float
) -> Workload:
    """`paths`: pieces from root to leaf; `rows`: of each path, its row.

    A generated piece is trained in the first path that has it.
    """
    generator = np.random.default_rng(0)
    tokens = {
        piece.name: generator.integers(2, VOCABULARY, max(4, int(piece.length * scale)))
        for path in paths
        for piece in path
    }
    totals: dict[int, int] = {}
    turns: list[tuple[int, list[int]]] = []  # row, and the names of the pieces, the last trained
    leaves: list[tuple[int, list[int], set[int]]] = []  # and the names of those trained
    seen: set[int] = set()
    for path, row in zip(paths, rows, strict=True):
        names = [piece.name for piece in path]
        new = {piece.name for piece in path if piece.generated} - seen
        seen |= new
        totals[row] = totals.get(row, 0) + sum(len(tokens[piece]) for piece in new)
        turns += [(row, names[: place + 1]) for place, piece in enumerate(names) if piece in new]
        leaves.append((row, names, new))

    def sequence(row: int, names: list[int], trained: set[int]) -> TrainingSequence:
        ids = np.concatenate([tokens[piece] for piece in names])
        masks = [np.full(len(tokens[piece]), piece in trained) for piece in names]
        return make_sequence(ids, np.concatenate(masks), totals[row])

    by_row: tuple[Rows, Rows] = ([[] for _ in totals], [[] for _ in totals])
    for row, names in turns:
        by_row[0][row].append(sequence(row, names, {names[-1]}))
    for row, names, new in leaves:
        by_row[1][row].append(sequence(row, names, new))
    return Workload(name, *by_row)


def make_sequence(ids: np.ndarray, trained: np.ndarray, row_tokens: int) -> TrainingSequence:
    """A sequence whose advantages follow from its tokens."""
    tokens = TokenTree.line(
        ids, mask=trained, advantages=np.where(ids % 2, 1.0, -0.5), logprobs=-9.0
    )
    return TrainingSequence(tokens, temperature=1.0, row_tokens=row_tokens)


def workloads(scale: float) -> list[Workload]:
    """All four; `scale` shortens them."""
    group = [
        [Piece(0, 512, False)]
        + [Piece(1 + row * 12 + step, 128, step % 2 == 0) for step in range(12)]
        for row in range(8)
    ]
    short = [[Piece(0, 1024, False), Piece(1 + row, 256, True)] for row in range(8)]
    segments = [[Piece(0, 512, False), Piece(1 + branch, 128, True)] for branch in range(4)]
    bushy = [
        [
            Piece(0, 768, False),
            Piece(1 + branch, 128, True),
            Piece(100 + branch * 6 + leaf, 48, True),
        ]
        for branch in range(3)
        for leaf in range(6)
    ]
    return [
        make_workload("group", group, range(8), scale),
        make_workload("short", short, range(8), scale),
        make_workload("segments", segments, [0] * 4, scale),
        make_workload("bushy", bushy, [0] * 18, scale),
    ]


def work_of(rows: Rows, costs: FlopsModel, *, tree: bool) -> Work:
    """Tokens and operations of `rows`, exactly."""
    lines = [one.inputs for row in rows for one in row]
    predictions = sum(len(one.trained) for row in rows for one in row)
    if tree:
        forest = merge(lines)
        layouts = [TreeLayout(forest.tree.parents, forest.tree.lengths)]
    else:
        layouts = [TreeLayout([-1], [len(line)]) for line in lines]
    tokens = sum(layout.n_tokens for layout in layouts)
    pairs = sum(layout.pairs for layout in layouts)
    return Work(tokens, costs.total(tokens, pairs, predictions))


def make_model() -> PreTrainedModel:
    """12.6 million parameters, 3.1 of them in the tied embedding."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


class Trainer:
    """A model with its optimizer, and the step as the trainer makes it."""

    def __init__(self, mesh: Mesh, *, trees: bool) -> None:
        self._mesh = mesh
        self.model = make_model()
        prepare_model(self.model, mesh, ComputeConfig(), trees=trees)
        # the weights stay: each round does the same work, and all ways have the same gradient
        config = OptimizerConfig(learning_rate=0.0)
        self._optimizer: Optimizer = make_optimizer(self.model, config)
        self._scheduler = make_scheduler(self._optimizer, config, 1000)
        self._objective = Objective(LossConfig())

    def step(self, rows: Rows, budget: int) -> tuple[float, float]:
        """Seconds of a whole step, and its gradient norm."""
        config = LearnerConfig(ComputeConfig(micro_batch_tokens=budget))
        began = clock()
        result = train_step(
            self.model, self._optimizer, self._scheduler, rows, self._objective, config, self._mesh
        )
        return clock() - began, result.grad_norm


def measure(workload: Workload, trainers: dict[str, Trainer], rounds: int) -> dict[str, object]:
    """Medians of interleaved rounds, and bounds by operations."""
    rows = {
        "per_turn": workload.per_turn,
        "per_record": workload.per_record,
        "tree": workload.per_record,
    }
    costs = FlopsModel.of(trainers["tree"].model)
    work = {way: work_of(rows[way], costs, tree=way == "tree") for way in WAYS}
    # where a record has one turn the first two ways are one
    ways = [way for way in WAYS if way != "per_turn" or work[way] != work["per_record"]]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    norms: dict[str, float] = {}
    for turn in range(rounds):
        for way in ways:
            taken, norms[way] = trainers[way].step(rows[way], BUDGET)
            seconds[way].append(taken)
            print(f"{workload.name}, round {turn + 1}: {way} {taken:.2f} s", flush=True)
    for way in ways:
        assert abs(norms[way] / norms["tree"] - 1) < 1e-3, (workload.name, norms)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    result: dict[str, object] = {}
    for way in ways:
        result[way] = {
            "tokens": work[way].tokens,
            "operations": work[way].operations,
            "seconds": round(medians[way], 3),
        }
        if way != "tree":
            bound = work[way].operations / work["tree"].operations
            speedup = medians[way] / medians["tree"]
            result[f"over_{way}"] = {
                "bound_by_tokens": round(work[way].tokens / work["tree"].tokens, 3),
                "bound": round(bound, 3),
                "speedup": round(speedup, 3),
                "fraction_of_bound": round(speedup / bound, 3),
            }
    return result


def peak_memory(budgets: dict[str, int], scale: float) -> dict[str, int]:
    """MiB that a step of `group` adds at its peak, each in a process of its own."""
    # otherwise the allocator keeps what is freed, and peaks are hidden in what it keeps
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1048576"
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for name, budget in budgets.items():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_measure_peak, args=(name, budget, scale, sender))
        process.start()
        sender.close()
        peaks[name] = receiver.recv()
        process.join()
        print(f"peak memory, {name}: {peaks[name]} MiB", flush=True)
    return peaks


def _measure_peak(name: str, budget: int, scale: float, sender: Connection) -> None:
    torch.set_num_threads(1)
    rows = workloads(scale)[0].per_record
    trainer = Trainer(make_mesh(Accelerator(cpu=True)), trees=name != "rows")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _peak_mib()
    trainer.step(rows, budget)
    sender.send(_peak_mib() - before)
    sender.close()
    exit_process(0)


def _peak_mib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) // 1024


def main() -> None:
    """Measure and print."""
    flags = parse_flags(__doc__ or "")
    scale, rounds = (0.125, 1) if flags.quick else (1.0, 3)
    torch.set_num_threads(1)
    mesh = make_mesh(Accelerator(cpu=True))
    plain, tree = Trainer(mesh, trees=False), Trainer(mesh, trees=True)
    trainers = {"per_turn": plain, "per_record": plain, "tree": tree}
    loads = workloads(scale)
    for trainer in (plain, tree):  # the first step allocates
        trainer.step(loads[2].per_record, BUDGET)
    results = {load.name: measure(load, trainers, rounds) for load in loads}
    comparisons = {
        f"{name}/{key}": value
        for name, result in results.items()
        for key, value in result.items()
        if key.startswith("over_")
    }
    for name, figures in comparisons.items():
        print(f"{name}: {figures}")
    peaks = peak_memory({"rows": 4096, "tree": 1 << 20, "parts": 4096}, scale)
    finish(
        "prefix_merge",
        {
            "fraction_of_bound": min(
                figures["fraction_of_bound"] for figures in comparisons.values()
            ),
            "bushy_speedup": comparisons["bushy/over_per_record"]["speedup"],
            "workloads": results,
            "peak_mib": peaks,
        },
        ("torch", "transformers"),
        save=flags.save,
    )
    exit_process(0)


if __name__ == "__main__":
    main()
