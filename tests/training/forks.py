"""Processes that tests kill: they start with the trainer imported, which takes seconds."""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["agentrl.training.trainer", "transformers.models.qwen3.modeling_qwen3"]
)
