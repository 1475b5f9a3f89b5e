"""The trainer's step on every arrangement of N processes: is it the same, and how fast is it.

    python tests/dtensor_bench.py --world-size N [--warmup K] [--steps S] [--experts] [--only NAME]

N processes are launched as the trainer's are, on the GPUs if there are as many, else on the CPUs
(gloo). Each arrangement (data, HSDP, tensor, context in both modes, experts, and three of them at
once) takes the same steps from the same weights on the same rows: groups of siblings with a common
prompt, branching records, plain ones. Printed as they come: loss and gradient norm of the first
step, seconds of a step, tokens trained a second, model FLOP utilisation where the peak of the
device is known, and the peak memory of a process. The last line is a JSON object with all of it,
and the largest relative difference of loss and norm between arrangements, which must stay below
`--tolerance`. A random Qwen3 (with `--experts` Qwen3-MoE): 2M parameters on CPUs, 0.6B on GPUs.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from agentrl.configs import (
    ComputeConfig,
    ConfigError,
    LearnerConfig,
    OptimizerConfig,
    ParallelConfig,
)
from agentrl.databases.token_tree import TokenTree
from agentrl.training.attention import TreeLayout
from agentrl.training.data.flops import FlopsModel, peak_flops
from agentrl.training.data.forest import merge
from agentrl.training.data.planner import assign_rows
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.parallel import Mesh, exit_process, make_mesh
from agentrl.training.step.learner import Learner

ASSETS = Path(__file__).parents[1] / "assets"

Row = list[TrainingSequence]


def arrangements(processes: int, *, experts: bool) -> dict[str, ParallelConfig]:
    """Names and flags of what so many processes can be arranged as, plain data-parallel first."""
    found = {"data": ParallelConfig()}
    if processes > 1:
        found |= {
            "replicate": ParallelConfig(dp_replicate_size=processes),
            "tensor": ParallelConfig(tp_size=min(processes, 2)),
            "ulysses": ParallelConfig(cp_size=min(processes, 4)),
            "allgather": ParallelConfig(cp_size=processes, cp_mode="allgather"),
        }
        if experts:
            found["experts"] = ParallelConfig(ep_size=min(processes, 8))
    if processes >= 4 and processes % 4 == 0:
        found["data x ulysses x tensor"] = ParallelConfig(cp_size=2, tp_size=2)
        if experts:
            found["data x ulysses x tensor, experts"] = ParallelConfig(
                cp_size=2, tp_size=2, ep_size=4
            )
    return found


def random_model(
    *, experts: bool, large: bool, seed: int = 0, tied: bool = True
) -> PreTrainedModel:
    """The same weights in every process. `tied`: without experts the head is the embedding too."""
    torch.manual_seed(seed)
    sizes = (
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
         "vocab_size": 151_936}
        if large
        else {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
              "vocab_size": 2048}
    )  # fmt: skip
    if not experts:
        config = Qwen3Config(**sizes, tie_word_embeddings=tied)
    else:
        inner = sizes["intermediate_size"] // 4
        config = Qwen3MoeConfig(
            **sizes, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=inner
        )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def make_rows(vocabulary: int, unit: int) -> list[Row]:
    """Four groups of four siblings, four branching records, four plain ones; in units of tokens."""
    random = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return random.integers(2, vocabulary, length, dtype=np.int32)

    def sequence(prefix: np.ndarray, length: int, row_tokens: int) -> TrainingSequence:
        tokens = np.concatenate([prefix, ids(length)])
        line = TokenTree.line(
            tokens,
            mask=np.arange(len(tokens)) >= len(prefix),
            advantages=random.normal(),
            logprobs=-np.log(vocabulary),
        )
        return TrainingSequence(line, temperature=1.0, row_tokens=row_tokens)

    rows: list[Row] = []
    for _ in range(4):
        prompt = ids(4 * unit)
        rows += [[sequence(prompt, 2 * unit, 2 * unit)] for _ in range(4)]
    for _ in range(4):
        context = ids(3 * unit)
        rows.append([sequence(context, unit, 3 * unit) for _ in range(3)])
        rows.append([sequence(ids(unit), 5 * unit, 5 * unit)])
    return rows


@dataclass(frozen=True)
class Work:
    """What a step computes: `tokens` as rows have them, the rest with each shared token once."""

    tokens: int
    distinct: int
    pairs: int
    predictions: int

    def mfu(self, costs: FlopsModel, seconds: float, peak: float) -> float:
        """Model FLOPs utilisation of a step of that time."""
        return costs.mfu(self.distinct, self.pairs, self.predictions, seconds, peak)


def work_of(rows: list[Row]) -> Work:
    """The work of a step on the rows."""
    sequences = [sequence for row in rows for sequence in row]
    forest = merge([sequence.inputs for sequence in sequences])
    layout = TreeLayout(forest.tree.parents, forest.tree.lengths)
    predictions = sum(len(sequence.trained) for sequence in sequences)
    tokens = sum(len(sequence) for sequence in sequences)
    return Work(tokens, layout.n_tokens, layout.pairs, predictions)


def measure(mesh: Mesh, arguments: argparse.Namespace) -> dict[str, float | None]:
    """Steps of one arrangement. Collective."""
    on_gpu = mesh.device.type == "cuda"
    model = random_model(experts=arguments.experts, large=on_gpu)
    costs = FlopsModel.of(model)
    rows = make_rows(model.config.vocab_size, 256 if on_gpu else 24)
    work = work_of(rows)
    compute = ComputeConfig(bf16=on_gpu, micro_batch_tokens=len(rows) * (256 if on_gpu else 24))
    config = LearnerConfig(compute, optimizer=OptimizerConfig(learning_rate=1e-4))
    learner = Learner(model, mesh, config, 1000)
    lengths = [float(sum(map(len, row))) for row in rows]
    mine = [rows[index] for index in assign_rows(lengths, mesh.dp_size)[mesh.dp_rank]]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times, first = [], None
    for _ in range(arguments.warmup + arguments.steps):
        dist.barrier()
        began = time.perf_counter()
        taken = learner.step(mine)
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - began)
        first = first or taken
    assert first is not None
    seconds = statistics.median(times[arguments.warmup :])
    peak = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
    memory = torch.cuda.max_memory_allocated() if on_gpu else _resident_bytes()
    return {
        "loss": first.loss,
        "grad_norm": first.grad_norm,
        "seconds": round(seconds, 4),
        "tokens_per_s": round(work.tokens / seconds, 1),
        "mfu": round(work.mfu(costs, seconds, mesh.sizes.processes * peak), 4) if peak else None,
        "peak_memory_mib": round(memory / 2**20),
    }


def _resident_bytes() -> int:
    """Of this process so far: on CPUs arrangements that come later cannot show less."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def take_part(out: Path, arguments: argparse.Namespace) -> None:
    """A launched process: all arrangements, one after the other."""
    accelerator = Accelerator(cpu=torch.cuda.device_count() < arguments.world_size)
    results: dict[str, dict[str, float | None]] = {}
    for name, config in arrangements(arguments.world_size, experts=arguments.experts).items():
        if arguments.only and name not in arguments.only:
            continue
        try:
            results[name] = measure(make_mesh(accelerator, config), arguments)
        except ConfigError as error:  # on every process, before anything is computed
            if accelerator.is_main_process:
                print(f"{name}: left out, {error}", flush=True)
            continue
        if accelerator.is_main_process:
            print(f"{name}: {json.dumps(results[name])}", flush=True)
    if accelerator.is_main_process:
        out.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def launch(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What the processes measured."""
    on_gpu = torch.cuda.device_count() >= arguments.world_size
    config = ASSETS / ("fsdp2_dst.yml" if on_gpu else "fsdp2_cpu.yml")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        subprocess.run(
            [
                sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
                "--num_processes", str(arguments.world_size), "--main_process_port", "0",
                str(Path(__file__)), *sys.argv[1:], "--out", str(out),
            ],
            env={"OMP_NUM_THREADS": "1", **os.environ}, check=True,
        )  # fmt: skip
        results: dict[str, dict[str, float]] = json.loads(out.read_text())
    return results


def difference(results: dict[str, dict[str, float]]) -> float:
    """The largest relative difference of loss and norm from those of the first arrangement."""
    first, *others = results.values()
    return max(
        (abs(other[key] - first[key]) / abs(first[key])
         for other in others for key in ("loss", "grad_norm")),
        default=0.0,
    )  # fmt: skip


def main() -> None:
    """Launch, or be launched."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", type=int, required=True, help="processes")
    parser.add_argument("--warmup", type=int, default=1, help="steps that are not timed")
    parser.add_argument("--steps", type=int, default=3, help="steps that are timed")
    parser.add_argument("--experts", action="store_true", help="Qwen3-MoE instead of Qwen3")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="these arrangements (default: all)"
    )
    parser.add_argument("--tolerance", type=float, help="default 1e-4, on GPUs (bf16) 2e-2")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # for launched processes
    arguments = parser.parse_args()
    if arguments.out is not None:
        take_part(arguments.out, arguments)
        exit_process(0)
    results = launch(arguments)
    on_gpu = torch.cuda.device_count() >= arguments.world_size
    largest = difference(results)
    device = torch.cuda.get_device_name() if on_gpu else "cpu"
    print(
        json.dumps(
            {
                "benchmark": "dtensor",
                "world_size": arguments.world_size,
                "device": device,
                "largest_difference": largest,
                "arrangements": results,
            }
        )
    )
    tolerance = arguments.tolerance or (2e-2 if on_gpu else 1e-4)
    if not largest <= tolerance:
        sys.exit(f"dtensor_bench: arrangements differ by {largest:.2g}, more than {tolerance:g}")


if __name__ == "__main__":
    main()
