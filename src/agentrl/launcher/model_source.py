"""`--model` of `agentrl eval` and `agentrl sample`: a model folder, a checkpoint, or a run.

A run stands for its last checkpoint. A checkpoint is written as a model folder before it is served.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.configs import ConfigError, model_folder
from agentrl.configs.digests import model_digest
from agentrl.configs.flag import FlagClass
from agentrl.configs.flags import FLAGS, Value, flags_named
from agentrl.configs.parsing import Layer, read_flags
from agentrl.file_digest import Digest
from agentrl.launcher.presets import DEMO_TOOLS
from agentrl.launcher.run_folder import read_launch, refuse_withheld
from agentrl.training.checkpoint.layout import (
    STATE_FILE,
    CheckpointError,
    list_checkpoints,
    read_state,
)
from agentrl.training.model.export import export_checkpoint

# Of a run's flags, those that say how a trajectory is made, without the model and the tasks.
_HOW = {
    *(name for name, flag in FLAGS.items() if flag.belongs in (FlagClass.DATA, FlagClass.SAMPLING)),
    *flags_named("mcp_manager_url", "agent_config_path", "tool_timeout", "record_timeout"),
} - {*flags_named("model_name_or_path", "train_file", "eval_file", "seed")}


@dataclass(frozen=True)
class ModelSource:
    """A model with fixed weights.

    `given`: what the user wrote. `folder`: the model folder, or that from which the run of
    `checkpoint` started, which has config and tokenizer. `step`: optimizer steps of the weights.
    `run`: the folder of the run that trained it.
    """

    given: str
    folder: Path
    checkpoint: Path | None = None
    step: int = 0
    run: Path | None = None

    @property
    def path(self) -> Path:
        """Where the weights are."""
        return (self.checkpoint or self.folder).absolute()

    @property
    def name(self) -> str:
        """A short name for tables: the last two folders of its path."""
        return "/".join(self.path.parts[-2:])

    @property
    def digest(self) -> str:
        """Equal for equal weights."""
        if self.checkpoint is None:
            return model_digest(self.folder) or ""
        # A checkpoint is written once: run, step, flags and trainer tell it from any other.
        digest = Digest()
        for name in (STATE_FILE, ".metadata"):
            digest.part((self.checkpoint / name).read_bytes())
        return digest.text()

    def as_folder(self, within: Path) -> Path:
        """The model as a folder: its own, or a new one within a folder, which has the checkpoint.

        A checkpoint that was written there before is not written again. Raises `ConfigError`.
        """
        if self.checkpoint is None:
            return self.folder
        made = within / f"start-model-{self.digest[:8]}"
        if not made.is_dir():
            try:
                export_checkpoint(self.checkpoint, self.folder, made)
            except CheckpointError as error:
                raise ConfigError(str(error)) from None
        return made

    def flags(self) -> Layer | None:
        """The flags by which the run of a checkpoint makes trajectories; None for other models.

        Raises `ConfigError` if one of them is a secret, which is kept nowhere.
        """
        launch = read_launch(self.run) if self.run is not None else None
        if launch is None:
            return None
        refuse_withheld(launch, (), _HOW & launch.withheld.keys())
        of_run = read_flags(launch.flags).values
        how: dict[str, Value] = {name: of_run[name] for name in of_run if name in _HOW}
        if launch.demo_tools:
            how.setdefault("mcp_manager_url", DEMO_TOOLS)
        assert self.run is not None
        return Layer(f"launch of {self.run.name}", how)


def find_model(given: str, given_with: str = "--model") -> ModelSource:
    """The model that `given` names: a folder of a model, of a checkpoint or of a run, or a run.

    Raises `ConfigError` if there is none.
    """
    for folder in (Path(given), Path("output") / given):
        if (folder / "config.json").is_file():
            return ModelSource(given, folder)
        checkpoints = list_checkpoints(folder)
        if checkpoints:
            return _of_checkpoint(given, checkpoints[-1])
        if folder in list_checkpoints(folder.parent):
            return _of_checkpoint(given, folder)
    return ModelSource(given, model_folder(given, given_with))


def _of_checkpoint(given: str, checkpoint: Path) -> ModelSource:
    try:
        state = read_state(checkpoint)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    config: Mapping[str, Mapping[str, str]] = state.config
    base = model_folder(config["model"]["model_name_or_path"], f"{checkpoint}: its start model")
    return ModelSource(given, base, checkpoint, state.step, checkpoint.parent)
