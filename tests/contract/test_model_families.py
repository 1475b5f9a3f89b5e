"""Mixtures of experts and multimodal models: all that is published arrives, by every way.

The names differ between a model in memory, its folder and SGLang. What the trainer sends is
compared with the folder in tests/training/test_weight_names.py; here the folder is sent.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conformance import ask
from model_families import FAMILIES, beside, write_family
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.inference.client import SGLangClient
from agentrl.inference.weights.probes import CheckedUpdater
from agentrl.inference.weights.updates import PublishedWeights, update_services
from agentrl.inference.weights.ways import make_updater

PROMPT = tuple(range(5, 25))
# The local engine serves models with full attention only, whose keys and values are of one size.
# SGLang without its kernels was tried with the first two families only.
SERVED = {"local": {"qwen3_moe", "glm4_moe"}, "sglang": {"qwen3_moe", "glm4_moe"}}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, engine_name: str) -> str:
    if request.param not in SERVED[engine_name]:
        pytest.skip(f"{engine_name} does not serve the model here")
    return str(request.param)


@pytest.fixture(scope="module")
def sets(family: str, folders, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of a small model of the family."""
    root = tmp_path_factory.mktemp(family)
    tokenizer = AutoTokenizer.from_pretrained(folders.first)
    for seed, name in enumerate(("first", "second")):
        write_family(family, root / name, seed)
        tokenizer.save_pretrained(root / name)
    return root / "first", root / "second"


def plain(folder: Path, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """The logprobs of the output tokens in a plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0].tolist()


async def test_every_tensor_of_a_family_is_taken_by_every_way(
    family: str, sets: tuple[Path, Path], start_service: Callable
) -> None:
    first, second = sets
    service = start_service("--model", str(first))
    async with SGLangClient(service.url) as engine:
        made = await engine.generate(ask(PROMPT, 6))
        assert len(made.output_ids) == 6
        assert made.output_logprobs == pytest.approx(
            plain(first, PROMPT, made.output_ids), abs=1e-3
        )
        ways = [("disk", second), ("distributed", first), ("tensor", second)]
        for version, (way, folder) in enumerate(ways):
            tensors = load_file(folder / "model.safetensors")
            sent = {name: tensors[name] for name in tensors.keys() - beside(family, set(tensors))}
            updater = CheckedUpdater(make_updater(way, torch.device("cpu")))
            weights = PublishedWeights(version, folder, dict(sorted(sent.items())))
            (outcome,) = await update_services(updater, [engine], weights)
            assert outcome.ok, outcome.error
            made = await engine.generate(ask(PROMPT, 6))
            assert {span.version for span in made.versions} == {version}
            expected = plain(folder, PROMPT, made.output_ids)
            assert made.output_logprobs == pytest.approx(expected, abs=1e-3), way
            await updater.close()
    service.stop()
