"""Token prompts in, tokens out: the protocol, engines, the pool of services, weight publication.

    protocol            what a request and its answer are, and how they fail
    generation_builder  an answer while it grows, made by one service or by several
    engine_protocol     what a service can be asked for, whatever API it speaks
    engines             which engine serves a URL
    client              the engine behind SGLang's HTTP API
    answers             what that API sends, as values
    transport           HTTP exchanges, errors made ours
    pool                which service gets a request, and what happens when one fails
    weights             brings new weights to services
    memory              has a service give its GPU memory back, and take it again
    sglang_server       the real SGLang as a child process
    engine              a small server with the same API over a transformers model

Nothing here knows databases, rollout or training.
"""
