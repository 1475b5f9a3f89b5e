"""`from rollout.scheduler import SamplingScheduler`: refused where it is called, as a launch runs
the samplers."""

from typing import Any

from agentrl.configs import ConfigError


class SamplingScheduler:
    """Raises `ConfigError`, which says how samplers are run instead."""

    def __init__(self, *arguments: object, **named: Any) -> None:
        kind = named.get("sampler_class")
        name = getattr(kind, "__name__", "NAME")
        raise ConfigError(
            "SamplingScheduler is not called by a file: give the file as --agent_module, "
            f"--agent_name {name}, and the tasks of its dataset as lines of --train_file; "
            "`src/main.py` and `src/sampling.py` then run its samplers"
        )
