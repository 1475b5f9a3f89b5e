"""Mixtures of experts and multimodal models: all that is published arrives, by every way.

The names differ between a model in memory, its folder and SGLang. What the trainer sends is
compared with the folder in tests/training/test_weight_names.py; here the folder is sent.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
LOCAL = {"qwen3_moe", "glm4_moe"}


@dataclass(frozen=True)
class OnSGLang:
    """How SGLang serves a family. `on_cpu`: its further arguments there.

    `kernels`: whether they are Triton's, which its interpreter runs. `generates`: whether it can
    generate there.
    """

    dtype: str = "float32"
    on_cpu: str = ""
    kernels: bool = False
    generates: bool = True


ON_SGLANG = {
    "qwen3_moe": OnSGLang(),
    "glm4_moe": OnSGLang(),
    "deepseek_v3": OnSGLang(on_cpu="--attention-backend triton", kernels=True),
    # SGLang makes the parameters of its attention in bfloat16 only.
    "gpt_oss": OnSGLang("bfloat16", "--attention-backend triton", kernels=True),
    # Its linear attention has kernels in Triton only, with block pointers, which this Triton has no
    # more; and in bfloat16 only.
    "qwen3_5": OnSGLang(
        "bfloat16",
        "--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule --page-size 1",
        kernels=True,
        generates=False,
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, engine_name: str) -> str:
    if engine_name == "local" and request.param not in LOCAL:
        pytest.skip("the local engine does not serve the model")
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


def on_sglang(family: str) -> tuple[list[str], OnSGLang]:
    """The flags of `agentrl serve` for a family, on SGLang, and what it can do here."""
    command, how = os.environ["SGLANG_COMMAND"], ON_SGLANG[family]
    flags = ["--dtype", how.dtype]
    if "launch_cpu.py" not in command:
        return flags, OnSGLang(how.dtype)
    if how.kernels:
        command = f"env TRITON_INTERPRET=1 {command} --skip-server-warmup {how.on_cpu}"
    return [*flags, "--sglang_command", command], how


def plain(folder: Path, dtype: str, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
    """The logprobs of the output tokens in a plain forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(output)[:, None]
    return logits.float().log_softmax(-1).gather(-1, chosen)[:, 0].tolist()


async def test_every_tensor_of_a_family_is_taken_by_every_way(
    family: str, sets: tuple[Path, Path], start_service: Callable, engine_name: str
) -> None:
    first, second = sets
    flags, how = on_sglang(family) if engine_name == "sglang" else ([], OnSGLang())
    service = start_service("--model", str(first), *flags)

    async def check_logprobs(engine: SGLangClient, folder: Path, version: int, way: str) -> None:
        made = await engine.generate(ask(PROMPT, 6))
        assert {span.version for span in made.versions} == {version}
        expected = plain(folder, how.dtype, PROMPT, made.output_ids)
        pairs = zip(made.output_logprobs, expected, strict=True)
        distances = sorted(abs(one - other) for one, other in pairs)
        if how.dtype == "float32":
            assert distances[-1] < 1e-3, way
        else:  # rounding sends a token to another expert now and then; the sets are 1 nat apart
            assert distances[len(distances) // 2] < 0.1, way

    async def weights_held(engine: SGLangClient) -> dict[str, str]:
        """Checksums of the trained weights that the service holds; our engine has none."""
        if engine_name == "local":
            return {}
        held = await engine.weight_checksums()
        return {name: checksum for name, checksum in held.items() if "visual" not in name}

    async with SGLangClient(service.url) as engine:
        if how.generates:
            await check_logprobs(engine, first, await engine.weight_version(), "the start")
        held = {first: await weights_held(engine)}
        ways = [("disk", second), ("distributed", first), ("tensor", second)]
        for version, (way, folder) in enumerate(ways):
            tensors = load_file(folder / "model.safetensors")
            sent = {name: tensors[name] for name in tensors.keys() - beside(family, set(tensors))}
            updater = CheckedUpdater(make_updater(way, torch.device("cpu")))
            weights = PublishedWeights(version, folder, dict(sorted(sent.items())))
            (outcome,) = await update_services(updater, [engine], weights)
            assert outcome.ok, outcome.error
            if how.generates:
                await check_logprobs(engine, folder, version, way)
            # Bit for bit what a service has that loaded the folder itself.
            assert held.setdefault(folder, await weights_held(engine)) == await weights_held(engine)
            await updater.close()
        same = [name for name in held[first] if held[first][name] == held[second][name]]
        assert not same
    service.stop()
