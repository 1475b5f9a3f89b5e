"""The flags that the example scripts start from. Flags given after them take precedence.

A preset names an algorithm and does not repeat the values that the name brings
(`configs/losses.py`), so a later `--loss_calculator` brings its own values. Without a model of the
user's own, the demo of `assets/demo` is trained. The demo's flags make it learn within minutes on
two cores, and fit nothing else.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.configs import SamplingConfig
from agentrl.configs.parsing import Layer, as_words, config_of, merged, read_flags
from agentrl.launcher.deployment import REPOSITORY, Deployment

DEMO = REPOSITORY / "assets" / "demo"
DEMO_TOOLS = f"{DEMO / 'warehouse_tools.py'}:server"  # in every sampler
ROWS_PER_STEP = 128
DEMO_ORIGIN = "demo"


@dataclass(frozen=True)
class Preset:
    """What one script trains with."""

    name: str
    title: str
    flags: tuple[str, ...]

    @property
    def script(self) -> str:
        """The script that starts it."""
        return f"{self.name}_example.sh"


GRPO = Preset(
    name="grpo",
    title="GRPO",
    flags=("--loss_calculator", "GRPO"),
)

MINIRL = Preset(
    name="minirl",
    title="MINIRL",
    flags=("--loss_calculator", "MINIRL"),
)

EVALUATIONS = "eval"  # in the place of a preset, of a run of evaluations only; its default name
# Of `agentrl sample` without a trainer. The advantages are those that a GRPO trainer would take.
SAMPLE = Preset(
    name="sample",
    title="fixed weights",
    flags=("--loss_calculator", "GRPO", "--run_name", "sample", "--num_train_epochs", "1"),
)

PRESETS = {preset.name: preset for preset in (GRPO, MINIRL)}

_DEMO_FLAGS = (
    "--model_name_or_path", str(DEMO / "model"),
    "--train_file", str(DEMO / "train.jsonl"),
    "--eval_file", str(DEMO / "heldout.jsonl"),
    "--num_generations", "8",
    "--max_turns", "6",
    "--max_tokens", "384",
    "--max_new_tokens", "48",
    "--tool_timeout", "10",
    "--record_timeout", "120",
    "--lease_seconds", "20",
    "--micro_batch_tokens", "4096",
    # Late in the run most groups are all right. Dropping them would multiply the sampling per step.
    "--drop_zero_advantage", "false",
    "--max_steps", "40",
    "--eval_steps", "10",
    "--eval_rollouts", "4",
    "--save_steps", "10",
    # Constant, and a large epsilon: with the usual 1e-8 Adam blows up the noise of weights that
    # get almost no gradient, and success dips.
    "--learning_rate", "5e-4",
    "--adam_epsilon", "1e-5",
)  # fmt: skip


def launch_layers(
    preset: Preset,
    run: str,
    own: Sequence[Layer],
    deployment: Deployment,
    gpus: int,
    placed: Sequence[Layer] = (),
) -> list[Layer]:
    """All flags of a launch, from the lowest: the preset's lie under the user's `own`.

    `gpus`: of each machine that train. `placed`: flags that follow from their placement.
    """
    own = [*placed, *own, Layer("command line", {"run_name": run})]
    config = config_of(merged(own))
    parallel, group = config.parallel, config.sampling.num_generations
    trainers = deployment.trainer_processes(0 if parallel.use_cpu else gpus)
    data_ranks = max(1, trainers // parallel.processes_per_rank)
    return [*preset_layers(preset, data_ranks, demo=is_demo(own), group=group), *own]


def is_demo(own: Sequence[Layer]) -> bool:
    """Whether the demo is trained, because the user gives no model."""
    return "model_name_or_path" not in merged(own)


def preset_layers(
    preset: Preset, data_ranks: int, *, demo: bool, group: int = SamplingConfig.num_generations
) -> list[Layer]:
    """The preset's flags. `group`: rollouts of a task, of which a step has whole groups."""
    rows = rows_of_each(data_ranks, group)
    flags = [*preset.flags, "--per_device_train_batch_size", str(rows)]
    layer = read_flags(flags, preset.name)
    return [read_flags(_DEMO_FLAGS, DEMO_ORIGIN), layer] if demo else [layer]


def preset_flags(preset: Preset, data_ranks: int, *, demo: bool) -> list[str]:
    """`preset_layers` as words of a command line."""
    return as_words(preset_layers(preset, data_ranks, demo=demo))


def rows_of_each(data_ranks: int, group: int) -> int:
    """Rows of a step for each rank, so that all have whole groups of about `ROWS_PER_STEP` rows.

    Groups are not whole where that would need more than twice as many.
    """
    least = group // math.gcd(group, data_ranks)
    whole = least * max(1, round(ROWS_PER_STEP / (least * data_ranks)))
    if whole * data_ranks <= 2 * ROWS_PER_STEP:
        return whole
    return max(1, ROWS_PER_STEP // data_ranks)
