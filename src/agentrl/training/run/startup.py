"""Checks of folder, checkpoint and launch before a run begins, without the database.

A failed check raises an error of one sentence.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from agentrl.configs import Config, ConfigError, LearnerConfig, trackers_of
from agentrl.configs.flags import flags_named
from agentrl.configs.run_flags import flat_flags, refuse_fixed, stored_flags
from agentrl.databases.documents import TrainerStart
from agentrl.training.checkpoint.layout import lineage_checkpoints, read_state
from agentrl.training.model.loading import empty_model
from agentrl.training.model.model_folder import load_tokenizer
from agentrl.training.parallel import ParallelSizes, check_degrees
from agentrl.training.parallel.agreement import Agreement
from agentrl.training.parallel.compilation import check_compiler

# Flags that may differ between machines.
_PLACES = flags_named(
    "agent_config_path", "critic_model_name_or_path", "db_connection_string", "eval_file",
    "inference_api_key_env", "inference_urls", "mcp_auth_token", "mcp_manager_url",
    "model_name_or_path", "output_dir", "reference_model_name_or_path", "resume_from_checkpoint",
    "train_file",
)  # fmt: skip


def check_input(
    config: Config, accelerator: Accelerator
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel, ParallelSizes]:
    """Check the input of this process. Returns the tokenizer, the empty model and the degrees.

    Raises `CheckpointError` or `ConfigError`.
    """
    trackers_of(config.run.report_to)
    tokenizer = load_tokenizer(config.model.model_name_or_path)
    check_writable(config.output)
    checkpoint_to_resume(config, [])  # only checked; the coordinator chooses it
    if config.compute.compile:
        check_compiler(accelerator.device)
    sizes = ParallelSizes.of(config.parallel, accelerator.num_processes)
    model = empty_model(config.model)
    check_degrees(model, sizes, config.parallel.cp_mode)
    return tokenizer, model, sizes


def checkpoint_to_resume(config: Config, starts: Sequence[TrainerStart]) -> Path | None:
    """The checkpoint of `--resume_from_checkpoint`; None to begin from the start weights.

    `starts`: where the run's earlier trainers began. Raises `CheckpointError` or `ConfigError`.
    """
    checkpoint = _chosen_checkpoint(config, starts)
    if checkpoint is None:
        return None
    saved = read_state(checkpoint).config
    refuse_fixed(flat_flags(saved), stored_flags(config), str(checkpoint))
    if config.loss.loss_calculator == "PPO":
        saved_by = saved["loss"]["loss_calculator"]
        if saved_by != "PPO":
            raise ConfigError(
                f"--loss_calculator PPO: {checkpoint} was saved with {saved_by} and has no critic; "
                "begin anew with --resume_from_checkpoint false, or export it and start another "
                "run from its weights"
            )
    return checkpoint


def _chosen_checkpoint(config: Config, starts: Sequence[TrainerStart]) -> Path | None:
    wanted = config.checkpoint.resume_from_checkpoint
    if wanted is not None and wanted.lower() == "false":
        return None
    if wanted is None or wanted.lower() == "true":
        checkpoints = lineage_checkpoints(config.output, starts)
        if wanted is not None and not checkpoints:
            raise ConfigError(
                f"--resume_from_checkpoint true: there is no checkpoint in {config.output}"
            )
        return checkpoints[-1] if checkpoints else None
    run = read_state(Path(wanted)).run_name
    if run != config.run.run_name:
        raise ConfigError(
            f"--resume_from_checkpoint {wanted}: this checkpoint is of run {run!r}, whose rows are "
            "in another database; to begin a run with its weights, export it and give the folder "
            "as --model_name_or_path"
        )
    return Path(wanted)


def check_writable(output: Path) -> None:
    """Raise `ConfigError` if the run's folder cannot be made or written."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        raise ConfigError(f"--output_dir {output}: cannot be written ({error.strerror})") from None


def check_shared(output: Path, agreement: Agreement) -> None:
    """Raise `ConfigError` if processes do not share the run's folder. Collective.

    Each process writes a file of a checkpoint, which rank 0 must see.
    """

    def mark() -> Path:
        path = output / f".seen-by-all-{uuid4().hex}"
        path.touch()
        return path

    def see() -> None:
        if not marked.exists():
            raise ConfigError(
                f"--output_dir {output}: this machine does not see what process 0 writes there; "
                "give a folder on a disk that all machines share"
            )

    marked = agreement.from_main(mark)
    try:
        agreement.on_all(see)
    finally:
        agreement.from_main(lambda: marked.unlink(missing_ok=True))


def check_same_flags(config: Config, precision: str, agreement: Agreement) -> None:
    """Raise `ConfigError` if a process has other flags than rank 0. Collective.

    Processes with different steps or saves would deadlock. The flags of `_PLACES` may differ.
    `precision`: `mixed_precision` of Accelerate's config.
    """
    groups = asdict(config).values()
    flags = {name: value for group in groups for name, value in group.items()}
    ours = {name: value for name, value in flags.items() if name not in _PLACES}
    ours["mixed_precision"] = precision
    theirs = agreement.from_main(lambda: ours)

    def compare() -> None:
        for name, value in ours.items():
            if value != theirs[name]:
                raise ConfigError(
                    f"--{name} is {value} here and {theirs[name]} on process 0: launch the trainer "
                    "with the same flags on all machines"
                )

    agreement.on_all(compare)


def learner_config(config: Config, accelerator: Accelerator) -> LearnerConfig:
    """The learner's config. `mixed_precision: bf16` of Accelerate's config counts as `--bf16`."""
    learner = config.learner
    bf16 = learner.compute.bf16 or accelerator.mixed_precision == "bf16"
    return replace(learner, compute=replace(learner.compute, bf16=bf16))


def make_accelerator(config: Config) -> Accelerator:
    """Make the `Accelerator`, used for processes. Raises `ConfigError` for float16."""
    if config.compute.tf32:
        torch.set_float32_matmul_precision("high")
    accelerator = Accelerator(
        cpu=config.parallel.use_cpu or not torch.cuda.is_available(),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=timedelta(seconds=config.parallel.ddp_timeout))
        ],
    )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ConfigError(
            f"mixed_precision {accelerator.mixed_precision} in Accelerate's config: this trainer "
            "computes in float32 (no) or bf16"
        )
    return accelerator
