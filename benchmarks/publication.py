"""Training that stands still while weights are published, and the memory of each process.

A random Qwen3 of 133 million parameters is trained in bfloat16 by two processes (FSDP2 over gloo)
and published to a local engine in a process of its own, over a real ledger, by each way of
`--weight_update` in turn. For each way:

    stands_still_s           from the end of a step until the next one may begin, and the wait of
                             the optimizer for the copy of the weights
    stands_still_s_per_gb    the same for a gigabyte of published weights
    held_s_per_gb            the same if training is held until rank 0 has all weights
    held_ratio               the held one over the other, the median of the rounds' ratios
    reaches_services_s       from the end of the step until the service has the weights, while
                             nothing else is computed
    peak_mb                  by process: how far a publication raises its memory above what it had

The median of rounds; ways and arrangements take turns, so that what else the machine does meets all
alike.

    python benchmarks/publication.py [--quick] [--save]

The last line is a JSON object.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from engine_process import engine_process, random_model
from report import finish, parse_flags
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from agentrl.configs import (
    ComputeConfig,
    LearnerConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)
from agentrl.databases.connection import RunDatabase, connect
from agentrl.databases.documents import DBRecordData
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.policies import Lineage
from agentrl.databases.services import SILENT_S, register_urls
from agentrl.databases.token_tree import TokenTree
from agentrl.inference.engine import EngineConfig
from agentrl.inference.weights.ways import make_updater
from agentrl.training.background import BackgroundLoop
from agentrl.training.data.sequences import row_sequences
from agentrl.training.model.loading import empty_model
from agentrl.training.model.model_folder import load_tokenizer
from agentrl.training.model.weight_gathering import WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.run.publication import Publisher, make_publication
from agentrl.training.step.learner import Learner

WAYS = ("disk", "distributed", "tensor")
PROCESSES = 2
VOCABULARY = 32_000
CPU = torch.device("cpu")
LAUNCH = Path(__file__).parents[1] / "assets" / "fsdp2_cpu.yml"


class Rank:
    """One process of a trainer: its learner, and on rank 0 a publisher for each way."""

    def __init__(self, model: Path, url: str, engine: str, output: Path) -> None:
        mesh = make_mesh(Accelerator(cpu=True))
        config = LearnerConfig(
            ComputeConfig(bf16=True, micro_batch_tokens=512, gradient_checkpointing=True),
            LossConfig(loss_calculator="GRPO", token_level_loss=True),
            OptimizerConfig(learning_rate=1e-5),
            model=ModelConfig(model_name_or_path=str(model)),
        )
        empty = empty_model(config.model)
        self._form, self._tokenizer = written_form(empty), load_tokenizer(str(model))
        self.learner = Learner(empty, mesh, config, total_steps=1000)
        self._gatherer = WeightGatherer(
            self.learner.model, self._form, torch.bfloat16, self.learner.optimizer
        )
        self._output = output
        self._version = -1
        self._background: BackgroundLoop | None = None
        self._publishing: Future[float] | None = None
        if dist.get_rank() == 0:
            self._background = BackgroundLoop().__enter__()
            database = self._background.run(_database(url, engine))
            self._publishers = {
                way: Publisher(
                    database, output, SILENT_S, make_updater(way, CPU), "retract", hold=_ours
                )
                for way in WAYS
            }

    def begin(self, way: str, *, held: bool = False) -> None:
        """What the trainer does between two steps. `held`: until rank 0 has all weights."""
        self._version += 1
        staged = self._gatherer.stage()
        if held:
            staged.gather()
            dist.barrier()
        if self._background is not None:
            publication = make_publication(
                self._output, self._version, self._version, staged, self._form,
                self._tokenizer, torch.bfloat16,
            )  # fmt: skip
            self._publishing = self._background.submit(self._publishers[way].publish(publication))

    def finish(self) -> None:
        """Wait until the service has the weights, and the disk."""
        if self._publishing is not None:
            self._publishing.result()
            assert self._background is not None
            for publisher in self._publishers.values():
                self._background.run(publisher._finish_writing())
        self._publishing = None
        dist.barrier()

    def waited(self) -> float:
        """Seconds that the optimizer has waited for the last publication."""
        return self._gatherer.waited_seconds()

    def step(self) -> None:
        """An optimizer step on one short row of this process."""
        self.learner.step([_row(dist.get_rank())])


async def _database(url: str, engine: str) -> RunDatabase:
    database = await connect(url, "publication")
    await register_urls(database, [engine])
    return database


async def _ours() -> None:
    """Nobody else takes the run."""


def _row(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (256,), generator=generator).tolist()
    tree = TokenTree.line(
        ids, mask=[0] * 128 + [1] * 128, advantages=1.0, logprobs=[-10.0] * 256, versions=0
    )
    row = DBRecordData(
        id=f"row-{seed}", task="task", group_order=seed, reward=0.0, n_train_tokens=128, cost=256.0,
        policy_versions=[0], temperature=1.0, tree=tree, prefix_hash="prefix",
    )  # fmt: skip
    return row_sequences(row, Lineage({0: 0}), 0)


def measure(rank: Rank, rounds: int) -> dict[str, dict[str, list[float]]]:
    """By way: seconds of each round, and this process's peak in MB."""
    rank.step()  # the optimizer has its state from here on
    found: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for number in range(rounds + 1):
        for way in WAYS:
            seconds: dict[str, float] = {}
            gc.collect()
            dist.barrier()
            rise = _Rise()
            began = time.monotonic()
            rank.begin(way)
            rank.finish()
            seconds["reaches_services_s"] = time.monotonic() - began
            seconds["peak_mb"] = rise.megabytes()
            for name, held in (("stands_still_s", False), ("held_s", True)):
                dist.barrier()
                began = time.monotonic()
                rank.begin(way, held=held)
                seconds[name] = time.monotonic() - began
                rank.step()
                seconds[name] += rank.waited()
                rank.finish()
            if number:  # in the first round groups meet and services are checked
                for name, value in seconds.items():
                    found[way].setdefault(name, []).append(value)
            if dist.get_rank() == 0:
                print(number, way, {k: round(v, 3) for k, v in seconds.items()}, flush=True)
    return found


