"""Checkpoints and running models as Hugging Face folders."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny import linear_rows, sequences_of, tiny_model, write_tiny_folder
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.configs import (
    ComputeConfig,
    ConfigError,
    LearnerConfig,
    ModelConfig,
    OptimizerConfig,
)
from agentrl.training.checkpoint.layout import TrainerState, checkpoint_path
from agentrl.training.checkpoint.save import CheckpointSaver
from agentrl.training.model.export import export_checkpoint, main
from agentrl.training.model.model_folder import load_model, load_tokenizer
from agentrl.training.model.prepare import prepare_model
from agentrl.training.model.weight_files import plan_files
from agentrl.training.model.weight_gathering import WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import make_mesh
from agentrl.training.run.publication import make_publication
from agentrl.training.step.learner import Learner

IDS = torch.arange(2, 30)[None]


def learner_of(model: PreTrainedModel) -> Learner:
    optimizer = OptimizerConfig(learning_rate=1e-2)
    mesh = make_mesh(Accelerator(cpu=True))
    config = LearnerConfig(ComputeConfig(micro_batch_tokens=512), optimizer=optimizer)
    return Learner(model, mesh, config, 1)


def save(learner: Learner, output: Path, base: Path) -> Path:
    """A checkpoint of it, as of a run that started from `base`."""
    config = {"model": {"model_name_or_path": str(base)}}
    saver = CheckpointSaver(output, None, hold=lambda: None)
    saver.save(learner, TrainerState(1, 1, "run", config, fence=1, processes=1))
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
    form = written_form(model)
    staged = WeightGatherer(model, form, torch.float32).stage()
    make_publication(tmp_path, 7, 1, staged, form, tokenizer, torch.float32).write()
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


def write_moe_folder(folder: Path, dtype: torch.dtype) -> Path:
    """A mixture of experts, whose experts are one tensor in memory and several on disk."""
    write_tiny_folder(folder)  # for its tokenizer
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=64, initializer_range=0.2,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.to(dtype).save_pretrained(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    return folder


def test_a_large_model_is_exported_in_files_that_are_laid_out_as_those_it_came_from(
    tmp_path: Path,
) -> None:
    base = write_moe_folder(tmp_path / "base", torch.bfloat16)
    model = load_model(ModelConfig(model_name_or_path=str(base)))
    checkpoint = save(learner_of(model), tmp_path, base)
    export_checkpoint(checkpoint, base, tmp_path / "out", file_bytes=30_000)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == "model-00001-of-00003.safetensors" and len(files) == 3
    start, exported = load_file(base / "model.safetensors"), {}
    for file in files:
        exported |= load_file(tmp_path / "out" / file)
    assert exported.keys() == start.keys()
    for name, weight in start.items():
        assert torch.equal(exported[name], weight), "it was not trained"
        assert exported[name].dtype == torch.bfloat16
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert loaded.generation_config.eos_token_id == [1, 5]


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    layers=st.lists(st.integers(0, 5), min_size=40, max_size=40),
    limit=st.integers(1, 120),
)
def test_files_hold_every_weight_once_and_layers_whole(
    sizes: list[int], layers: list[int], limit: int
) -> None:
    named = {
        f"model.layers.{layer}.{index}.weight": size
        for index, (size, layer) in enumerate(zip(sizes, sorted(layers), strict=False))
    }
    files = plan_files(named, limit)
    assert [name for file in files for name in file] == list(named)
    of_layer = [{name.split(".")[2] for name in file} for file in files]
    assert sum(len(layers) for layers in of_layer) == len(set().union(*of_layer))
    for file, held in zip(files, of_layer, strict=True):
        assert sum(named[name] for name in file) <= limit or len(held) == 1


def test_a_checkpoint_of_another_model_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(learner_of(tiny_model()), tmp_path, write_tiny_folder(tmp_path / "base"))
    other = str(write_moe_folder(tmp_path / "other", torch.float32))
    assert main([str(tmp_path), str(tmp_path / "out"), "--model_name_or_path", other]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert f"checkpoint-1 does not hold the weights of {other}: " in said
    assert not list(tmp_path.glob("out*"))


def test_weights_can_be_published_in_bfloat16(tmp_path: Path) -> None:
    base = write_tiny_folder(tmp_path / "base")
    model = tiny_model()
    prepare_model(model, make_mesh(Accelerator(cpu=True)), ComputeConfig())
    form, tokenizer = written_form(model), load_tokenizer(str(base))
    staged = WeightGatherer(model, form, torch.bfloat16).stage()
    publication = make_publication(tmp_path, 0, 0, staged, form, tokenizer, torch.bfloat16)
    assert {tensor.dtype for tensor in publication.gather().values()} == {torch.bfloat16}
    publication.write()
    loaded = AutoModelForCausalLM.from_pretrained(publication.folder, dtype="auto")
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
