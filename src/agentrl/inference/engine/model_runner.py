"""The model and its KV cache: one forward pass per step.

The scheduler selects the requests and uses the logits.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from agentrl.inference.engine.config import EngineConfig
from agentrl.inference.engine.decoder import Decoder
from agentrl.inference.engine.head import use_fp32_head
from agentrl.inference.engine.kv_cache import ATTENTION, KVCache, PrefillChunk, kv_heads
from agentrl.sliding_window import sliding_window

# Slots for each request that can run. Idle slots keep the prefixes of conversations during tool
# calls.
_SLOTS_PER_RUNNING = 2


class ModelRunner:
    """A causal language model on one device, with a cache for running and finished requests.

    Raises ValueError if the model has other than full attention, or positions that change within
    the context, if the context is longer than the model's, if the memory does not suffice for one
    request, or if the head cannot compute in float32 as it should.
    """

    def __init__(self, config: EngineConfig) -> None:
        device = torch.device(config.device)
        at_start = _memory_bytes(device)
        dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
        model = AutoModelForCausalLM.from_pretrained(
            config.model_path, dtype=dtype, attn_implementation=ATTENTION
        )
        self.model: PreTrainedModel = model.eval().to(device)
        self.device = device
        if config.fp32_head:
            use_fp32_head(self.model)
        text_config: PreTrainedConfig = self.model.config.get_text_config()
        stated = text_config.to_dict()
        layer_types = set(stated.get("layer_types") or ["full_attention"])
        if layer_types != {"full_attention"}:
            raise ValueError(
                f"{config.model_path}: the local engine serves models with full attention only,"
                f" this one has {sorted(layer_types)}: use SGLang"
            )
        if stated.get("v_head_dim"):
            raise ValueError(
                f"{config.model_path}: the local engine keeps keys and values of one size, and this"
                f" {text_config.model_type} has latent attention: use SGLang"
            )
        self.vocab_size = int(text_config.vocab_size)
        longest = int(text_config.max_position_embeddings)
        self.context_length = config.context_length or longest
        if self.context_length > longest:
            raise ValueError(
                f"context length {self.context_length} is more than the {longest} positions of"
                f" {config.model_path}"
            )
        self._refuse_rows_that_differ(text_config, config.model_path)
        token_bytes = self._bytes_per_token(text_config)
        tokens = config.max_total_tokens or (
            cache_bytes_within(at_start, _memory_bytes(device), config.memory_fraction)
            // token_bytes
        )
        self.num_slots = min(
            tokens // self.context_length, _SLOTS_PER_RUNNING * config.max_running_requests
        )
        if self.num_slots < 1:
            raise ValueError(
                f"keys and values of {tokens} tokens do not hold one request of"
                f" {self.context_length}: raise max_total_tokens or lower context_length"
            )
        self.cache = KVCache(
            text_config, self.num_slots, self.context_length, device, self.model.dtype
        )
        self._decoder = self._make_decoder()
        self.end_ids = _end_ids(self.model)

    @property
    def total_tokens(self) -> int:
        """Number of positions of the cache."""
        return self.num_slots * self.context_length

    @property
    def cache_bytes(self) -> int:
        """Size of the cache in bytes."""
        return self.total_tokens * self._bytes_per_token(self.model.config.get_text_config())

    def release_memory(self) -> None:
        """Release the device's memory: weights move to the host, keys and values are dropped."""
        self._decoder = None  # it holds weights, too
        _move(self.model, torch.device("cpu"))
        self.cache.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def resume_memory(self) -> None:
        """Move the weights back and allocate the cache again."""
        self.cache.resume()
        _move(self.model, self.device)
        self._decoder = self._make_decoder()

    @torch.inference_mode()
    def step(
        self,
        decode_ids: Sequence[int],
        decode_positions: Sequence[int],
        segments: Sequence[PrefillChunk],
        segment_ids: Sequence[Sequence[int]],
        segment_wanted: Sequence[bool],
    ) -> Tensor:
        """Run the model on one token for each of rows 0.. and on the new tokens of each segment.

        Returns the logits [W, vocab] after each decoded token, then after the last token of each
        segment with `segment_wanted`.
        """
        ids = list(decode_ids)
        wanted = list(range(len(ids)))
        for more, want in zip(segment_ids, segment_wanted, strict=True):
            ids += more
            if want:
                wanted.append(len(ids) - 1)
        layout = self.cache.lay_out(decode_positions, segments)
        ids_N = torch.tensor(ids, device=self.device)
        wanted_W = torch.tensor(wanted, device=self.device, dtype=torch.long)
        if self._decoder is not None:
            return self._decoder(ids_N, layout, wanted_W)
        self.cache.layout = layout
        output = self.model(
            input_ids=ids_N[None],
            position_ids=layout.positions_N[None],
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=wanted_W,
            step=layout,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _refuse_rows_that_differ(self, config: PreTrainedConfig, path: Path) -> None:
        """Raise `ValueError` if what a sequence gives depends on its length, or on those beside
        it: a step has all sequences in one line."""
        window = sliding_window(config)
        if window is not None and window < self.context_length:
            raise ValueError(
                f"{path}: its layers see {window} tokens, and the local engine serves models with"
                f" full attention only: lower the context length of {self.context_length} to that,"
                " or use SGLang"
            )
        rope = getattr(config, "rope_parameters", None) or {}
        short = rope.get("original_max_position_embeddings") or self.context_length
        if rope.get("rope_type") == "longrope" and short < self.context_length:
            raise ValueError(
                f"{path}: its positions (longrope) differ beyond {short} tokens, which the local"
                f" engine does not follow: lower the context length of {self.context_length} to"
                " that, or use SGLang"
            )

    def _make_decoder(self) -> Decoder | None:
        """The model's forward in few operators; None if there is only transformers' own."""
        return Decoder(self.model, self.cache) if Decoder.fits(self.model) else None

    def _bytes_per_token(self, config: PreTrainedConfig) -> int:
        heads, size = kv_heads(config)
        return int(2 * config.num_hidden_layers * heads * size * self.model.dtype.itemsize)


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Move weights and buffers to a device."""
    model.to(device)


def _memory_bytes(device: torch.device) -> int:
    """Memory of the device in bytes: free on a GPU, all on a CPU, where unused pages are free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cache_bytes_within(at_start: int, now: int, fraction: float | None) -> int:
    """Bytes of the KV cache, from those free before and after the weights were loaded."""
    if fraction is None:
        return now // 4
    return max(0, min(now, int(fraction * at_start) - (at_start - now)))


def _end_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids that end a sequence, from generation_config.json and config.json."""
    stated: set[int] = set()
    generation: GenerationConfig | None = model.generation_config
    for eos in (generation and generation.eos_token_id, model.config.eos_token_id):
        if isinstance(eos, int):
            stated.add(eos)
        elif eos:
            stated.update(eos)
    return frozenset(stated)
