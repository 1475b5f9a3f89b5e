"""A service beside a trainer: its weights by every way, its memory, its distance from training.

On one GPU both share it. With several, the trainer's side of a broadcast is on the second, because
NCCL refuses two ranks on one GPU; with one it is gloo.
"""

import asyncio
from pathlib import Path

import numpy as np
import torch
from conformance import ask
from machine import Figures, Machine, require
from on_device import device_of, mesh_of, synchronise
from safetensors.torch import load_file
from service import Service, engine_name, serving, write_model
from transformers import AutoModelForCausalLM

from agentrl.configs import ComputeConfig, LearnerConfig
from agentrl.databases.token_tree import TokenTree
from agentrl.inference.engine_protocol import Engine
from agentrl.inference.engines import engine_at
from agentrl.inference.memory import release_memory, resume_memory
from agentrl.inference.protocol import Generation
from agentrl.inference.weights.probes import CheckedUpdater
from agentrl.inference.weights.updates import PublishedWeights, update_services
from agentrl.inference.weights.ways import make_updater
from agentrl.launcher.placement import RELEASED
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.step.learner import Learner

_GIB = 2**30
_NEAR = 0.1  # nats between a service's logprob in bfloat16 and a plain forward's in float32
_APART = 10 * _NEAR  # at least, between what two sets of weights say of the same tokens
_MISMATCH = 0.015  # prime-rl's bound for the KL divergence between service and trainer


def update(machine: Machine, figures: Figures) -> None:
    """Seconds of each way; after each the service generates with the logprobs of what was sent."""
    figures.add(engine=engine_name(machine))
    folders = [write_model(machine, f"weights-{seed}", seed) for seed in range(2)]
    with serving(machine, folders[0]) as service:
        wrong = asyncio.run(_updates(machine, figures, service, folders))
    require(not wrong, "; ".join(wrong))


async def _updates(
    machine: Machine, figures: Figures, service: Service, folders: list[Path]
) -> list[str]:
    """Update the service by each way; what is wrong afterwards."""
    wrong = []
    async with engine_at(service.url) as engine:
        await _require_apart(machine, figures, engine, folders)
        for version, way in enumerate(("disk", "tensor", "distributed"), 1):
            folder = folders[version % 2]
            tensors = dict(sorted(load_file(folder / "model.safetensors").items()))
            figures.add(gb=round(sum(tensor.nbytes for tensor in tensors.values()) / 1e9, 3))
            on_second = machine.gpus > 1 and way == "distributed"
            device = torch.device("cuda", 1) if on_second else torch.device("cpu")
            updater = make_updater(way, device)
            weights = PublishedWeights(version, folder, tensors)
            (checked,) = await update_services(CheckedUpdater(updater), [engine], weights)
            # Once more, as all later updates are: without the check, over what the first set up.
            (outcome,) = await update_services(updater, [engine], weights)
            await updater.close()
            figures.add(**{f"{way}_s": round(outcome.stall_s, 3)})
            errors = [one.error for one in (checked, outcome) if one.error]
            if errors:
                wrong.append(f"{way}: {'; '.join(errors)}")
                continue
            made = await engine.generate(ask(range(5, 25), 16))
            distance = _distance(machine, folder, made)
            figures.add(**{f"{way}_nats": round(distance, 4)})
            if not distance <= _NEAR:
                wrong.append(f"{way}: logprobs are {distance:.2g} nats from those of the weights")
    return wrong


async def _require_apart(
    machine: Machine, figures: Figures, engine: Engine, folders: list[Path]
) -> None:
    """Before any update: weights that are not those of the service are told from them."""
    made = await engine.generate(ask(range(5, 25), 16))
    own, other = (_distance(machine, folder, made) for folder in folders)
    figures.add(start_nats=round(own, 4), apart_nats=round(other, 4))
    require(own <= _NEAR, f"logprobs are {own:.2g} nats from those of the weights it started with")
    require(
        other > _APART,
        f"the two sets of weights are {other:.2g} nats apart, too near to tell which are served",
    )


