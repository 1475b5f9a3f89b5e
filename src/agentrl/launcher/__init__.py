"""Starts the processes of a run on one machine, watches them, and reports.

The launcher holds nothing of the pipeline. Its processes have command lines, and it reads their
progress from the run's database and its metrics file.
"""
