"""Any agent program as an agent: its requests in, Records out.

A program speaks the API of OpenAI or Anthropic, and knows nothing of training. It has the address
of a session for each attempt, and what it asks there is answered by the run's model. It is run by a
sampler process, or runs on another machine and asks a gateway for tasks:

    program.py             the agent `program`: the sampler runs it
    command.py, function.py, outcome.py   the user's code: a command, or a function; how it ended
    gateway_process.py     `agentrl gateway`, a process of its own
    outside.py, desk.py    the agent `outside`; where its clients wait for tasks
    tasks_api.py           the routes by which they ask, and AReaL's names of them
    session_sampler.py     what an attempt comes to when its session is over
    sessions.py            the conversations of one attempt, and its reward; how they go on
    session_keys.py        the keys of sessions
    server.py, http_json.py   the HTTP server of a process, and its sessions
    agents_of_program.py   which agent asks, whether it is trained, who answers it
    other_model.py         an agent that another model answers
    exchange.py            a request and its answer, without the form of an API
    answering.py           answers while they are made
    openai_chat.py         /v1/chat/completions
    openai_responses.py    /v1/responses
    anthropic_messages.py  /v1/messages
    replaying.py           Records of programs once more, answered from the ledger

Arrows point from here to `rollout`, and none back.
"""
