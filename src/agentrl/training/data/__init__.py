"""Rows to micro-batches: what a step trains on, divided over ranks and passes.

stream.py      rows of a step, fetched while the last one is trained
planner.py     which rank trains which rows
sequences.py   a row as the sequences that are trained
forest.py      sequences merged under the prefixes that they share
packing.py     a forest divided into passes of bounded size
batch.py       the tensors of a pass
flops.py       what tokens cost
"""
