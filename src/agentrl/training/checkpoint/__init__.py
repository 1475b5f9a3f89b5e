"""Sharded checkpoints, written in the background and atomic.

layout.py   folders and names; the checkpoints of a run's lineage
save.py     saving and loading
blocks.py   conversion of sharded tensors to contiguous blocks
"""
