"""`agentrl memory`: estimates the memory of a step for each process, with `memory_model`.

It reads the model's config and the run's flags, without weights or a GPU.
"""

from collections.abc import Iterable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import PreTrainedModel

from agentrl.configs import Config
from agentrl.configs.hub import with_models_here
from agentrl.configs.parsing import config_of, layers_given, merged
from agentrl.configs.verbs import memory_parser
from agentrl.training.model.loading import empty_model
from agentrl.training.model.lora import add_adapter
from agentrl.training.model.memory_model import (
    MemorySetup,
    ModelShape,
    estimate,
    longest_line,
)
from agentrl.training.model.text_sizes import TextSizes
from agentrl.training.parallel import ParallelSizes, transformer_layers

_GIB = 2**30


def main(argv: Sequence[str]) -> int:
    """Print the estimate; exit status 1 if it does not fit `--device_gib`."""
    given = memory_parser().parse(argv)
    arguments = given.own
    values = merged(layers_given(given.values, given.files))
    config = config_of(with_models_here(values))
    shape, setup = shape_of(described_model(config)), setup_of(config, arguments.processes)
    console = Console()
    console.print(_table(shape, setup))
    if arguments.device_gib is None:
        return 0
    limit = int(arguments.device_gib * _GIB)
    longest = longest_line(shape, setup, limit)
    fits = longest >= setup.tokens
    console.print(
        f"{'fits' if fits else 'does not fit'} in {arguments.device_gib:g} GiB: the longest "
        f"--micro_batch_tokens that would is {longest:,}"
        if longest
        else f"does not fit in {arguments.device_gib:g} GiB, however short a micro-batch is"
    )
    return 0 if fits else 1


def shape_of(model: PreTrainedModel) -> ModelShape:
    """The sizes of a model, which may be empty. With an adapter only its weights are trained."""
    sizes, layers = TextSizes.of(model.config), transformer_layers(model)
    first = layers[0]
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    layer = list(first.parameters())
    root = [parameter for parameter in model.parameters() if parameter not in inside]
    experts = sum(p.numel() for name, p in first.named_parameters() if "experts." in name)
    return ModelShape(
        hidden=sizes.hidden,
        layers=len(layers),
        query=sizes.heads * sizes.head_dim,
        key=sizes.key_heads * sizes.head_dim,
        intermediate=(sizes.expert if experts else 0) or sizes.feed_forward,
        vocabulary=sizes.vocabulary,
        layer_parameters=_count(layer),
        root_parameters=_count(root),
        layer_trained=_count(p for p in layer if p.requires_grad),
        root_trained=_count(p for p in root if p.requires_grad),
        expert_parameters=experts,
        experts_per_token=sizes.experts_per_token if experts else 1,
        query_key_norm=any(name.endswith("q_norm") for name, _ in first.named_modules()),
    )


def setup_of(config: Config, processes: int) -> MemorySetup:
    """The setup of a run with these flags on `processes` processes. Raises `ConfigError`."""
    sizes = ParallelSizes.of(config.parallel, processes)
    return MemorySetup(
        tokens=config.micro_batch_tokens,
        chunk=config.compute.loss_seq_chunk_size,
        fsdp=sizes.fsdp,
        tp=sizes.tp,
        cp=sizes.cp,
        ep=sizes.ep,
        gathers_keys=config.parallel.cp_mode == "allgather",
        entropy=config.loss.log_entropy or config.loss.entropy_coef > 0,
        bf16=config.compute.bf16,
        fp32_head=config.compute.fp32_head,
        checkpointing=config.compute.gradient_checkpointing,
        activation_offloading=config.compute.activation_offloading,
        param_offload=config.compute.param_offload,
    )


def described_model(config: Config) -> PreTrainedModel:
    """The run's model without memory, with its adapter. Raises `ConfigError`."""
    model = empty_model(config.model)
    if config.lora.lora_rank:
        add_adapter(model, config.lora, frozen_dtype=torch.float32)
    return model


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _table(shape: ModelShape, setup: MemorySetup) -> Table:
    found = estimate(shape, setup)
    table = Table(
        title=f"{shape.parameters / 1e9:.2f}B parameters, micro-batches of {setup.tokens:,} tokens",
        title_justify="left",
    )
    table.add_column("one process")
    table.add_column("GiB", justify="right")
    table.add_column("less of it by")
    rows = (
        ("weights", found.weights, "more processes, --param_offload"),
        ("gradients", found.gradients, "more processes, --lora_rank, --param_offload"),
        ("optimizer", found.optimizer, "more processes, --lora_rank, --param_offload"),
        ("gathered weights", found.gathered, "--bf16, --tp_size"),
        (
            "saved activations", found.saved,
            "--gradient_checkpointing, --cp_size, --activation_offloading, --micro_batch_tokens",
        ),
        ("one layer's backward", found.recomputed, "--cp_size, --tp_size, --micro_batch_tokens"),
        ("or a chunk of logits", found.logits, "--loss_seq_chunk_size, --tp_size"),
    )  # fmt: skip
    for name, size, remedy in rows:
        table.add_row(name, f"{size / _GIB:.2f}", remedy)
    table.add_section()
    table.add_row("peak on the device", f"{found.peak / _GIB:.2f}", "")
    table.add_row("offloaded to the host", f"{found.host / _GIB:.2f}", "")
    return table
