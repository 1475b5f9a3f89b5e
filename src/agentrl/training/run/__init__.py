"""The trainer's side of a run: what it does once, and between steps.

entry.py         which run this is, and what of it is gone on with
startup.py       what is checked and loaded before the first step
coordinator.py   rank 0: the run's lease, tasks, evaluations and progress
publication.py   new weights to the services
gpu_sharing.py   whose turn it is on GPUs that trainer and services share
metrics.py       what a step says of itself, to files and trackers
trackers.py, rollout_table.py   trackers of others, and the rollouts that they show
"""
