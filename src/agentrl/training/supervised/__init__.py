"""Training on rows from a file by the trainer's own step: demonstrations, or pairs of answers.

order.py           which rows a step has
file_rows.py       the rows of a file for the ranks that train them
reference_once.py  the reference's logprobs of pairs, before the first step
script.py          `train_supervised`, for scripts that hold rows in memory
process.py         the process that `agentrl sft` and `agentrl dpo` launch, with checkpoints
metrics.py         what a step reports
"""
