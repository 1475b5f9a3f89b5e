"""Token prompts in, tokens out: the protocol, its client, the pool of services, weight publication.

`protocol` says what a request and its answer are; `client` speaks SGLang's HTTP API; `pool` spreads
requests over services; `weights` brings new weights to them; `engine` is a small server with the
same API over a transformers model. Nothing here knows databases, rollout or training.
"""
