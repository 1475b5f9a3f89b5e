"""Weights from a model folder into a model that is sharded already, without a copy per process.

    empty_model -> (an adapter) -> prepare_model -> fill

The model is made without memory for its parameters. Once they are sharded, each process reads the
part of each tensor that it holds from the folder's safetensors files, by the names and
concatenations that transformers knows for the model (experts are separate tensors in the files and
one in the model). A folder in another form is loaded whole by rank 0, which sends each tensor
around.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Protocol

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl.configs import ConfigError, ModelConfig
from agentrl.training.model.lora import base_name, initial_adapter, is_adapter_weight
from agentrl.training.model.model_folder import (
    FLAG,
    check_model_folder,
    first_attention,
    load_model,
)
from agentrl.training.model.safetensors_folder import SafetensorsFolder, UnknownLayout, Window
from agentrl.training.parallel.mesh import Mesh

logger = logging.getLogger(__name__)


class Weights(Protocol):
    """A source of weights, by their names in the model without adapter."""

    def read(self, name: str, shape: torch.Size, window: Window | None) -> Tensor:
        """Read the part `window` of a weight of `shape`; all of it if None."""


def empty_model(config: ModelConfig) -> PreTrainedModel:
    """Make the folder's model with float32 parameters on the meta device. Raises `ConfigError`.

    Buffers have values, because most are in no file.
    """
    folder = check_model_folder(config.model_name_or_path)
    try:
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder),
                dtype=torch.float32,
                attn_implementation=first_attention(config),
            )
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{FLAG} {folder}: the model cannot be made ({reason})") from None
    model.tie_weights()  # making parameters empty has untied them
    model.name_or_path = str(folder)
    return model


def fill(
    model: PreTrainedModel,
    config: ModelConfig,
    mesh: Mesh,
    device: torch.device,
    *,
    zeros: Collection[str] = (),
    load: Callable[[ModelConfig], PreTrainedModel] = load_model,
) -> None:
    """Load the weights of its folder into a sharded `empty_model`, in place.

    Buffers that are part of the model's state are loaded too, such as the bias of a router.
    `device`: where the shards are. An adapter gets its initial values from torch's generator, which
    must have the same state on every rank. `zeros`: parameters that the folder lacks and that start
    at 0. `load`: loads a folder whole on rank 0, if its layout is unknown. Collective. Raises
    `ConfigError` if the folder's weights do not fit the model.
    """
    weights = _open(model, config, mesh, zeros, load)
    places = _places(model)
    for name, parameter in list(model.named_parameters()):
        if name in zeros:
            shard = _distribute(torch.zeros(parameter.shape), parameter).to(device)
        else:
            shard = _shard_of(name, parameter, weights).to(device)
        filled = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        # FSDP manages the new parameters from the first forward pass on.
        for module, attribute in places[parameter]:
            setattr(module, attribute, filled)
    for name, buffer in stored_buffers(model).items():
        buffer.copy_(weights.read(name, buffer.shape, None))


def _open(
    model: PreTrainedModel,
    config: ModelConfig,
    mesh: Mesh,
    zeros: Collection[str],
    load: Callable[[ModelConfig], PreTrainedModel],
) -> Weights:
    folder = check_model_folder(config.model_name_or_path)
    shapes = {
        base_name(name): parameter.shape
        for name, parameter in model.named_parameters()
        if not is_adapter_weight(name) and name not in zeros
    }
    shapes |= {name: buffer.shape for name, buffer in stored_buffers(model).items()}
    try:
        return SafetensorsFolder(folder, model, shapes)
    except ValueError as error:
        raise ConfigError(f"{FLAG} {folder}: {error}") from None
    except UnknownLayout as reason:
        logger.info("%s is loaded by one process and sent to the others: %s", folder, reason)
        return _FromMain(config, mesh, load)


class _FromMain:
    """Weights that rank 0 has loaded whole."""

    def __init__(
        self, config: ModelConfig, mesh: Mesh, load: Callable[[ModelConfig], PreTrainedModel]
    ) -> None:
        self._device = mesh.device
        failure: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                self._weights: dict[str, Tensor] = load(config).state_dict()
            except ConfigError as error:
                failure = [str(error)]
        dist.broadcast_object_list(failure, src=0)
        if failure[0] is not None:
            raise ConfigError(failure[0])

    def read(self, name: str, shape: torch.Size, window: Window | None) -> Tensor:
        if dist.get_rank() == 0:
            whole = self._weights.pop(name).to(self._device)
        else:
            whole = torch.empty(shape, device=self._device)
        dist.broadcast(whole, src=0)
        return whole if window is None else whole[window].clone()


def stored_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a model folder holds; none of them is sharded."""
    state = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name in state}


def _shard_of(name: str, parameter: nn.Parameter, weights: Weights) -> Tensor:
    """This process's shard of a parameter, in its dtype."""
    if is_adapter_weight(name):
        whole = initial_adapter(name, parameter.shape)
        return _distribute(whole, parameter)
    source = base_name(name)
    if not isinstance(parameter, DTensor):
        return weights.read(source, parameter.shape, None).to(parameter.dtype)
    window = _window(parameter)
    part = weights.read(source, parameter.shape, window).to(parameter.dtype)
    if window is None:
        return _distribute(part, parameter)
    return DTensor.from_local(
        part.contiguous(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _window(parameter: DTensor) -> Window | None:
    """The window of a parameter that this process holds; None if it is several pieces."""
    if not all(isinstance(p, Shard | Replicate) for p in parameter.placements):
        return None
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    if tuple(shape) != tuple(parameter.to_local().shape):
        return None
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def _distribute(whole: Tensor, parameter: Tensor) -> Tensor:
    """Shard `whole`, which every process has, like `parameter`."""
    if not isinstance(parameter, DTensor):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules and attributes of each parameter; several if it is tied."""
    places: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            places[parameter].append((module, attribute))
    return places
