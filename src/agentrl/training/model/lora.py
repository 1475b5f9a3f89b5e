"""Low-rank adapters (LoRA): added to a model, switched off, and merged into what is published.

An adapted linear layer computes `W x + (alpha / rank) B A x`, where the model's own W is frozen and
A [rank, in] and B [out, rank] are trained (Hu et al. 2021, arXiv:2106.09685). PEFT brings the
layers; they are put into the model in place, so that it stays what it was to all who use it. What
leaves the trainer carries the names of the model without adapter.

Not in here: where weights come from (`loading`) and the model's folders (`model_folder`).
"""

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.configs import ConfigError, LoraConfig, comma_separated

if TYPE_CHECKING:
    from peft.tuners.lora import Linear

_ADAPTER = "default"  # PEFT's name of the one that there is
_A, _B, _BASE = f".lora_A.{_ADAPTER}.weight", f".lora_B.{_ADAPTER}.weight", ".base_layer."
ALL_LINEAR = "all-linear"
_LINEAR = {"Linear", "FalconLinear"}  # and no subclass that computes something else, as routers do
_OF_STATE_SPACE = {"x_proj", "dt_proj", "out_proj"}


def add_adapter(
    model: PreTrainedModel,
    config: LoraConfig,
    *,
    frozen_dtype: torch.dtype,
    float32: Collection[str] = (),
) -> None:
    """Add an adapter to `model` in place, and freeze all other weights in `frozen_dtype`.

    `float32`: names of weights that stay in float32. Call it before sharding. A is drawn from
    torch's generator and B is 0, so that the model's output does not change. Raises `ConfigError`
    if a name of `--lora_target_modules` is that of no linear layer, or of a head whose weight is
    the embedding's too.
    """
    # Imported here: PEFT takes 0.4 s to load, and most runs have no adapter.
    from peft import LoraConfig as PeftConfig
    from peft.tuners.lora import Linear

    layers = _layers_to_adapt(model, config.lora_target_modules)
    model.requires_grad_(False)
    described = PeftConfig(r=config.lora_rank, lora_alpha=config.lora_alpha)
    for name, layer in layers.items():
        # One by one: by names, PEFT 0.21 takes also what transformers 4 had as linear layers, a
        # router and each expert, and wraps the parameters that they are today.
        with layer.weight.device:
            adapted = Linear(layer, _ADAPTER, described, config.lora_rank, config.lora_alpha)
        adapted.lora_A.float()
        adapted.lora_B.float()
        model.set_submodule(name, adapted)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            dtype = torch.float32 if base_name(name) in float32 else frozen_dtype
            parameter.data = parameter.data.to(dtype)


def has_adapter(model: nn.Module) -> bool:
    """Whether the model has an adapter."""
    return bool(_adapted_layers(model))


def adapter_scaling(model: nn.Module) -> float:
    """alpha / rank of the model's adapter; 0 if it has none."""
    return next((float(layer.scaling[_ADAPTER]) for layer in _adapted_layers(model)), 0.0)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Switch the adapter off within the block; the model is then the reference policy.

    For forward passes without gradient.
    """
    layers = _adapted_layers(model)
    # PEFT's own switch also changes requires_grad, which FSDP reads at the first forward pass only.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def is_adapter_weight(name: str) -> bool:
    """Whether a name of the adapted model's state belongs to the adapter."""
    return name.endswith((_A, _B))


def initial_adapter(name: str, shape: torch.Size) -> Tensor:
    """The full initial value of an adapter weight, as in PEFT: A drawn as a linear layer's, B 0."""
    if name.endswith(_B):
        return torch.zeros(shape)
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5))


def base_name(name: str) -> str:
    """The name that a weight of the adapted model has in the model without adapter."""
    return name.replace(_BASE, ".")


def adapter_of(name: str) -> tuple[str, str] | None:
    """The names of A and B that adapt the weight `name`; None if it is not adapted."""
    layer, found, rest = name.partition(_BASE)
    return (layer + _A, layer + _B) if found and rest == "weight" else None


def merge(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """W + scaling B A, in float32. `weight` [out, in], `a` [rank, in], `b` [out, rank]."""
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)


def save_adapter(
    weights: Mapping[str, Tensor],
    config: LoraConfig,
    base: Path,
    folder: Path,
    make_model: Callable[[], PreTrainedModel],
) -> bool:
    """Write an adapter as a PEFT folder; returns whether PEFT adapts the same layers by it.

    `weights` have their names in the adapted model. `base`: the folder of the adapted model, which
    `make_model` makes without adapter.
    """
    from peft import LoraConfig as PeftConfig

    layers = {name.partition(".lora_")[0] for name in weights}
    short = {layer.rpartition(".")[2] for layer in layers}
    # Short names are what all tools know; in some models they name other modules too.
    for targets in (short, layers, short):
        PeftConfig(
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            target_modules=sorted(targets),
            base_model_name_or_path=str(base),
            task_type="CAUSAL_LM",
            inference_mode=True,
        ).save_pretrained(str(folder))
        right = _adapted_by_peft(make_model(), folder) == weights.keys()
        if right:
            break
    tensors = {
        f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}": tensor.contiguous()
        for name, tensor in weights.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return right


def _adapted_by_peft(model: PreTrainedModel, folder: Path) -> set[str]:
    """The adapter weights that PEFT makes for the folder; none if it refuses the folder."""
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    described = PeftConfig.from_pretrained(str(folder))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the caller says what matters of it
            inject_adapter_in_model(described, model, _ADAPTER, low_cpu_mem_usage=True)
    except ValueError:  # of a name that is also that of a module which cannot be adapted
        return set()
    return {name for name in model.state_dict() if ".lora_" in name}


def _adapted_layers(model: nn.Module) -> "list[Linear]":
    """PEFT's layers in the model, which no other layers resemble in having a `lora_A`."""
    return [cast("Linear", module) for module in model.modules() if hasattr(module, "lora_A")]


def _layers_to_adapt(model: PreTrainedModel, targets: str) -> dict[str, nn.Linear]:
    """The linear layers that `--lora_target_modules` names, by their names."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    linear = _linear_layers(model)
    every = [name for name, layer in linear.items() if layer is not head]
    named = {
        target: every
        if target == ALL_LINEAR
        else [name for name in linear if name == target or name.endswith(f".{target}")]
        for target in comma_separated(targets)
    }
    wrong = [target for target, names in named.items() if not names]
    if wrong or not named:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in every}))
        raise ConfigError(
            f"--lora_target_modules {targets}: this model has no linear layer "
            f"{' or '.join(wrong) or repr(targets)} that can be adapted; give {ALL_LINEAR}, or "
            f"some of {known}"
            if known
            else f"--lora_rank: {type(model).__name__} has no linear layer that can be adapted"
        )
    found = {name: linear[name] for names in named.values() for name in names}
    if any(layer.weight is embedding.weight for layer in found.values()):
        raise ConfigError(
            f"--lora_target_modules {targets}: the head of this model is its embedding too "
            "(tie_word_embeddings), and an adapter would change only one of them; leave the head "
            "out"
        )
    return found


def _linear_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The layers that a forward pass calls as `y = W x + b`, by their names.

    A state space (Mamba) hands the weights of some layers to its kernel and does not call them.
    """
    return {
        f"{name}.{child}" if name else child: layer
        for name, module in model.named_modules()
        for child, layer in module.named_children()
        if isinstance(layer, nn.Linear)
        and type(layer).__name__ in _LINEAR
        and not (hasattr(module, "D") and child in _OF_STATE_SPACE)
    }
