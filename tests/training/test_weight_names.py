"""What is loaded, published and exported has the names, pieces and values of the start folder."""

import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from model_families import FAMILIES, beside, write_family
from safetensors.torch import load_file
from tiny import write_tiny_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.configs import ComputeConfig, LearnerConfig, ModelConfig, OptimizerConfig
from agentrl.inference.engine.weights import copy_weights, make_assembly, read_weights
from agentrl.training.checkpoint.layout import TrainerState, checkpoint_path
from agentrl.training.checkpoint.save import CheckpointSaver
from agentrl.training.model.export import export_checkpoint
from agentrl.training.model.loading import empty_model, fill
from agentrl.training.model.prepare import prepare_model
from agentrl.training.model.weight_gathering import WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import make_mesh
from agentrl.training.run.publication import Publication, make_publication
from agentrl.training.step.learner import Learner


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the family's on the hub, with a tokenizer."""
    folder = write_family(family, tmp_path_factory.mktemp(family))
    tokenizer = AutoTokenizer.from_pretrained(write_tiny_folder(folder / "other"))
    tokenizer.save_pretrained(folder)
    return folder


def model_config(folder: Path) -> ModelConfig:
    # The one that all of them have.
    return ModelConfig(model_name_or_path=str(folder), attention_implementation="eager")


def loaded(folder: Path) -> PreTrainedModel:
    """The model as the trainer loads it."""
    config = model_config(folder)
    model = empty_model(config)
    mesh = make_mesh(Accelerator(cpu=True))
    prepare_model(model, mesh, ComputeConfig(), trees=False)
    fill(model, config, mesh, mesh.device)
    return model


def published(folder: Path, out: Path) -> Publication:
    model, tokenizer = loaded(folder), AutoTokenizer.from_pretrained(folder)
    form = written_form(model)
    staged = WeightGatherer(model, form, torch.bfloat16).stage()
    return make_publication(out, 0, 0, staged, form, tokenizer, torch.bfloat16)


def check_same(tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit by bit, in the same dtypes."""
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name


def trained(family: str, folder: Path) -> dict[str, Tensor]:
    """What a service must get of it."""
    stored = load_file(folder / "model.safetensors")
    return {name: stored[name] for name in stored.keys() - beside(family, set(stored))}


def test_services_are_sent_what_the_folder_holds_of_the_trained_model(
    family: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="agentrl"):
        sent = published(folder, tmp_path).gather()
    assert "loaded by one process" not in caplog.text
    check_same(sent, trained(family, folder))
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    assert sent.keys() == load_file(tmp_path / "saved" / "model.safetensors").keys()


def test_a_published_folder_is_the_start_folder_again_with_all_that_lies_beside_the_model(
    family: str, folder: Path, tmp_path: Path
) -> None:
    publication = published(folder, tmp_path)
    publication.write()
    written = publication.folder
    check_same(read_all(written), load_file(folder / "model.safetensors"))
    again = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
    start = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    check_same(dict(again.state_dict()), dict(start.state_dict()))
    assert again.config.to_dict() | {"_name_or_path": ""} == start.config.to_dict() | {
        "_name_or_path": ""
    }


def test_an_exported_checkpoint_is_the_start_folder_again(
    family: str, folder: Path, tmp_path: Path
) -> None:
    config = model_config(folder)
    learner = Learner(
        empty_model(config),
        make_mesh(Accelerator(cpu=True)),
        LearnerConfig(
            ComputeConfig(micro_batch_tokens=64), optimizer=OptimizerConfig(), model=config
        ),
        1,
    )
    saver = CheckpointSaver(tmp_path, None, hold=lambda: None)
    state = {"model": {"model_name_or_path": str(folder)}}
    saver.save(learner, TrainerState(1, 1, "run", state, fence=1, processes=1))
    saver.wait()
    dist.destroy_process_group()
    export_checkpoint(checkpoint_path(tmp_path, 1), folder, tmp_path / "out")
    check_same(read_all(tmp_path / "out"), load_file(folder / "model.safetensors"))


def test_the_local_engine_takes_the_pieces_in_any_order_and_any_requests(
    family: str, folder: Path, tmp_path: Path
) -> None:
    start = write_family(family, tmp_path / "start", seed=1)
    model = AutoModelForCausalLM.from_pretrained(start)
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    sent = list(published(folder, tmp_path).gather().items())
    random.Random(0).shuffle(sent)
    assembly = make_assembly(model, start)
    assembly.begin()
    for name, tensor in sent:
        copy_weights(model, assembly.add({name: tensor}, "a request"))
    assembly.end()
    check_same(dict(model.state_dict()), dict(expected))


def test_the_local_engine_reads_a_published_folder(
    family: str, folder: Path, tmp_path: Path
) -> None:
    start = write_family(family, tmp_path / "start", seed=1)
    model = AutoModelForCausalLM.from_pretrained(start)
    publication = published(folder, tmp_path)
    publication.write()
    assembly = make_assembly(model, start)
    copy_weights(model, read_weights(model, assembly, publication.folder))
    expected = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    check_same(dict(model.state_dict()), dict(expected))


def read_all(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors
