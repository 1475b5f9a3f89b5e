"""The local engine: a small server over a transformers model, with SGLang's HTTP API.

It is for machines without a GPU or SGLang, such as laptops and CI. Its modules:

    server          HTTP routes, start and stop
    weight_routes   HTTP routes that bring new weights
    http_api        JSON of `/generate`: bodies to requests, requests to answers; pure
    control         JSON of the other routes
    engine          the model, its scheduler and the loop that steps it
    scheduler       which requests run in the next step; pause, abort, weight updates
    request         one live request: its tokens, its versions, its end
    slots           allocation of the cache's rows; prefix matching; pure
    model_runner    the model, one forward per step
    decoder         the forward of Llama-shaped models in few operators
    kv_cache        keys and values of all rows, and attention over them
    sampling        sampling parameters; logits to tokens and logprobs
    text            tokenizer: text in, text out, stop strings
    weights         tensors into a live model
    assembly        weights from the pieces that they are in a folder
    weight_session  tensors from the trainer's memory: process groups, shared memory
"""

from agentrl.importing import importing
from agentrl.inference.engine.config import KEY_OF_SERVICES, Announcement, EngineConfig

__all__ = ["KEY_OF_SERVICES", "Announcement", "EngineConfig", "serve"]


def serve(config: EngineConfig, announcement: Announcement | None = None) -> None:
    """Serve a model until SIGTERM; see `server.serve`."""
    # Imported here, because it loads torch and transformers, which starting SGLang does not need.
    with importing():
        from agentrl.inference.engine import server

    server.serve(config, announcement)
