"""The flags of the original AgentRL that no flag of this trainer has the name of."""

from collections.abc import Mapping
from typing import Any

from agentrl.configs.familiar.familiar_flag import (
    FamiliarFlag,
    Value,
    idle,
    refused,
    translated,
    truth,
)

_SMALLEST_ADVANTAGE = 1e-6  # what is below carries no gradient (`rollout/groups/group_rules.py`)
_STORAGE = "images and files are kept in MongoDB; leave it out"


def _only_positive(text: str, given: Mapping[str, Any]) -> dict[str, Value]:
    return {"minimal_advantage": str(_SMALLEST_ADVANTAGE)} if truth(text) else {}


ORIGINAL_FLAGS: Mapping[str, FamiliarFlag] = {
    "trainer": refused(
        "this trainer trains the text part of a model, without images",
        "QwenTrainer", "QwenMoETrainer",
    ),
    "remove_experience": refused(
        "a record has no experience to remove; give the agent a prompt without it", "false"
    ),
    "shift_labels": refused(
        "a token is always predicted from the ones before it; leave it out", "true"
    ),
    "skip_non_positive_advantage": translated(
        "`--minimal_advantage 1e-6`; there nothing reads it", _only_positive
    ),
    "output_router_logits": refused(
        "a router has no loss of its own here; leave it out", "false"
    ),
    "trust_remote_code": idle(
        "models are loaded by transformers' own classes, never by code in their folder"
    ),
    "cpu_ram_efficient_loading": idle(
        "each process always reads only its shard of the weights from the model's folder"
    ),
    "torch_dtype": refused(
        "weights are kept in float32, and --bf16 computes in bfloat16; float16 is not here",
        "bfloat16", "float32", "auto",
    ),
    "bypass_causal_mask_check": idle("masks are made here, and probed against separate rows"),
    "enable_loss_parallel": idle("with --tp_size the head and its softmax are always split"),
    "decoder_sparse_step": refused(
        "a model keeps the layers of its config.json; change it there"
    ),
    "pad_to_maximum": idle(
        "rows share micro-batches of up to --micro_batch_tokens tokens, so that little is padded; "
        "loss and gradient are those of rows one by one"
    ),
    "dynamic_batching": idle(
        "rows share micro-batches of up to --micro_batch_tokens tokens, so that little is padded; "
        "loss and gradient are those of rows one by one"
    ),
    "max_pixels": idle("this trainer trains the text part of a model, without images"),
    "tune_vision": idle("this trainer trains the text part of a model, without images"),
    "enable_oss": refused(_STORAGE, "false"),
    "oss_connection_string": refused(_STORAGE),
    "model_name": idle("requests have token ids, and need no name of the model"),
    "top_k": idle(
        "the ratio of policies needs the logprob of the sampled token only; the top_k of sampling "
        "is in --preferred_sampling_params"
    ),
    "compress_history": refused(
        "give --enable_repetition_compress or --new_context", "false"
    ),
}  # fmt: skip
