"""Checkpoints and running models as Hugging Face folders."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from tiny import linear_rows, sequences_of, tiny_model, write_tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.configs import ConfigError, LossConfig, ModelConfig, OptimizerConfig
from agentrl.training.checkpoint import TrainerState, checkpoint_path
from agentrl.training.checkpoint_io import CheckpointSaver
from agentrl.training.export import export_checkpoint, main
from agentrl.training.learner import Learner
from agentrl.training.model_folder import load_model, load_tokenizer
from agentrl.training.parallel import make_mesh, parallelise
from agentrl.training.publication import gather_publication
from agentrl.training.step import StepOptions

IDS = torch.arange(2, 30)[None]


def learner_of(model: PreTrainedModel) -> Learner:
    optimizer = OptimizerConfig(learning_rate=1e-2)
    mesh = make_mesh(Accelerator(cpu=True))
    return Learner(model, mesh, LossConfig(), optimizer, StepOptions(512), 1)


def save(learner: Learner, output: Path, base: Path) -> Path:
    """A checkpoint of it, as of a run that started from `base`."""
    config = {"model": {"model_name_or_path": str(base)}}
    saver = CheckpointSaver(output, None, hold=lambda: None)
    saver.save(learner, TrainerState(step=1, version=1, run_name="run", config=config))
    saver.wait()
    return checkpoint_path(output, 1)


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_checkpoint_has_the_trained_logits(tied: bool, tmp_path: Path) -> None:
    base = write_tiny_folder(tmp_path / "base", tied=tied)
    model = load_model(ModelConfig(model_name_or_path=str(base)))
    learner = learner_of(model)
    learner.step([sequences_of(row) for row in linear_rows(4)])
    with torch.no_grad():
        expected = model(input_ids=IDS).logits
    save(learner, tmp_path, base)
    tokenizer = load_tokenizer(str(base))
    gather_publication(tmp_path, 7, 1, model, tokenizer, torch.float32).write()
    dist.destroy_process_group()

    assert main([str(tmp_path), str(tmp_path / "out")]) == 0
    start = AutoModelForCausalLM.from_pretrained(base)(input_ids=IDS).logits
    assert (start - expected).abs().max() > 1e-2
    for folder in (tmp_path / "out", tmp_path / "weights" / "v7"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        torch.testing.assert_close(loaded(input_ids=IDS).logits, expected, atol=1e-5, rtol=1e-5)
        assert loaded.config.architectures == ["Qwen3ForCausalLM"]
        assert AutoTokenizer.from_pretrained(folder).chat_template
    assert not list(tmp_path.glob("*.partial"))


def test_weights_can_be_published_in_bfloat16(tmp_path: Path) -> None:
    base = write_tiny_folder(tmp_path / "base")
    model = tiny_model()
    parallelise(model, make_mesh(Accelerator(cpu=True)))
    publication = gather_publication(
        tmp_path, 0, 0, model, load_tokenizer(str(base)), torch.bfloat16
    )
    assert {tensor.dtype for tensor in publication.weights.tensors.values()} == {torch.bfloat16}
    publication.write()
    loaded = AutoModelForCausalLM.from_pretrained(publication.weights.folder, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert next(model.parameters()).dtype == torch.float32


def test_an_existing_folder_is_not_overwritten_by_an_export(tmp_path: Path) -> None:
    base = write_tiny_folder(tmp_path / "base")
    checkpoint = save(learner_of(tiny_model()), tmp_path, base)
    with pytest.raises(ConfigError, match="exists already"):
        export_checkpoint(checkpoint, base, base)


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "tokenizer cannot be loaded"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_a_model_folder_that_lacks_something_says_what(
    removed: str, said: str, tmp_path: Path
) -> None:
    base = write_tiny_folder(tmp_path / "base")
    (base / removed).unlink()
    with pytest.raises(ConfigError, match=f"--model_name_or_path .*{said}"):
        load_tokenizer(str(base))


def test_a_model_folder_without_weights_says_so(tmp_path: Path) -> None:
    base = write_tiny_folder(tmp_path / "base")
    (base / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="the model cannot be loaded"):
        load_model(ModelConfig(model_name_or_path=str(base)))


def test_a_missing_folder_says_so() -> None:
    with pytest.raises(ConfigError, match="/no/such: there is no such folder"):
        load_tokenizer("/no/such")
