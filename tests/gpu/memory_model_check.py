"""The memory model against the truth: peaks of real steps, by each way of saving memory."""

import torch
from dtensor_bench import random_model
from machine import Figures, Machine, require
from on_device import device_of, mesh_of
from peak_memory import MemoryWatch, expected_peak, step_peak
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from agentrl.training.model.memory_model import MemorySetup

_GIB = 2**30
_WITHIN = 0.2  # of the measured peak, as on CPUs (docs/reference/memory.md)
_TOKENS = 8192
_ON_GPU = {
    "bf16": MemorySetup(_TOKENS, bf16=True),
    "entropy": MemorySetup(_TOKENS, bf16=True, checkpointing=True, entropy=True),
    "checkpointing": MemorySetup(_TOKENS, bf16=True, checkpointing=True),
    "activation_offloading": MemorySetup(_TOKENS, bf16=True, activation_offloading=True),
    "param_offload": MemorySetup(_TOKENS, bf16=True, checkpointing=True, param_offload=True),
    "float32": MemorySetup(_TOKENS, checkpointing=True),
}
_STAND_IN = {
    "float32": MemorySetup(768, chunk=256),
    "checkpointing": MemorySetup(1024, chunk=256, checkpointing=True),
}


def peaks(machine: Machine, figures: Figures) -> None:
    """GiB measured and expected in each case; all that are too far apart are named."""
    mesh = mesh_of(machine)
    wrong: list[str] = []
    for name, setup in (_ON_GPU if machine.on_gpu else _STAND_IN).items():
        watch = MemoryWatch(mesh.device)
        with device_of(machine):
            model = _model(machine)
        expected = expected_peak(model, setup)
        try:
            measured = step_peak(watch, model, mesh, setup)
        except RuntimeError as error:  # also when memory does not suffice
            wrong.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        finally:
            del model
        figures.add(**{
            f"{name}_gib": round(measured / _GIB, 3),
            f"{name}_expected_gib": round(expected / _GIB, 3),
        })  # fmt: skip
        if not abs(expected - measured) <= _WITHIN * measured:
            wrong.append(f"{name}: the model is {expected / measured - 1:+.0%} off")
    if machine.on_gpu:
        figures.add(reserved_gib=round(torch.cuda.max_memory_reserved() / _GIB, 3))
    require(not wrong, "; ".join(wrong))


def _model(machine: Machine) -> PreTrainedModel:
    """0.6B parameters; in the stand-in 10M, so that weights weigh something beside Python."""
    if machine.on_gpu:
        return random_model(experts=False, large=True)
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=8192,
            tie_word_embeddings=True,
        )
    )
