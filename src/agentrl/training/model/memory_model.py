"""How much memory a step takes, by model, tokens and degrees.

Pure; docs/reference/memory.md has its table. Counted are the tensors that live at the highest
point of a step. Not counted: the process itself (a CUDA context, libraries), what an allocator
wastes, and NCCL's buffers.
"""

from dataclasses import dataclass, replace

_MASTER = 4  # bytes of a master weight, of its gradient, and of each of AdamW's two moments
_GATHERED_LAYERS = 2  # the one that computes, and the next one that is being gathered
_PINNED = 2  # torch rounds pinned memory of a tensor up to a power of two: to less than twice
_LONGEST = 1 << 30  # tokens: nobody asks for more


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal language model; parameters are counted, tied ones once."""

    hidden: int
    layers: int
    query: int  # attention heads times their dimension
    key: int  # key and value heads times their dimension
    intermediate: int  # of a feed-forward layer, of an expert if there are experts
    vocabulary: int
    layer_parameters: int  # of one layer, experts included
    root_parameters: int  # of embedding, last norm and head
    layer_trained: int  # how many of them are trained: an adapter's only, if there is one
    root_trained: int
    expert_parameters: int = 0  # of one layer's experts, part of `layer_parameters`
    experts_per_token: int = 1  # how many feed-forward layers a token goes through
    query_key_norm: bool = False  # queries and keys are normalised

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.layers * self.layer_parameters + self.root_parameters


@dataclass(frozen=True)
class MemorySetup:
    """The computation of a step: degrees of parallelism, dtypes, and ways to save memory."""

    tokens: int  # of a micro-batch's line, over all context-parallel processes
    chunk: int = 1024  # --loss_seq_chunk_size
    fsdp: int = 1  # processes that weights, gradients and optimizer are sharded over
    tp: int = 1
    cp: int = 1
    ep: int = 1
    gathers_keys: bool = False  # --cp_mode allgather
    entropy: bool = False  # --log_entropy, or an entropy bonus
    bf16: bool = False
    fp32_head: bool = False
    checkpointing: bool = False
    activation_offloading: bool = False
    param_offload: bool = False

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in a layer's computation."""
        return 2 if self.bf16 else 4


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one process. `peak` is on the device; what is offloaded is in `host`."""

    weights: int  # the shard of them that is kept
    gradients: int
    optimizer: int
    gathered: int  # whole weights of layers that compute, of embedding and head
    saved: int  # what layers keep for the backward pass
    recomputed: int  # what one layer keeps while its backward pass runs, and its gradients
    logits: int  # of one chunk
    host: int  # on the CPU instead: offloaded states and activations

    @property
    def states(self) -> int:
        """Bytes of weights and optimizer state, which stay between steps."""
        return self.weights + self.optimizer

    @property
    def peak(self) -> int:
        """Largest number of bytes on the device: at the head, or in a layer's backward pass."""
        working = max(self.recomputed, self.logits)
        return self.states + self.gradients + self.gathered + self.saved + working


