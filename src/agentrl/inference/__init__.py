"""Token prompts in, tokens out: the protocol, engines, the pool of services, weight publication.

    protocol            requests, answers and errors
    generation_builder  an answer while it grows, made by one service or by several
    engine_protocol     the interface of an inference service, for any API
    engines             the engine for a URL
    client              the engine for SGLang's HTTP API
    answers             parser of that API's answers
    context             limits of prompt and answer length
    transport           HTTP exchanges, with aiohttp's errors mapped
    pool                routing of requests to services, and failover
    weights             weight updates of services
    memory              releases and resumes a service's GPU memory
    sglang_server       the real SGLang as a child process
    engine              a small server with the same API over a transformers model

Nothing here knows databases, rollout or training.
"""
