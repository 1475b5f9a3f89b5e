"""The flags that each example script starts from. Flags given after them take precedence.

They make the demo of `assets/demo` learn on two cores; a run of one's own overrides what differs.
"""

from dataclasses import dataclass

DEMO_ROWS_PER_STEP = 128


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


_DEMO = (
    "--model_name_or_path", "assets/demo/model",
    "--train_file", "assets/demo/train.jsonl",
    "--eval_file", "assets/demo/heldout.jsonl",
    "--mcp_server_name", "warehouse",
    "--num_generations", "8",
    "--max_turns", "6",
    "--max_tokens", "384",
    "--max_new_tokens", "48",
    "--tool_timeout", "10",
    "--record_timeout", "120",
    "--lease_seconds", "20",
    "--max_staleness", "2",
    "--max_concurrent_samples_per_process", "64",
    "--micro_batch_tokens", "4096",
    "--max_steps", "40",
    "--eval_steps", "10",
    "--eval_attempts", "4",
    "--save_steps", "10",
    "--learning_rate", "5e-4",
    "--weight_decay", "0",
    "--max_grad_norm", "1.0",
)  # fmt: skip

GRPO = Preset(
    "grpo",
    "GRPO",
    (
        *_DEMO,
        "--loss_calculator", "GRPO",
        "--advantage", "mean_std",
        "--epsilon", "0.2",
    ),
)  # fmt: skip

# Zheng et al. 2025 (arXiv 2512.01374): no scaling by the group's deviation and no division by the
# length, so that the token sum is a first-order approximation of the sequence's reward; the weight
# between trainer and sampler is truncated at 5.
MINIRL = Preset(
    "minirl",
    "MINIRL",
    (
        *_DEMO,
        "--loss_calculator", "MINIRL",
        "--advantage", "mean",
        "--skip_length_normalization", "true",
        "--epsilon", "0.2",
        "--epsilon_higher", "0.27",
        "--importance_weight_cap_ratio", "5",
    ),
)  # fmt: skip

PRESETS = {preset.name: preset for preset in (GRPO, MINIRL)}


def preset_flags(preset: Preset, num_processes: int) -> list[str]:
    """The preset's flags for so many trainer processes: a step has the same rows however many."""
    rows = max(1, DEMO_ROWS_PER_STEP // num_processes)
    return [*preset.flags, "--per_device_train_batch_size", str(rows)]
