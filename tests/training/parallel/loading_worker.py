"""A launched process that loads each model on each arrangement of its number of processes.

    accelerate launch --config_file assets/fsdp2_cpu.yml --num_processes N loading_worker.py MODELS

MODELS holds a folder for each model of `loaded_model`. Ends with an error if a process holds
something else than the folder, or if a part of a large model takes the memory of all of it.
"""

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `tiny`

import torch
import torch.distributed as dist
from accelerate import Accelerator
from parallel_cases import ARRANGEMENTS
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, Qwen3Config

from agentrl.configs import ComputeConfig, LoraConfig, ModelConfig, ParallelConfig
from agentrl.training.model.loading import empty_model, fill
from agentrl.training.model.lora import add_adapter
from agentrl.training.model.model_folder import load_model
from agentrl.training.model.prepare import prepare_model
from agentrl.training.model.weight_gathering import WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import Mesh, exit_process, make_mesh

# 55 MiB, of which no tensor has more than 2
LARGE = Qwen3Config(
    hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=4, head_dim=64, vocab_size=256,
)  # fmt: skip


def main(models: Path) -> None:
    accelerator = Accelerator(cpu=True)
    for config, cases in ARRANGEMENTS[accelerator.num_processes].values():
        mesh = make_mesh(accelerator, config)
        for case in cases:
            check_equal(models / case, mesh)
    dist.barrier()
    mesh = make_mesh(accelerator, ParallelConfig())
    check_adapter(models / "chains", mesh)
    check_memory(models / "large", mesh)
    dist.barrier()
    dist.destroy_process_group()


def check_equal(folder: Path, mesh: Mesh) -> None:
    """What was loaded in parts is what is loaded whole."""
    config = ModelConfig(model_name_or_path=str(folder))
    model = empty_model(config)
    prepare_model(model, mesh, ComputeConfig())
    fill(model, config, mesh, mesh.device)
    whole = dict(load_model(config).named_parameters())
    for name, weight in model.named_parameters():
        full = weight.full_tensor() if isinstance(weight, DTensor) else weight
        assert torch.equal(full, whole.pop(name)), f"{folder.name}: {name} on {mesh.sizes}"
    assert not whole, f"{folder.name}: {list(whole)} were not loaded"
    check_published(folder, model, mesh)


def check_published(folder: Path, model: PreTrainedModel, mesh: Mesh) -> None:
    """What services are sent is what the folder holds, by its names."""
    sent = WeightGatherer(model, written_form(model), torch.float32).stage().gather()
    assert bool(sent) == (dist.get_rank() == 0)
    files = list(folder.glob("*.safetensors")) if sent else []
    stored = {name: tensor for file in files for name, tensor in load_file(file).items()}
    if stored:
        assert sent.keys() == stored.keys(), f"{folder.name} on {mesh.sizes}"
    for name, tensor in stored.items():
        assert torch.equal(sent[name], tensor.float()), f"{folder.name}: {name} on {mesh.sizes}"


def check_adapter(folder: Path, mesh: Mesh) -> None:
    """An adapter starts the same on every process, with B = 0."""
    config = ModelConfig(model_name_or_path=str(folder))
    model = empty_model(config)
    add_adapter(model, LoraConfig(lora_rank=4), frozen_dtype=torch.bfloat16)
    prepare_model(model, mesh, ComputeConfig(bf16=True))
    torch.manual_seed(5)
    fill(model, config, mesh, mesh.device)
    drawn = [parameter for name, parameter in model.named_parameters() if "lora_A" in name]
    for parameter in drawn:
        whole = parameter.full_tensor()
        copies = [torch.empty_like(whole) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, whole.contiguous())
        assert whole.abs().sum() > 0
        assert all(torch.equal(copy, whole) for copy in copies)
    weights = dict(load_model(config).named_parameters())
    sent = WeightGatherer(model, written_form(model), torch.float32).stage().gather()
    for name, weight in sent.items():
        assert torch.equal(weight, weights[name].bfloat16().float()), name


def check_memory(folder: Path, mesh: Mesh) -> None:
    """Loading takes the memory of this process's part, and at no time of much more."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    config = ModelConfig(model_name_or_path=str(folder))
    model = empty_model(config)
    prepare_model(model, mesh, ComputeConfig())
    with PeakMemory() as peak:
        fill(model, config, mesh, mesh.device)
    part = size / dist.get_world_size()
    assert 0.9 * part < peak.grown < part + size / 8, f"{peak.grown} of {size} bytes"


class PeakMemory:
    """How much the process's own memory, files left out, has grown at the most."""

    def __enter__(self) -> "PeakMemory":
        self._start, self._peak, self._ended = self._held(), 0, threading.Event()
        self._watching = threading.Thread(target=self._watch)
        self._watching.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._watching.join()

    @property
    def grown(self) -> int:
        return self._peak - self._start

    def _watch(self) -> None:
        while not self._ended.wait(0.0005):
            self._peak = max(self._peak, self._held())
        self._peak = max(self._peak, self._held())

    def _held(self) -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    exit_process(0)
