"""Token prompts in, tokens out: the protocol, its client, the pool of services, weight publication.

    protocol            what a request and its answer are, and how they fail
    generation_builder  an answer while it grows, made by one service or by several
    answers             what a service sends, as values
    transport           HTTP exchanges, errors made ours
    client              SGLang's HTTP API, one method for each thing that is asked
    pool                which service gets a request, and what happens when one fails
    weights             brings new weights to services
    memory              has a service give its GPU memory back, and take it again
    sglang_server       the real SGLang as a child process
    engine              a small server with the same API over a transformers model

Nothing here knows databases, rollout or training.
"""