def _distance(machine: Machine, folder: Path, made: Generation) -> float:
    """The mean distance in nats of logprobs from those of a plain forward in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.to(device_of(machine)).eval()
    output = torch.tensor(made.output_ids, device=device_of(machine))
    prompt = torch.arange(5, 25, device=device_of(machine))
    with torch.inference_mode():
        logits = model(torch.cat([prompt, output])[None]).logits[0, len(prompt) - 1 : -1]
    exact = logits.float().log_softmax(-1).gather(-1, output[:, None])[:, 0].cpu()
    return float((exact - torch.tensor(made.output_logprobs)).abs().mean())


def mismatch(machine: Machine, figures: Figures) -> None:
    """KL between the service that samples and the trainer in bfloat16, before any update."""
    figures.add(engine=engine_name(machine))
    folder = write_model(machine, "model", seed=0)
    count, tokens = (64, 256) if machine.on_gpu else (8, 48)
    with serving(machine, folder) as service:
        prompts, made = asyncio.run(_sample(service, count, tokens))
    rows = [[_row(prompt, one)] for prompt, one in zip(prompts, made, strict=True)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    compute = ComputeConfig(bf16=True, micro_batch_tokens=8 * (tokens + 16))
    learner = Learner(model.to(device_of(machine)), mesh_of(machine), LearnerConfig(compute), 1)
    taken = learner.step(rows)
    figures.add(
        mismatch_kl=taken.mismatch_kl,
        mismatch_kl_k1=taken.mismatch_kl_k1,
        negative_logprob=taken.negative_logprob,
        tokens=sum(len(one.output_ids) for one in made),
    )
    require(
        taken.mismatch_kl < _MISMATCH,
        f"the KL divergence of service and trainer is {taken.mismatch_kl:.2g}, not below "
        f"{_MISMATCH}",
    )


async def _sample(
    service: Service, count: int, tokens: int
) -> tuple[list[list[int]], list[Generation]]:
    """Answers to random prompts, at temperature 1."""
    random = np.random.default_rng(0)
    prompts = [random.integers(2, 400, 16).tolist() for _ in range(count)]
    async with engine_at(service.url) as engine:
        asked = [engine.generate(ask(prompt, tokens)) for prompt in prompts]
        return prompts, list(await asyncio.gather(*asked))


def _row(prompt: list[int], made: Generation) -> TrainingSequence:
    tokens = [*prompt, *made.output_ids]
    line = TokenTree.line(
        np.array(tokens, dtype=np.int32),
        mask=np.arange(len(tokens)) >= len(prompt),
        advantages=1.0,
        logprobs=np.array([*[0.0] * len(prompt), *made.output_logprobs], dtype=np.float32),
    )
    return TrainingSequence(line, temperature=1.0, row_tokens=len(made.output_ids))


def memory(machine: Machine, figures: Figures) -> None:
    """What service and trainer hold on the GPU, and what is left of it when each makes room.

    In the stand-in the memory is the host's, of which a service gives little back.
    """
    figures.add(engine=engine_name(machine))
    folder = write_model(machine, "model", seed=0)
    before = _used_gib(machine)
    with serving(machine, folder) as service:
        held, released, resumed = asyncio.run(_released(machine, service, before))
    gone = _used_gib(machine) - before
    figures.add(
        service_gib=held, service_released_gib=released, service_resumed_gib=resumed,
        service_ended_gib=round(gone, 2),
    )  # fmt: skip
    if machine.on_gpu:
        require(
            released <= RELEASED / _GIB,
            f"a service that gave its memory back still holds {released} of {held} GiB; placement "
            f"plans with {RELEASED / _GIB:.1f}",
        )
        require(
            abs(resumed - held) <= 0.1 * held + 0.5,
            f"a service that took its memory again holds {resumed} GiB, and held {held} before",
        )
        require(gone <= 0.3, f"a service that has ended still holds {gone:.2f} GiB")
    _train(machine, figures, folder)


async def _released(
    machine: Machine, service: Service, before: float
) -> tuple[float, float, float]:
    """GiB that the service holds, when released, and when resumed. It must answer as before."""

    def held() -> float:
        used = _used_gib(machine) if machine.on_gpu else service.resident_bytes() / _GIB
        return round(used - (before if machine.on_gpu else 0.0), 2)

    async with engine_at(service.url) as engine:
        first = await _greedy(engine)
        holding = held()
        await release_memory(engine)
        released = held()
        await resume_memory(engine)
        await engine.continue_()
        second = await _greedy(engine)
        require(first == second, f"after its memory came back it answers {second}, not {first}")
        return holding, released, held()


async def _greedy(engine: Engine) -> tuple[int, ...]:
    return tuple((await engine.generate(ask(range(5, 25), 8, temperature=0.0))).output_ids)


def _train(machine: Machine, figures: Figures, folder: Path) -> None:
    """A step as a trainer takes it, and what the trainer holds after it for services to share."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    compute = ComputeConfig(bf16=True, micro_batch_tokens=2048)
    learner = Learner(model.to(device_of(machine)), mesh_of(machine), LearnerConfig(compute), 1)
    random = np.random.default_rng(0)
    made = [random.integers(2, 400, 512 if machine.on_gpu else 64) for _ in range(8)]
    line = [
        TrainingSequence(
            TokenTree.line(ids.astype(np.int32), mask=np.arange(len(ids)) > 0, advantages=1.0,
                           logprobs=-6.0),
            temperature=1.0, row_tokens=len(ids),
        )
        for ids in made
    ]  # fmt: skip
    learner.step([[sequence] for sequence in line])
    synchronise(machine)
    if not machine.on_gpu:
        return
    peak = torch.cuda.max_memory_reserved() / _GIB
    torch.cuda.empty_cache()
    kept, reserved = torch.cuda.memory_allocated() / _GIB, torch.cuda.memory_reserved() / _GIB
    weights = sum(parameter.numel() for parameter in learner.model.parameters()) * 4 / _GIB
    figures.add(
        trainer_peak_gib=round(peak, 2), trainer_between_steps_gib=round(reserved, 2),
        trainer_state_gib=round(3 * weights, 2),  # weights and AdamW's two moments
    )  # fmt: skip
    require(
        kept <= 1.1 * 3 * weights + 0.2,
        f"between steps the trainer's tensors take {kept:.1f} GiB, and its state {3 * weights:.1f}",
    )
    require(
        reserved <= 1.2 * kept + 0.2,
        f"between steps the trainer has {reserved:.1f} GiB for tensors of {kept:.1f} GiB",
    )


def _used_gib(machine: Machine) -> float:
    """What all processes together have taken of the first GPU, as nvidia-smi says; 0 on a CPU."""
    if not machine.on_gpu:
        return 0.0
    free, total = torch.cuda.mem_get_info(0)
    return (total - free) / _GIB
