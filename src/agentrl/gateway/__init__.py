"""Any agent program as an agent: its requests in, Records out.

A program speaks the API of OpenAI or Anthropic, and knows nothing of training. It is run for each
attempt, with the address of a session, and what it asks there is answered by the run's model:

    program.py             the agent `program`
    command.py, function.py, outcome.py   the user's code: a command, or a function; how it ended
    sessions.py            the conversations of one attempt, and its reward
    agents_of_program.py   which agent asks, whether it is trained, who answers it
    other_model.py         an agent that another model answers
    server.py              the HTTP server of a sampler process, and its sessions
    exchange.py            a request and its answer, without the form of an API
    answering.py           answers while they are made
    openai_chat.py         /v1/chat/completions
    openai_responses.py    /v1/responses
    anthropic_messages.py  /v1/messages
    replaying.py           Records of programs once more, answered from the ledger

Arrows point from here to `rollout`, and none back.
"""
