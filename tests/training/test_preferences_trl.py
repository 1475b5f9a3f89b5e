"""A step on pairs is that of TRL's DPOTrainer, which reads the file's rows itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, ModelConfig, OptimizerConfig
from agentrl.configs.preferences import LOSS_TYPES, PreferenceConfig
from agentrl.databases.tree_file import TreeFile
from agentrl.rollout.demonstrations.prepare import Preparation, prepare_rows
from agentrl.training.data.sequences import TrainingSequence, tree_sequences
from agentrl.training.parallel import make_mesh
from agentrl.training.step.held_out import held_out
from agentrl.training.step.learner import Learner
from agentrl.training.step.statistics import PreferenceStatistics

DEMO = Path(__file__).parents[2] / "assets" / "demo" / "model"
# ChatML that ends with an answer's last token: TRL also trains what a template writes behind it.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = {"role": "user", "content": "How many parts are in bin E6?"}
MESSAGES = [
    ([QUESTION], "There are 91 parts.", "I do not know."),
    ([{"role": "system", "content": "Answer in one word."}, QUESTION], "91", "There are 91 of it"),
    ([QUESTION, {"role": "assistant", "content": "91"}, QUESTION], "91, as I said", "60"),
]
EXPLICIT = [
    {
        "prompt": prompt,
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }
    for prompt, chosen, rejected in MESSAGES
]
IMPLICIT = [
    {side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in EXPLICIT
]
TEXTS = [
    {"prompt": "bin E6:", "chosen": " 91 parts", "rejected": " 7"},
    {"prompt": "bin J1:", "chosen": " 60", "rejected": " none at all"},
]
IMPLICIT_TEXTS = [
    {side: row["prompt"] + row[side] for side in ("chosen", "rejected")} for row in TEXTS
]
SMOOTHING = {"robust": 0.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model with the template."""
    made = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(DEMO, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def reference(folder: Path) -> Path:
    """A reference that differs from the policy, so that no ratio is 1."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(folder.parent / "reference")
    return folder.parent / "reference"


def load(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def trl_step(
    folder: Path, reference: Path, rows: list[Any], loss_type: str, out: Path
) -> dict[str, float]:
    """What TRL logs of its only step on all rows."""
    import trl  # takes seconds, which every worker would spend to collect this module
    from datasets import Dataset

    trainer = trl.DPOTrainer(
        model=load(folder),
        ref_model=load(reference),
        args=trl.DPOConfig(
            output_dir=str(out), use_cpu=True, bf16=False, report_to="none", max_steps=1,
            per_device_train_batch_size=len(rows), logging_steps=1, max_length=None,
            gradient_checkpointing=False, save_strategy="no", loss_type=loss_type, beta=0.3,
            label_smoothing=SMOOTHING.get(loss_type, 0.0),
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    trainer.train()
    return dict(next(line for line in trainer.state.log_history if "grad_norm" in line))


def sequences(folder: Path, rows: list[Any], tmp_path: Path) -> list[list[TrainingSequence]]:
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = prepare_rows(file, tmp_path / "rows", Preparation(folder, {}, 512, pairs=True))
    assert not made.left_out
    trees = TreeFile(made.folder)
    return [tree_sequences(trees[index]) for index in range(len(trees))]


def learner(folder: Path, reference: Path, loss_type: str, tokens: int = 512) -> Learner:
    config = LearnerConfig(
        ComputeConfig(micro_batch_tokens=tokens),
        LossConfig(beta=0.3),
        OptimizerConfig(learning_rate=1e-4),
        preference=PreferenceConfig(loss_type, 0.3, SMOOTHING.get(loss_type, 0.0)),
    )
    return Learner(
        load(folder), make_mesh(Accelerator(cpu=True)), config, 1,
        reference=ModelConfig(model_name_or_path=str(reference)),
    )  # fmt: skip


def check(step: object, logged: dict[str, float]) -> None:
    """A step's statistics are what TRL logs, by its names."""
    assert isinstance(step, PreferenceStatistics)
    assert step.loss == pytest.approx(logged["loss"], rel=1e-4)
    assert step.grad_norm == pytest.approx(logged["grad_norm"], rel=1e-4)
    for name in ("chosen", "rejected", "margins", "accuracies"):
        assert step.rewards[name] == pytest.approx(logged[f"rewards/{name}"], rel=1e-4, abs=1e-5)
    for name in ("chosen", "rejected"):
        assert step.logps[name] == pytest.approx(logged[f"logps/{name}"], rel=1e-4)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_gradient_norm_and_metrics_of_a_step_are_those_of_trl(
    folder: Path, reference: Path, loss_type: str, tmp_path: Path
) -> None:
    rows = sequences(folder, EXPLICIT, tmp_path)
    logged = trl_step(folder, reference, EXPLICIT, loss_type, tmp_path / "trl")
    check(learner(folder, reference, loss_type).step(rows), logged)


@pytest.mark.parametrize(
    "rows", [IMPLICIT, TEXTS, IMPLICIT_TEXTS], ids=["implicit", "texts", "implicit texts"]
)
def test_each_layout_gives_the_step_that_trl_makes_of_it(
    folder: Path, reference: Path, rows: list[Any], tmp_path: Path
) -> None:
    logged = trl_step(folder, reference, rows, "sigmoid", tmp_path / "trl")
    check(learner(folder, reference, "sigmoid").step(sequences(folder, rows, tmp_path)), logged)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_pairs_that_micro_batches_divide_make_the_same_step(
    folder: Path, reference: Path, loss_type: str, tmp_path: Path
) -> None:
    rows = sequences(folder, EXPLICIT, tmp_path)
    whole = learner(folder, reference, loss_type)
    before = held_out(whole, [rows[:1], rows[1:]])
    step, divided = whole.step(rows), learner(folder, reference, loss_type, tokens=16).step(rows)
    assert isinstance(step, PreferenceStatistics) and isinstance(divided, PreferenceStatistics)
    assert divided.n_micro_batches > step.n_micro_batches
    for name in ("loss", "grad_norm"):
        assert getattr(divided, name) == pytest.approx(getattr(step, name), rel=1e-4)
    assert divided.rewards == pytest.approx(step.rewards, rel=1e-4)
    assert before.loss == pytest.approx(step.loss, rel=1e-4), "the same pairs, held out"
    assert before.rewards == pytest.approx(step.rewards, rel=1e-4)
    assert held_out(whole, [rows]).loss < before.loss
