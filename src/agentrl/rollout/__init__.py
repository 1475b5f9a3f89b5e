"""Samplers: claim a task, drive model and tools through many turns, score the result."""
