"""Training on rows from a file by the trainer's own step: demonstrations, or pairs of answers.

order.py     which rows a step has
script.py    `train_supervised`, for scripts that hold rows in memory
process.py   the process that `agentrl sft` and `agentrl dpo` launch, with checkpoints
metrics.py   what a step reports
"""