class _Rise:
    """How far this process's memory rises from now on, as the kernel counts it."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def megabytes(self) -> float:
        return (_status("VmHWM") - self._before) / 1e6


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024


def run_rank(folder: Path) -> None:
    """One process: measure, and write what was found."""
    torch.set_num_threads(1)
    given = json.loads((folder / "given.json").read_text())
    rank = Rank(folder / "model", given["url"], given["engine"], folder / "output")
    found = measure(rank, given["rounds"])
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()


def write_model(folder: Path, *, small: bool) -> int:
    """A random model with a tokenizer. Returns its bytes as published."""
    model = random_model(
        folder,
        hidden_size=384 if small else 1024,
        intermediate_size=1024 if small else 3072,
        num_hidden_layers=4 if small else 8,
        num_attention_heads=6 if small else 16,
        num_key_value_heads=2 if small else 8,
        head_dim=64,
        vocab_size=VOCABULARY,
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"w": 0}, unk_token="w")), unk_token="w"
    )
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(folder)
    return 2 * sum(parameter.numel() for parameter in model.parameters())


def summary(folder: Path, published: int) -> dict[str, dict[str, Any]]:
    """By way: medians of the rounds; the peak of each process."""
    ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(PROCESSES)]
    result: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        rounds = {
            name: [max(each) for each in zip(*(rank[way][name] for rank in ranks), strict=True)]
            for name in ("stands_still_s", "held_s")
        }
        still, held = (statistics.median(seconds) for seconds in rounds.values())
        ratios = [b / a for a, b in zip(rounds["stands_still_s"], rounds["held_s"], strict=True)]
        result[way] = {
            "stands_still_s": round(still, 3),
            "stands_still_s_per_gb": round(still * 1e9 / published, 2),
            "held_s_per_gb": round(held * 1e9 / published, 2),
            "held_ratio": round(statistics.median(ratios), 1),
            "reaches_services_s": round(statistics.median(ranks[0][way]["reaches_services_s"]), 2),
            "peak_mb": [round(statistics.median(rank[way]["peak_mb"])) for rank in ranks],
        }
    return result


def main() -> None:
    args = parse_flags(__doc__)
    rounds = 1 if args.quick else 5
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        published = write_model(folder / "model", small=args.quick)
        with (
            EmbeddedMongod(folder / "data", folder / "log") as mongod,
            engine_process(EngineConfig(folder / "model", num_threads=1)) as engine,
        ):
            given = {"url": mongod.url, "engine": engine.url, "rounds": rounds}
            (folder / "given.json").write_text(json.dumps(given))
            subprocess.run(
                [
                    sys.executable, "-m", "accelerate.commands.launch", "--config_file",
                    str(LAUNCH), "--num_processes", str(PROCESSES), "--main_process_port", "0",
                    __file__, "--rank", str(folder),
                ],
                check=True,
                env={
                    **os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"
                },
            )  # fmt: skip
        ways = summary(folder, published)
    result: dict[str, Any] = {
        "ways": ways, "published_mb": round(published / 1e6), "rounds": rounds
    }  # fmt: skip
    finish("publication", result, ("torch", "transformers"), save=args.save)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]))
        exit_process(0)
    main()
