"""Starting a run's parts on one machine, watching them, and telling how it went.

Nothing of the pipeline is in here: parts are processes with a command line, and what they do is
read from the run's database and its metrics file.
"""
