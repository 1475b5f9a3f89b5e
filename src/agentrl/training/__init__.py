"""The trainer: rows from the database in, checkpoints and published weights out.

    trainer.py    the trainer's process
    supervised/   training on rows from a file
    run/          rank 0's work for the run: lease, tasks, publication, metrics
    step/         one optimizer step
    model/        loading, predictions, export, memory
    data/         rows to micro-batches
    checkpoint/   saving and loading of checkpoints
    parallel/     sharding of models, and process groups
    attention/    attention over forests of tokens
    losses/       pure functions of per-token tensors

A package imports only from those below it in this list. None of them knows how trajectories are
sampled.
"""
