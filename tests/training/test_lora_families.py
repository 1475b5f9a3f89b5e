"""Adapters on families of models: what is adapted, trained, published and exported."""

import json
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from model_families import FAMILIES, beside, write_family
from safetensors.torch import load_file
from tiny import linear_rows, sequences_of, write_tiny_folder
from torch import Tensor
from trainer_run import Run
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconH1Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Zamba2Config,
)

from agentrl.configs import (
    ComputeConfig,
    LearnerConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)
from agentrl.training.checkpoint.layout import TrainerState, checkpoint_path
from agentrl.training.checkpoint.save import CheckpointSaver
from agentrl.training.model.export import export_checkpoint
from agentrl.training.model.loading import empty_model
from agentrl.training.model.lora import add_adapter, is_adapter_weight, save_adapter
from agentrl.training.model.model_folder import load_tokenizer, save_model_folder
from agentrl.training.model.weight_gathering import WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import make_mesh
from agentrl.training.step.learner import Learner
from agentrl.training.trainer import main

LORA = LoraConfig(lora_rank=4)
IDS = torch.arange(2, 30)[None]
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
DENSE = {"gate_proj", "up_proj", "down_proj"}  # of layers without experts, and shared experts
ADAPTED = {
    "qwen3_moe": ATTENTION,
    "gpt_oss": ATTENTION,
    "glm4_moe": ATTENTION | DENSE,
    "qwen3_5": ATTENTION
    | DENSE
    | {"in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"},
    "deepseek_v3": DENSE | {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"},
}


def make_learner(folder: Path, *, bf16: bool = False) -> Learner:
    """A learner with an adapter, made as the trainer makes it."""
    config = ModelConfig(str(folder), attention_implementation="eager")
    model = empty_model(config)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        add_adapter(
            model,
            LORA,
            frozen_dtype=torch.bfloat16 if bf16 else torch.float32,
            float32=written_form(model).float32,
        )
    return Learner(
        model,
        make_mesh(Accelerator(cpu=True)),
        LearnerConfig(
            ComputeConfig(bf16=bf16, micro_batch_tokens=96),
            LossConfig(),
            OptimizerConfig(learning_rate=1e-2),
            model=config,
        ),
        2,
    )


def published(learner: Learner, dtype: torch.dtype) -> dict[str, Tensor]:
    form = written_form(learner.model)
    return WeightGatherer(learner.model, form, dtype).stage().gather()


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS, use_cache=False).logits
    return found


def adapted(model: torch.nn.Module) -> set[str]:
    """The last parts of the names of adapted layers."""
    names = [name.partition(".lora_A") for name, _ in model.named_parameters()]
    return {layer.rpartition(".")[2] for layer, found, _ in names if found}


def same(weight: Tensor, expected: Tensor) -> bool:
    """Bit by bit, in the same dtype."""
    return weight.dtype == expected.dtype and torch.equal(weight, expected)


def check_same(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not same(weights[name], expected[name])] == []


