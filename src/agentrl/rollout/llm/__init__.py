"""Language models that help with the sampling: judges, rankers, browse agents.

models.py      the file of `--agent_config_path`: which models there are
sections.py    the settings of its sections
client.py      asks them, one after the other, until one answers
endpoint.py    a model that is evaluated, or that answers an agent of a program
completion.py  reads what any of them answers
"""
