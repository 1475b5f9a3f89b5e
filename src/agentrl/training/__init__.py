"""The trainer: rows from the database in, checkpoints and published weights out.

    trainer.py    the trainer's process; sft.py: supervised training, for scripts
    run/          what rank 0 does for the run: lease, tasks, publication, metrics
    step/         one optimizer step
    model/        loading, predictions, export, memory
    data/         rows to micro-batches
    checkpoint/   what is saved, and how a run goes on
    parallel/     who holds what of a model, and who talks to whom
    attention/    attention over forests of tokens
    losses/       pure functions of per-token tensors

A room imports only from those below it in this order.
Nothing here knows how trajectories are sampled.
"""
