"""The local engine: a small server over a transformers model that speaks SGLang's HTTP API.

For laptops and CI, where there is no GPU and no SGLang. A map, from the edge inwards:

    server        HTTP routes, the loop that steps the scheduler, start and stop
    http_api      JSON bodies to requests, requests to JSON answers; pure
    scheduler     which requests run in the next step; pause, abort, weight updates
    request       one live request: its tokens, its versions, how it ends
    slots         who holds which row of the cache; prefix matching; pure
    model_runner  the model, one forward per step
    kv_cache      keys and values of all rows, and attention over them
    sampling      sampling parameters; logits to tokens and logprobs
    text          tokenizer: text in, text out, stop strings
    weights       safetensors into a live model
"""

from agentrl.inference.engine.config import EngineConfig
from agentrl.inference.engine.server import Announcement, serve

__all__ = ["Announcement", "EngineConfig", "serve"]
