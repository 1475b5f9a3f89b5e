"""Samplers: claim a task, drive model and tools through many turns, score the result.

    scheduling/   which rollouts a sampler works on, and when
    traces/       Records that have ended as OpenTelemetry traces
    agents/       what a model does with a task: the built-in agents, and users' own
    groups/       a finished group: advantages, rules, rows
    chat/         conversations as tokens, by any chat template
    tools/        MCP clients and sessions
    tool_calls/   from a turn's text to calls
    scorers/      from a Record to its score
    llm/          models that help: judges, rankers, browse agents

A folder imports only from those below it in this list. Nothing here imports the trainer.
"""
