"""The function that SGLang's rotary embedding imports on a CPU. Its native path never calls it."""

from typing import NoReturn


def rotary_embedding(*tensors: object) -> NoReturn:
    """Raises: a model that comes here needs SGLang with its kernels."""
    raise NotImplementedError("rotary_embedding: this environment has no kernels of vLLM")
