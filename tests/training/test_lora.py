"""An adapter on the tiny model: what is trained, what is published, what a checkpoint holds."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from memory_worker import LORA, make_learner, train
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from tiny import tiny_model, write_tiny_folder
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from agentrl.configs import ComputeConfig, ConfigError, LoraConfig
from agentrl.training.checkpoint.layout import TrainerState, checkpoint_path
from agentrl.training.checkpoint.save import CheckpointSaver, load_checkpoint
from agentrl.training.model.export import main as export
from agentrl.training.model.lora import adapter_off, add_adapter, has_adapter
from agentrl.training.model.model_folder import load_tokenizer, save_model_folder
from agentrl.training.model.prepare import prepare_model
from agentrl.training.model.weight_gathering import WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import make_mesh

IDS = torch.arange(2, 30)[None]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def test_only_the_adapter_is_trained_and_off_it_is_the_start_policy() -> None:
    learner = make_learner(lora=True)
    start = tiny_model().eval()
    model = learner.model.eval()
    assert has_adapter(model) and not has_adapter(start)
    assert torch.equal(logits(model), logits(start)), "B is 0"
    train(learner)
    model.eval()
    assert (logits(model) - logits(start)).abs().max() > 1e-2
    with adapter_off(model):
        assert torch.equal(logits(model), logits(start))
    train(learner)  # and it still learns after having been off
    assert all(
        parameter.requires_grad == ("lora_" in n) for n, parameter in model.named_parameters()
    )


def test_gradients_are_those_of_peft_alone() -> None:
    torch.manual_seed(1)
    alone = get_peft_model(
        tiny_model(), PeftConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    )
    torch.manual_seed(1)
    ours = tiny_model()
    config = LoraConfig(lora_rank=4, lora_alpha=8, lora_target_modules="q_proj, down_proj")
    add_adapter(ours, config, frozen_dtype=torch.float32)
    prepare_model(ours, make_mesh(Accelerator(cpu=True)), ComputeConfig())
    expected = {name.removeprefix("base_model.model."): p for name, p in alone.named_parameters()}
    for name, parameter in ours.named_parameters():
        with torch.no_grad():
            expected[name].copy_(parameter.full_tensor())
    for model in (alone, ours):
        model(input_ids=IDS, use_cache=False).logits.square().sum().backward()
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name].grad)


def test_what_is_published_is_the_merged_model_under_its_own_names(tmp_path: Path) -> None:
    base = write_tiny_folder(tmp_path / "base")
    learner = make_learner(lora=True)
    train(learner)
    expected = logits(learner.model.eval())
    form = written_form(learner.model)
    weights = WeightGatherer(learner.model, form, torch.float32).stage().gather()
    tied = {"lm_head.weight"}
    assert set(weights) == set(tiny_model().state_dict()) - tied
    tokenizer = load_tokenizer(str(base))
    save_model_folder(form, tokenizer, weights, tmp_path / "out", torch.float32)
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)


def test_an_export_has_the_adapter_merged_or_alone(tmp_path: Path) -> None:
    base = write_tiny_folder(tmp_path / "base")
    learner = make_learner(lora=True)
    train(learner)
    expected = logits(learner.model.eval())
    config = {"model": {"model_name_or_path": str(base)}, "lora": asdict(LORA)}
    saver = CheckpointSaver(tmp_path, None, hold=lambda: None)
    saver.save(learner, TrainerState(2, 2, "run", config, fence=1, processes=1))
    saver.close()
    dist.destroy_process_group()
    assert export([str(tmp_path), str(tmp_path / "out")]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), expected, atol=1e-5, rtol=1e-5)

    assert export([str(tmp_path), str(tmp_path / "alone"), "--adapter"]) == 0
    start = AutoModelForCausalLM.from_pretrained(base)
    adapted = PeftModel.from_pretrained(start, str(tmp_path / "alone"))
    torch.testing.assert_close(logits(adapted), expected, atol=1e-5, rtol=1e-5)
    described = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert "q_proj" in described["target_modules"] and described["r"] == LORA.lora_rank


def test_a_checkpoint_holds_the_adapter_only_and_training_goes_on_from_it(tmp_path: Path) -> None:
    learner = make_learner(lora=True)
    train(learner)
    saver = CheckpointSaver(tmp_path, None, hold=lambda: None)
    saver.save(learner, TrainerState(2, 2, "run", config={}, fence=1, processes=1))
    saver.wait()
    saver.close()
    checkpoint = checkpoint_path(tmp_path, 2)
    saved = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    assert all("lora_" in name for name in saved if name.startswith("model."))
    expected = train(learner)
    dist.destroy_process_group()

    again = make_learner(lora=True)
    load_checkpoint(checkpoint, again)
    assert train(again) == expected


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [
        ("nothing_proj", "nothing_proj"),
        ("embed_tokens", "embed_tokens"),
        ("q_proj,embed_tokens", "embed_tokens"),
        ("q_proj,v_prj,roj", "v_prj or roj"),
        ("", "''"),
    ],
)
def test_target_modules_that_cannot_be_adapted_are_refused(targets: str, wrong: str) -> None:
    config = LoraConfig(lora_rank=4, lora_target_modules=targets)
    said = (
        rf"--lora_target_modules {targets}: this model has no linear layer {wrong} that can be "
        "adapted; give all-linear, or some of down_proj, gate_proj, k_proj, o_proj, q_proj, "
        "up_proj, v_proj$"
    )
    with pytest.raises(ConfigError, match=said):
        add_adapter(tiny_model(), config, frozen_dtype=torch.float32)


def test_target_modules_are_named_as_far_as_they_are_told_apart() -> None:
    model = tiny_model()
    config = LoraConfig(lora_rank=4, lora_target_modules="layers.1.self_attn.q_proj,mlp.up_proj")
    add_adapter(model, config, frozen_dtype=torch.float32)
    adapted = {n.partition(".lora_A")[0] for n, _ in model.named_parameters() if ".lora_A" in n}
    assert adapted == {
        "model.layers.1.self_attn.q_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
    }


def test_an_adapter_on_a_head_that_is_the_embedding_too_is_refused() -> None:
    config = LoraConfig(lora_rank=4, lora_target_modules="q_proj,lm_head")
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        add_adapter(tiny_model(), config, frozen_dtype=torch.float32)


def test_what_is_not_trained_is_held_in_the_dtype_asked_for() -> None:
    model = tiny_model()
    add_adapter(model, LORA, frozen_dtype=torch.bfloat16)
    prepare_model(model, make_mesh(Accelerator(cpu=True)), ComputeConfig(bf16=True))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
