"""Generates docs/guides/deployment.md's table of placements: `python scripts/placement_page.py`.

It plans launches of known models on GPUs that are only described, from the models' configs.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentrl.configs import parse_config
from agentrl.launcher.deployment import Deployment
from agentrl.launcher.gpu_plan import asked_of, would_fit
from agentrl.launcher.inventory import GIB, Inventory, described
from agentrl.launcher.model_sizes import sizes_of
from agentrl.launcher.placement import Placement, place

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "training"))

from published_models import MODELS  # noqa: E402

PAGE = ROOT / "docs" / "guides" / "deployment.md"
MARKER = "<!-- From here on written by scripts/placement_page.py -->\n"
END = "<!-- Until here written by scripts/placement_page.py -->\n"
NAMES = ("Qwen3-0.6B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B")
GPUS = (
    "1x24", "1x80", "1x141", "2x24", "2x80", "2x141", "8x24", "8x80", "8x141", "2x8x80", "2x8x141",
)  # fmt: skip
_HEAD = "| model | GPUs × GiB | train | serve | micro-batch | peak | between |"


def table() -> Iterator[str]:
    """The lines of the table."""
    yield from (_HEAD, "| --- | --- | --- | --- | ---: | ---: | ---: |")
    given = {"max_tokens": 16384}
    config = parse_config(["--max_tokens", "16384"])
    for name in NAMES:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(MODELS[name])
        sizes = sizes_of(model, config, MODELS[name].max_position_embeddings)
        for gpus in GPUS:
            inventory = described(gpus)
            asked = asked_of(config, given, Deployment(), inventory, bf16=True)
            plan = place(inventory, sizes, asked)
            where = gpus.replace("x", " × ")
            if plan is None:
                fitting = "; ".join(would_fit(inventory, sizes, asked)) or "nor would more GPUs"
                yield f"| {name} | {where} | does not fit: {fitting} | | | | |"
            else:
                yield f"| {name} | {where} | {_cells(plan, inventory)} |"


def _cells(plan: Placement, inventory: Inventory) -> str:
    train, serve = plan.train, plan.serve
    assert serve is not None
    degrees = f"dp {train.dp}" + "".join(
        f" × {name} {degree}" for name, degree in (("tp", train.tp), ("cp", train.cp)) if degree > 1
    )
    expert = f", ep {train.ep}" if train.ep > 1 else ""
    how = ", in turns" if plan.in_turns else ""
    idle = f"; {len(plan.idle_gpus)} idle" if plan.idle_gpus else ""
    size = f"{serve.tp} GPU{'s' * (serve.tp > 1)}, {serve.share * inventory.free / GIB:.0f} GiB"
    again = ", checkpointing" if train.checkpointing else ""
    return (
        f"{train.gpus} GPU{'s' * (train.gpus > 1)}: {degrees}{expert}{again} | "
        f"{serve.count} × {size}{how}{idle} | "
        f"{train.tokens:,} | {train.peak / GIB:.1f} | {train.between / GIB:.1f}"
    )


def rewritten(page: str) -> str:
    """Return the page with the table between its markers."""
    before, _, after = page.partition(MARKER)
    _, end, after = after.partition(END)
    return before + MARKER + "\n" + "\n".join(table()) + "\n\n" + end + after


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
