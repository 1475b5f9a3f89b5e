"""A supervised step on conversations is that of TRL's SFTTrainer, which reads them itself."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, OptimizerConfig
from agentrl.databases.tree_file import TreeFile
from agentrl.rollout.demonstrations.prepare import Preparation, prepare_rows
from agentrl.training.data.sequences import tree_sequences
from agentrl.training.parallel import make_mesh
from agentrl.training.step.held_out import held_out
from agentrl.training.step.learner import Learner

DEMO = Path(__file__).parents[2] / "assets" / "demo" / "model"
# ChatML, with the marks by which transformers, and so TRL, finds what an assistant says.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n{% else %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATIONS = [
    [("user", "How many parts are in bin E6?"), ("assistant", "There are 91 parts.")],
    [
        ("system", "Answer in one word."), ("user", "bin J1?"), ("assistant", "60"),
        ("user", "and both together?"), ("assistant", "151"),
    ],
    [("user", "sub 91 60"), ("assistant", "31"), ("user", "thanks"), ("assistant", "you too")],
]  # fmt: skip


def folder_of(tmp_path: Path) -> Path:
    """The demo's model with the template."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    return [
        {"messages": [{"role": role, "content": text} for role, text in talk]}
        for talk in CONVERSATIONS
    ]


def trl_step(folder: Path, tmp_path: Path) -> tuple[float, float]:
    """Loss and gradient norm of TRL's only step on all conversations."""
    import trl  # takes seconds, which every worker would spend to collect this module
    from datasets import Dataset

    trainer = trl.SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        args=trl.SFTConfig(
            output_dir=str(tmp_path / "trl"), use_cpu=True, bf16=False, report_to="none",
            max_steps=1, per_device_train_batch_size=len(CONVERSATIONS), logging_steps=1,
            assistant_only_loss=True, max_length=None, gradient_checkpointing=False,
            save_strategy="no", learning_rate=1e-4,
        ),
        train_dataset=Dataset.from_list(conversations()),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    trainer.train()
    logged = next(line for line in trainer.state.log_history if "grad_norm" in line)
    return logged["loss"], logged["grad_norm"]


def test_loss_and_gradient_norm_of_a_step_are_those_of_trl(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(talk) + "\n" for talk in conversations()))
    trees = TreeFile(prepare_rows(file, tmp_path / "rows", Preparation(folder, {}, 512)).folder)
    rows = [tree_sequences(trees[index]) for index in range(len(trees))]
    config = LearnerConfig(
        ComputeConfig(micro_batch_tokens=512),
        LossConfig(loss_calculator="CrossEntropy"),
        OptimizerConfig(learning_rate=1e-4),
    )
    mesh = make_mesh(Accelerator(cpu=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    learner = Learner(model, mesh, config, 1)
    before = held_out(learner, [rows[:2], rows[2:]]).loss
    statistics = learner.step(rows)

    loss, norm = trl_step(folder, tmp_path)
    assert statistics.loss == pytest.approx(loss, rel=1e-4)
    assert statistics.grad_norm == pytest.approx(norm, rel=1e-4)
    assert before == pytest.approx(statistics.loss, rel=1e-5), "the same tokens, held out"
    assert held_out(learner, [rows]).loss < before
