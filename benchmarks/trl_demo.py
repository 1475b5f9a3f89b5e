"""TRL's GRPOTrainer on the demo: its model, tasks, tools in the trainer's process, and rows a step.

A process of its own for `time_to_success.py`:

    python benchmarks/trl_demo.py '{"steps": 40, "seed": 0, "tool_seconds": 0.0}'

Prints a JSON object for each step (`time`, `step`, `reward`) and each evaluation (`time`, `step`,
`held_out`); times are seconds since the epoch. The prompt lists the tools in the order that the
demo's model was taught, because TRL sorts them by name, which costs the model half of its success.
"""

import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # of environments, which are experimental

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

DEMO = Path(__file__).parents[1] / "assets" / "demo"
sys.path.insert(0, str(DEMO))
from warehouse import Warehouse, draw_seconds, draw_warehouse  # noqa: E402

ROWS = 128
TOOLS_LINE = "{{- '\\nTools: find(item) stock(bin) add(a,b) sub(a,b)' }}"
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True)
class Settings:
    """What one run is made of. `tool_seconds`: median of a call's duration."""

    steps: int
    seed: int
    tool_seconds: float = 0.0
    eval_steps: int = 10
    eval_rollouts: int = 4


def environment(tool_seconds: float) -> type[Any]:
    """The demo's four tools as TRL wants them: methods with docstrings."""

    # TRL calls the tools of different rollouts one after the other, coroutines too.
    def pause() -> None:
        if tool_seconds:
            time.sleep(draw_seconds(tool_seconds))

    class Tools:
        """The tools over one task's warehouse."""

        warehouse: Warehouse

        def reset(self, task_id: str, **_: object) -> None:
            self.warehouse = draw_warehouse(0, task_id)

        def find(self, item: str) -> str:
            """The bin that holds an item.

            Args:
                item: its name
            """
            pause()
            found = self.warehouse.bin_of.get(item) if isinstance(item, str) else None
            if found is None:
                raise ValueError(f"no item {str(item)[:20]!r}")
            return found

        def stock(self, bin: str) -> str:
            """The number of parts in a bin.

            Args:
                bin: its name
            """
            pause()
            parts = self.warehouse.stock_of.get(bin) if isinstance(bin, str) else None
            if parts is None:
                raise ValueError(f"no bin {str(bin)[:20]!r}")
            return str(parts)

        def add(self, a: int, b: int) -> str:
            """a plus b.

            Args:
                a: a
                b: b
            """
            pause()
            return str(int(a) + int(b))

        def sub(self, a: int, b: int) -> str:
            """a minus b.

            Args:
                a: a
                b: b
            """
            pause()
            return str(int(a) - int(b))

    return Tools


def success(completions: list[Any], answer: list[str], **_: object) -> list[float]:
    """1 for the right answer in the last message, as the demo's scorer gives it."""
    scores = []
    for messages, right in zip(completions, answer, strict=True):
        last = messages[-1]
        text = (last.get("content") or "") if last["role"] == "assistant" else ""
        found = _ANSWER.findall(text)
        scores.append(float(bool(found) and found[-1].strip() == right))
    return scores


class Report(TrainerCallback):
    """Prints what is measured."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for name, key in (("reward", "reward"), ("held_out", "eval_reward")):
            if key in (logs or {}):
                said = {"time": time.time(), "step": state.global_step, name: logs[key]}
                print(json.dumps(said), flush=True)


def tasks(file: str) -> Dataset:
    """The tasks of one of the demo's files."""
    lines = [json.loads(line) for line in (DEMO / file).read_text().splitlines()]
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": line["query"]}],
                "answer": line["answer"],
                "task_id": line["id"],
            }
            for line in lines
        ]
    )


def run(settings: Settings) -> None:
    """Train the demo."""
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "model")
    tokenizer.response_template = qwen3_template
    template = tokenizer.chat_template
    start = template.index("{{- '\\nTools:' }}")
    end = template.index("{%- endif %}", start)
    tokenizer.chat_template = template[:start] + TOOLS_LINE + template[end:]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        gradient_accumulation_steps=1,
        num_generations=8,
        num_generations_eval=settings.eval_rollouts,
        eval_strategy="steps",
        eval_steps=settings.eval_steps,
        eval_on_start=True,
        max_completion_length=320,
        max_tool_calling_iterations=5,
        max_steps=settings.steps,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        adam_epsilon=1e-5,
        max_grad_norm=1.0,
        beta=0.0,
        temperature=1.0,
        loss_type="dapo",
        seed=settings.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        use_vllm=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32),
        reward_funcs=success,
        args=config,
        train_dataset=tasks("train.jsonl"),
        eval_dataset=tasks("heldout.jsonl"),
        processing_class=tokenizer,
        environment_factory=environment(settings.tool_seconds),
        callbacks=[Report()],
    )
    trainer.train()


if __name__ == "__main__":
    run(Settings(**json.loads(sys.argv[1])))