@pytest.mark.parametrize("family", ADAPTED)
def test_all_linear_layers_are_trained_and_published_and_no_expert_or_router(
    family: str, tmp_path: Path
) -> None:
    base = write_family(family, tmp_path / "base")
    learner = make_learner(base)
    assert adapted(learner.model) == ADAPTED[family]
    learner.step([sequences_of(row) for row in linear_rows(4)])
    weights, start = published(learner, torch.float32), load_file(base / "model.safetensors")
    changed = {n for n, weight in weights.items() if not torch.equal(weight, start[n].float())}
    assert {name.split(".")[-2] for name in changed} == ADAPTED[family]
    assert not any(".experts." in name for name in changed)
    tokenizer = load_tokenizer(str(write_tiny_folder(tmp_path / "tokenizer")))
    save_model_folder(
        written_form(learner.model), tokenizer, weights, tmp_path / "out", torch.float32
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    torch.testing.assert_close(logits(loaded), logits(learner.model), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_before_a_step_what_is_published_and_exported_in_bfloat16_is_the_start_folder(
    family: str, tmp_path: Path
) -> None:
    base = write_family(family, tmp_path / "base")
    load_tokenizer(str(write_tiny_folder(tmp_path / "tokenizer"))).save_pretrained(base)
    stored = load_file(base / "model.safetensors")
    learner = make_learner(base, bf16=True)
    weights = published(learner, torch.bfloat16)
    check_same(
        weights, {name: stored[name] for name in stored.keys() - beside(family, set(stored))}
    )
    saver = CheckpointSaver(tmp_path, None, hold=lambda: None)
    config = {"model": {"model_name_or_path": str(base)}, "lora": asdict(LORA)}
    saver.save(learner, TrainerState(1, 1, "run", config, fence=1, processes=1))
    saver.close()
    dist.destroy_process_group()
    export_checkpoint(checkpoint_path(tmp_path, 1), base, tmp_path / "out")
    exported = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    check_same({name: value for part in exported for name, value in part.items()}, stored)


def test_a_run_trains_and_publishes_float32_weights_beside_frozen_bfloat16(
    run: Run, tmp_path: Path
) -> None:
    run.model = write_family("qwen3_5", tmp_path / "base")
    load_tokenizer(str(write_tiny_folder(tmp_path / "tokenizer"))).save_pretrained(run.model)
    run.add(linear_rows(4))
    flags = ["--enable_sampling", "false", "--max_steps", "1", "--lora_rank", "4", "--bf16"]
    assert main(run.flags(*flags)) == 0
    stored = load_file(run.model / "model.safetensors")
    for version, changed in (("v0", set[str]()), ("v1", ADAPTED["qwen3_5"])):
        weights: dict[str, Tensor] = {}
        for file in (run.output / "weights" / version).glob("*.safetensors"):
            weights |= load_file(file)
        others = {name for name in stored if not same(weights[name], stored[name])}
        assert {name.split(".")[-2] for name in others} == changed


def exported(model: PreTrainedModel, folder: Path) -> tuple[bool, set[str]]:
    """Whether PEFT reads the model's exported adapter rightly, and the names it is written with."""

    def make_model() -> PreTrainedModel:
        with torch.device("meta"):
            made: PreTrainedModel = AutoModelForCausalLM.from_config(model.config)
        return made

    add_adapter(model, LORA, frozen_dtype=torch.float32)
    weights = {n: value for n, value in model.state_dict().items() if is_adapter_weight(n)}
    right = save_adapter(weights, LORA, folder, folder, make_model)
    described = json.loads((folder / "adapter_config.json").read_text())
    return right, set(described["target_modules"])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_is_known_that_peft_takes_for_one_of_experts(
    family: str, tmp_path: Path
) -> None:
    wrong = family in ("glm4_moe", "deepseek_v3")
    model: PreTrainedModel = AutoModelForCausalLM.from_config(FAMILIES[family]())
    right, names = exported(model, tmp_path)
    assert right is not wrong and names == ADAPTED[family]


def test_layers_have_their_full_names_where_short_ones_name_others_too(tmp_path: Path) -> None:
    config = Zamba2Config(
        **{**SIZES, "num_hidden_layers": 4}, layers_block_type=["mamba", "hybrid"] * 2,
        mamba_ngroups=1, n_mamba_heads=8, mamba_d_state=8, mamba_headdim=8, num_mem_blocks=1,
        intermediate_size=48, use_shared_attention_adapter=False, adapter_rank=4,
    )  # fmt: skip
    right, names = exported(AutoModelForCausalLM.from_config(config), tmp_path)
    assert right and all(name.startswith("model.layers.") for name in names)


SIZES = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        pytest.param(
            FalconH1Config(**SIZES, intermediate_size=48, num_key_value_heads=2),
            ATTENTION | DENSE | {"in_proj"},
            id="a kernel reads the weights of others",
        ),
        pytest.param(
            PhimoeConfig(**SIZES, intermediate_size=48, num_key_value_heads=2),
            ATTENTION,
            id="a router is a subclass of a linear layer",
        ),
        pytest.param(
            FalconConfig(**SIZES),
            {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
            id="linear layers of a subclass",
        ),
    ],
)
def test_layers_are_adapted_that_compute_a_product_and_nothing_else(
    config: PreTrainedConfig, layers: set[str]
) -> None:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    add_adapter(model, LORA, frozen_dtype=torch.float32)
    assert adapted(model) == layers
    logits(model)
