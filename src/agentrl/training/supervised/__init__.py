"""Supervised training: the trainer's own step with the CrossEntropy loss, on rows from a file.

order.py     which rows a step has
script.py    `train_supervised`, for scripts that hold rows in memory
process.py   the process that `agentrl sft` launches, with checkpoints and a held-out loss
"""
