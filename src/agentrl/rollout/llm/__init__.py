"""Language models that help with the sampling: judges, rankers, browse agents.

models.py   the file of `--agent_config_path`: which models there are
client.py   asks them, one after the other, until one answers
"""
