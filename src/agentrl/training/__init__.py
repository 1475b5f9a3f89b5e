"""The trainer: rows from the database in, checkpoints and published weights out.

    stream -> batch, planner -> logprobs -> losses -> step -> checkpoint, publication, metrics

`trainer.py` ties these together. Nothing here knows how trajectories are sampled.
"""
