"""One training run whose sampling policy is a fixed number of optimizer steps old.

The project's engine samples and the project's learner trains, in one process and in turns. At step
t the engine has the weights after max(0, t - k) updates, so that every token of a run at staleness
k is k steps old when it is trained, but for those of its first k steps.
"""

import asyncio
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from sorting_task import ANSWER_TOKENS, PROMPT_TOKENS, Prompt, held_out, score, training_prompts
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoModelForCausalLM

from agentrl.configs import Config, parse_config
from agentrl.databases.documents import DBRecordData
from agentrl.databases.policies import Lineage
from agentrl.databases.token_tree import TokenTree
from agentrl.inference.engine.config import EngineConfig
from agentrl.inference.engine.engine import LocalEngine
from agentrl.inference.engine.http_api import PromptRequest
from agentrl.inference.engine.request import LiveRequest
from agentrl.inference.engine.sampling import TokenSampling
from agentrl.rollout.groups.advantages import mean, mean_std
from agentrl.training.data.sequences import row_sequences
from agentrl.training.parallel import make_mesh
from agentrl.training.step.learner import Learner

GROUPS, ROLLOUTS = 16, 8  # of a step
ESTIMATORS = {"mean": mean, "mean_std": mean_std}


@dataclass(frozen=True)
class Length:
    """How long a run is, and what is evaluated.

    tokens: sampled tokens after which it ends, with the step that reaches them
    curve_steps: steps from one evaluation of the curve to the next, of one answer to each prompt
    final: answers to each held-out prompt at the end
    """

    tokens: int = 120_000
    curve_steps: int = 10
    final: int = 16


