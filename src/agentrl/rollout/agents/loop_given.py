"""The arguments of agent loops, under verl's names.

    ServerManager   the model: token ids in, token ids out
    constructor_arguments, run_fields   the run's settings, and the task

Loops select arguments by their parameters' names. `loop.py` runs the loops.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentrl.configs import Config
from agentrl.databases.documents import Task
from agentrl.rollout.agents.limits import Limits
from agentrl.rollout.chat import Message

_CONSTRUCTOR = (
    "server_manager", "tokenizer", "processor", "config", "trainer_config", "dataset_cls",
    "data_config", "dataset_config",
)  # fmt: skip


@dataclass(frozen=True)
class TokenOutput:
    """Output of `server_manager.generate`. `stop_reason`: "completed", or "length" (truncated)."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class Settings(dict[str, Any]):
    """Nested settings with access by attribute or `get`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"agent loops are given no setting {name!r}") from None


@dataclass(frozen=True)
class ServerManager:
    """The model, as agent loops call it.

    `ask`: generates from prompt ids with a token limit (None: the run's limits).
    `sampling_params`: the run's.
    """

    ask: Callable[[Sequence[int], int | None], Awaitable[TokenOutput]]
    sampling_params: Mapping[str, float]

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        **others: Any,
    ) -> TokenOutput:
        """Generate from token ids. Calls may run concurrently.

        `sampling_params`: the run's, plus `max_tokens` or `max_new_tokens`. `request_id` is
        ignored: all requests of a record go to the same service. Raises ValueError for other
        parameters and for images, and `LimitReached` at the record's limits.
        """
        unused = sorted(name for name, value in others.items() if value)
        if unused:
            raise ValueError(
                f"server_manager.generate takes token ids only, not {', '.join(unused)}"
            )
        return await self.ask(prompt_ids, self._max_new_tokens(sampling_params))

    def _max_new_tokens(self, given: Mapping[str, Any]) -> int | None:
        """The token limit among a loop's parameters. Raises ValueError if others differ from the
        run's: the trainer computes all logprobs at the run's temperature."""
        limit: int | None = None
        for name, value in given.items():
            if name in ("max_tokens", "max_new_tokens"):
                limit = value
            elif name != "logprobs" and value != self.sampling_params.get(name):
                raise ValueError(
                    f"sampling parameter {name} = {value!r} is not the run's: a loop may set "
                    "max_tokens, all others come from --preferred_sampling_params"
                )
        return limit


def check_constructor(loop: type[Any]) -> None:
    """Raise ValueError if the loop's constructor requires unknown parameters."""
    _taken(loop, dict.fromkeys(_CONSTRUCTOR), f"{loop.__name__}()")


def constructor_arguments(
    loop: type[Any], config: Config, manager: ServerManager, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The arguments for the loop's constructor, chosen by its parameters' names."""
    settings = _settings(config)
    values = (
        manager, tokenizer, None, settings, Settings(config=settings), None,
        Settings(config=settings.data), settings.data,
    )  # fmt: skip
    return _taken(loop, dict(zip(_CONSTRUCTOR, values, strict=True)), f"{loop.__name__}()")


def run_fields(loop: type[Any], task: Task, messages: Sequence[Message]) -> dict[str, Any]:
    """The task's fields for the loop's `run`, chosen by its parameters' names.

    Raises ValueError if it requires a field that the task lacks.
    """
    fields = {
        "index": task.seq,
        "agent_name": task.agent_name,
        "reward_model": {"ground_truth": task.answer},
        **task.fields,
        "query": task.query,
        "answer": task.answer,
        "raw_prompt": list(messages),
    }
    run = partial(loop.run, None, {})  # binds self and the sampling parameters
    return _taken(run, fields, f"{loop.__name__}.run of task {task.task_id}")


def _settings(config: Config) -> Settings:
    """The run's limits at their places in verl's configuration."""
    limits = Limits.of(config.sampling)
    return Settings(
        actor_rollout_ref=Settings(
            model=Settings(path=config.model.model_name_or_path),
            rollout=Settings(
                prompt_length=limits.max_prompt_tokens,
                response_length=limits.max_tokens,
                max_model_len=limits.max_tokens,
                multi_turn=Settings(
                    max_assistant_turns=limits.max_turns, max_user_turns=limits.max_turns
                ),
            ),
        ),
        data=Settings(apply_chat_template_kwargs=config.chat_template_options),
    )


def _taken(function: Callable[..., Any], given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The arguments in `given` that a function takes, by name.

    Raises ValueError if it requires others.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in given]
    if missing:
        raise ValueError(
            f"{what} wants {', '.join(missing)}; given are {', '.join(sorted(given.keys()))}"
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(given)
    return {p.name: given[p.name] for p in named if p.name in given}
