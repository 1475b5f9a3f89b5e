"""Checkpoints: sharded, written beside the training, complete or not there at all.

layout.py   folders and names: which checkpoints there are, which one is gone on from
save.py     writing and reading them
blocks.py   tensors as blocks of a file
"""