def estimate(shape: ModelShape, setup: MemorySetup) -> MemoryEstimate:
    """Estimate the memory of one process in one step."""
    weights, trained = _held(shape, setup)
    number = setup.compute_bytes
    # Frozen parameters have no master weights.
    kept = _MASTER * trained + number * (weights - trained)
    gradients, optimizer = _MASTER * trained, 2 * _MASTER * trained
    local = -(-setup.tokens // setup.cp)
    layer = local * layer_bytes(shape, setup)
    inputs = local * shape.hidden * number
    # after the last layer: the last norm, as in a layer, and the predicted positions
    ends = local * (_norm_bytes(shape.hidden, setup) + shape.hidden * number)
    saved = shape.layers * (inputs if setup.checkpointing else layer)
    reduced = _reduced(shape, setup)
    recomputed = (layer if setup.checkpointing else 0) + inputs + reduced
    host = 0
    if setup.param_offload:
        host += _PINNED * (kept + gradients) + optimizer
        kept = gradients = optimizer = 0
    if setup.activation_offloading:
        host += _PINNED * saved
        saved = inputs if setup.checkpointing else layer  # the one that is on its way
    vocabulary = shape.vocabulary // setup.tp
    logits = min(setup.chunk, local) * vocabulary * _logit_bytes(setup)
    if setup.bf16 and setup.fp32_head:
        logits += 4 * vocabulary * shape.hidden  # the head's weights in float32
    return MemoryEstimate(
        weights=kept,
        gradients=gradients,
        optimizer=optimizer,
        gathered=_gathered(shape, setup),
        saved=saved + ends,
        recomputed=recomputed,
        logits=logits,
        host=host,
    )


def longest_line(shape: ModelShape, setup: MemorySetup, limit: int) -> int:
    """Largest number of tokens of a micro-batch with a peak within `limit` bytes; 0 if none."""
    low, high = 0, 1
    while high < _LONGEST and estimate(shape, replace(setup, tokens=high)).peak <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = estimate(shape, replace(setup, tokens=middle)).peak <= limit
        low, high = (middle, high) if fits else (low, middle)
    return low


def layer_bytes(shape: ModelShape, setup: MemorySetup) -> int:
    """Bytes per token that one layer saves for its backward pass.

    Two norms; queries, keys and values before and after their own norms; attention's output; and
    of each feed-forward layer that a token goes through: gate, its activation, up, their product.
    """
    number, tp = setup.compute_bytes, setup.tp
    query, key = shape.query // tp, shape.key // tp
    attention = number * (2 * query + 2 * key)
    if setup.gathers_keys and setup.cp > 1:
        attention += number * 2 * key * (setup.cp - 1)
    if shape.query_key_norm:
        # as `_norm_bytes`, but that its output is what attention saves already
        attention += (_norm_bytes(1, setup) - number) * (query + key)
    feed = number * 4 * (shape.intermediate // (1 if shape.expert_parameters else tp))
    if shape.expert_parameters:
        feed += number * 2 * shape.hidden  # the token as the expert sees it, and its answer
    return 2 * _norm_bytes(shape.hidden, setup) + attention + shape.experts_per_token * feed


def _norm_bytes(width: int, setup: MemorySetup) -> int:
    """Bytes of an RMS norm: input in float32, normalized input, and output."""
    return width * (4 + 2 * setup.compute_bytes)


def _logit_bytes(setup: MemorySetup) -> int:
    """Bytes of one logit while its chunk is computed.

    There is one float32 copy, two more for the entropy (exponentials and a product), and one for
    the head's output under tensor parallelism. A head in bfloat16 adds one copy in bfloat16.
    """
    copies = 1 + (2 if setup.entropy else 0) + (1 if setup.tp > 1 else 0)
    return 4 * copies + (2 if setup.bf16 and not setup.fp32_head else 0)


def _held(shape: ModelShape, setup: MemorySetup) -> tuple[int, int]:
    """Number of parameters that a process keeps, and of trained ones among them."""
    shards = setup.fsdp * setup.tp
    trained = shape.layers * shape.layer_trained + shape.root_trained
    return round(shape.parameters / shards), round(trained / shards)


def _gathered(shape: ModelShape, setup: MemorySetup) -> int:
    """Bytes of gathered weights: the root's always, the layers' in turn."""
    dense = (shape.layer_parameters - shape.expert_parameters) / setup.tp
    layer = dense + shape.expert_parameters / (setup.ep if setup.ep > 1 else setup.tp)
    alone = setup.fsdp == 1 and not setup.param_offload
    if alone and not setup.bf16:
        return 0  # nothing is sharded: the master weights serve
    layers = shape.layers if alone else min(_GATHERED_LAYERS, shape.layers)
    return round(setup.compute_bytes * (shape.root_parameters / setup.tp + layers * layer))


def _reduced(shape: ModelShape, setup: MemorySetup) -> int:
    """Bytes of the gradients of the unit that is being reduced, as computed and in float32."""
    unit = max(shape.layer_trained, shape.root_trained) / setup.tp
    return round(unit * (setup.compute_bytes + _MASTER))
