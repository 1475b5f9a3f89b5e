"""A service that leaves out tensors is found at its first update, whichever kind it leaves out."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from counting_engine import CountingEngine
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.inference.protocol import FRESH_VERSION, RequestRejected
from agentrl.inference.weights.buckets import in_buckets
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.probes import CheckedUpdater, layer, plan_rounds
from agentrl.inference.weights.updates import PublishedWeights, update_services

EXPERTS = [
    f"model.layers.{number}.mlp.experts.{expert}.{part}.weight"
    for number in (1, 2)
    for expert in range(3)
    for part in ("gate_proj", "up_proj", "down_proj")
]
NAMES = [
    "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight",
    *(f"model.layers.{n}.self_attn.{p}.weight" for n in range(3) for p in ("q_a", "kv_a", "o")),
    "model.layers.0.mlp.gate_proj.weight",
    *EXPERTS,
]  # fmt: skip


class FusingEngine(CountingEngine):
    """Stacks tensors under names of its own, and leaves out those that match `unknown`.

    q_a and kv_a are one tensor, which is loaded if both come in the same request.
    """

    def __init__(self, unknown: str = "nothing") -> None:
        super().__init__(f"counting+http://{unknown}")
        self.unknown = unknown
        self.tensors: dict[str, Tensor] = {}
        self.refused: Path | None = None
        self.loads: list[tuple[int, set[str]]] = []

    async def update_weights_from_disk(
        self, path: str | Path, version: int, *, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        if path == self.refused:
            raise RequestRejected(f"{path}: no such folder")
        given = load_file(Path(path) / "model.safetensors")
        self.loads.append((version, set(given)))
        self.take({name: t for name, t in given.items() if not re.search(self.unknown, name)})
        await super().update_weights_from_disk(path, version)

    def take(self, given: Mapping[str, Tensor]) -> None:
        for name, tensor in given.items():
            if "q_a" in name and name.replace("q_a", "kv_a") in given:
                both = [tensor, given[name.replace("q_a", "kv_a")]]
                self.tensors[name.replace("q_a", "fused_a")] = torch.cat(both)
            elif "_a." not in name:
                self.tensors[name.replace("self_attn", "attention")] = tensor

    async def weight_checksums(self, *, timeout_s: float = 600.0) -> dict[str, str]:
        held = {name: tensor.numpy().tobytes() for name, tensor in self.tensors.items()}
        return {name: hashlib.sha256(content).hexdigest() for name, content in held.items()}


@pytest.fixture
def weights(tmp_path: Path) -> PublishedWeights:
    torch.manual_seed(0)
    tensors = {name: torch.randn(2, 3) for name in NAMES}
    (tmp_path / "v7").mkdir()
    save_file(tensors, tmp_path / "v7" / "model.safetensors")
    return PublishedWeights(7, tmp_path / "v7", tensors)


async def test_a_service_that_takes_all_has_all_and_is_probed_once(
    weights: PublishedWeights, tmp_path: Path
) -> None:
    engine, updater = FusingEngine(), CheckedUpdater(DiskUpdater())
    engine.take(weights.tensors)  # it serves the very weights that are published
    (outcome,) = await update_services(updater, [engine], weights)
    assert outcome.ok and not updater.skipped
    *probes, (version, names) = engine.loads
    assert (version, names) == (7, set(NAMES))
    assert {version for version, _ in probes} == {FRESH_VERSION}
    for name, tensor in weights.tensors.items():
        assert "_a." in name or torch.equal(
            engine.tensors[name.replace("self_attn", "attention")], tensor
        )
    assert [path.name for path in tmp_path.iterdir()] == ["v7"]
    before = len(engine.loads)
    (outcome,) = await update_services(updater, [engine], weights)
    assert outcome.ok and len(engine.loads) == before + 1


@pytest.mark.parametrize(
    "unknown",
    [r"experts\.\d+\.up_proj", "model.norm", "o.weight", "lm_head", "0.mlp.gate_proj", "kv_a"],
)
async def test_a_kind_that_is_left_out_is_named_and_the_service_gets_no_work(
    weights: PublishedWeights, unknown: str
) -> None:
    engine, updater = FusingEngine(unknown), CheckedUpdater(DiskUpdater())
    engine.take(weights.tensors)
    (outcome,) = await update_services(updater, [engine], weights)
    assert outcome.mixed and "leaves out" in (outcome.error or "")
    named = updater.skipped[engine.url]
    assert all(re.search(unknown if unknown != "kv_a" else "_a", name) for name in named) and named
    assert await engine.weight_version() == FRESH_VERSION


async def test_what_an_earlier_check_left_is_no_reason_to_refuse_a_service(
    weights: PublishedWeights,
) -> None:
    engine = FusingEngine()
    engine.take({name: -tensor - 1 for name, tensor in weights.tensors.items()})
    (outcome,) = await update_services(CheckedUpdater(DiskUpdater()), [engine], weights)
    assert outcome.ok


async def test_a_service_that_fails_after_it_was_probed_has_mixed_weights(
    weights: PublishedWeights,
) -> None:
    engine = FusingEngine()
    engine.take(weights.tensors)
    gone = PublishedWeights(7, weights.folder / "gone", weights.tensors)
    engine.refused = gone.folder
    (outcome,) = await update_services(CheckedUpdater(DiskUpdater()), [engine], gone)
    assert outcome.mixed and "no such folder" in (outcome.error or "")


def test_each_kind_is_probed_once_and_no_layer_twice_in_a_round() -> None:
    rounds = plan_rounds(NAMES)
    probed = [re.sub(r"\.\d+", "", name) for names in rounds for name in names]
    assert sorted(probed) == sorted({re.sub(r"\.\d+", "", name) for name in NAMES})
    for names in rounds:
        assert len({layer(name) for name in names}) == len(names)


def test_a_module_is_sent_whole_if_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.zeros(2, 3) for name in NAMES}
    monkeypatch.setattr("agentrl.inference.weights.buckets.BUCKET_BYTES", 4 * 24)
    buckets = [list(bucket) for bucket in in_buckets(tensors)]
    assert [name for bucket in buckets for name in bucket] == NAMES
    assert max(map(len, buckets)) == 4
    for number in range(3):
        attention = f"model.layers.{number}.self_attn."
        assert sum(any(n.startswith(attention) for n in bucket) for bucket in buckets) == 1