class Sampler:
    """The engine, with the weights that it is given."""

    def __init__(self, folder: Path, seed: int) -> None:
        running = GROUPS * ROLLOUTS
        length = PROMPT_TOKENS + ANSWER_TOKENS
        self._engine = LocalEngine(
            EngineConfig(
                model_path=folder,
                context_length=length,
                max_running_requests=running,
                max_total_tokens=2 * running * length,
                weight_version="0",
                seed=seed,
            )
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        """While it is entered, requests are answered. Needs a running event loop."""
        task = asyncio.ensure_future(self._engine.run())
        try:
            yield
        finally:
            task.cancel()

    async def use(self, weights: dict[str, Tensor], version: int) -> None:
        """Sample with `weights` from now on."""
        if self._engine.scheduler.version != str(version):
            await self._engine.update_weights(lambda: weights, str(version), flush_cache=True)

    async def sample(self, prompts: Sequence[Prompt]) -> list[LiveRequest]:
        """An answer to each prompt, at temperature 1."""
        return await self._engine.generate(
            [
                PromptRequest(
                    rid=uuid.uuid4().hex,
                    input_ids=list(prompt),
                    sampling=TokenSampling(),
                    max_new_tokens=ANSWER_TOKENS,
                    end_ids=self._engine.limits.end_ids,
                    stop_strings=None,
                    return_logprob=True,
                    skip_special_tokens=False,
                    trim_stop=False,
                )
                for prompt in prompts
            ]
        )


class Trainer:
    """The learner of a configuration. Steps count its updates."""

    def __init__(self, folder: Path, config: Config) -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        own = replace(config.learner, model=replace(config.model, model_name_or_path=None))
        self.learner = Learner(model, make_mesh(Accelerator(cpu=True)), own, total_steps=1)
        self.steps = 0

    def step(self, rows: Sequence[DBRecordData]) -> dict[str, float]:
        """One optimizer step. Returns what it says of how far off policy the rows were."""
        lineage = Lineage({version: version for version in range(self.steps + 1)})
        found = self.learner.step([row_sequences(row, lineage, self.steps) for row in rows])
        self.steps += 1
        names = ("staleness_mean", "mismatch_kl", "effective_sample_size", "clip_fraction")
        return {name: float(getattr(found, name)) for name in names}

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights, by their names in the model."""
        options = StateDictOptions(full_state_dict=True)
        state = get_model_state_dict(self.learner.model, options=options)
        return {name: tensor.clone() for name, tensor in state.items()}


def configuration(flags: Sequence[str], staleness: int) -> Config:
    """The configuration of a user's command line with these flags of the loss, checked as such."""
    return parse_config(
        [
            "--run_name", "staleness", "--model_name_or_path", "start", "--train_file", "tasks",
            "--max_tokens", str(PROMPT_TOKENS + ANSWER_TOKENS),
            "--max_new_tokens", str(ANSWER_TOKENS),
            "--num_generations", str(ROLLOUTS),
            "--micro_batch_tokens", "4096",
            "--max_staleness", str(staleness),
            "--adam_epsilon", "1e-5",  # the demo's
            *flags,
        ]
    )  # fmt: skip


def run(
    folder: Path, flags: Sequence[str], staleness: int, seed: int, length: Length
) -> dict[str, Any]:
    """Train the start model of `folder`. Returns the curve and the final success.

    The prompts of a step follow from the seed alone, so runs of a seed differ in nothing else than
    their flags and staleness.
    """
    return asyncio.run(_run(folder, configuration(flags, staleness), seed, length))


async def _run(folder: Path, config: Config, seed: int, length: Length) -> dict[str, Any]:
    sampler, judge = Sampler(folder, seed), Sampler(folder, seed + 1000)
    trainer = Trainer(folder, config)
    drawn = training_prompts(f"train {seed}")
    bound = config.staleness_bound
    ring = deque([(0, trainer.weights())], maxlen=bound + 1)  # the oldest first
    tokens, curve, off_policy = 0, [], []
    with sampler.running(), judge.running():
        while tokens < length.tokens:
            if trainer.steps % length.curve_steps == 0:
                curve.append([tokens, await _success(judge, ring[-1], 1)])
            version, weights = ring[0]
            await sampler.use(weights, version)
            prompts = [next(drawn) for _ in range(GROUPS)]
            requests = await sampler.sample([each for each in prompts for _ in range(ROLLOUTS)])
            rows = _rows(prompts, requests, version, config)
            tokens += sum(row.n_train_tokens for row in rows)
            off_policy.append(trainer.step(rows))
            ring.append((trainer.steps, trainer.weights()))
        final = await _success(judge, ring[-1], length.final)
    means = {
        name: sum(step[name] for step in off_policy) / len(off_policy) for name in off_policy[0]
    }
    worst = min(step["effective_sample_size"] for step in off_policy)
    return {
        "success": final,
        "curve": curve,
        "tokens": tokens,
        "steps": trainer.steps,
        **{name: round(value, 5) for name, value in means.items()},
        "effective_sample_size_min": round(worst, 5),
    }


async def _success(judge: Sampler, newest: tuple[int, dict[str, Tensor]], answers: int) -> float:
    """The share of right answers to the held-out prompts."""
    version, weights = newest
    await judge.use(weights, version)
    prompts = [prompt for prompt in held_out() for _ in range(answers)]
    said = await judge.sample(prompts)
    right = [score(p, one.output_ids) for p, one in zip(prompts, said, strict=True)]
    return sum(right) / len(right)


def _rows(
    prompts: Sequence[Prompt], requests: Sequence[LiveRequest], version: int, config: Config
) -> list[DBRecordData]:
    """The rows of groups whose rollouts stand together."""
    rows: list[DBRecordData] = []
    for group, prompt in enumerate(prompts):
        said = requests[group * ROLLOUTS : (group + 1) * ROLLOUTS]
        scores = [score(prompt, one.output_ids) for one in said]
        assert config.reward.advantage is not None
        advantages = ESTIMATORS[config.reward.advantage](scores)
        rows += [
            _row(f"{version}-{group}-{index}", group, prompt, one, reward, advantage, version)
            for index, (one, reward, advantage) in enumerate(
                zip(said, scores, advantages, strict=True)
            )
        ]
    return rows


def _row(
    id_: str,
    group: int,
    prompt: Prompt,
    said: LiveRequest,
    reward: float,
    advantage: float,
    version: int,
) -> DBRecordData:
    assert {span.version for span in said.spans} == {str(version)}
    trained = len(said.output_ids)
    return DBRecordData(
        id=id_,
        task=f"task-{group}",
        group_order=group,
        reward=reward,
        n_train_tokens=trained,
        cost=float(len(prompt) + trained),
        policy_versions=[version],
        temperature=1.0,
        tree=TokenTree.line(
            [*prompt, *said.output_ids],
            mask=[0] * len(prompt) + [1] * trained,
            advantages=advantage,
            logprobs=[0.0] * len(prompt) + said.output_logprobs,
            versions=version,
        ),
        prefix_hash=f"task-{group}",
    )
