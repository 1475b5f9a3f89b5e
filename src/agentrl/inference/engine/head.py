"""A head that computes in float32 in a model of another dtype."""

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

_FORWARD = "forward"  # what calling a module calls


def use_fp32_head(model: PreTrainedModel) -> None:
    """Make the model's head compute logits in float32 from the weights and states as they are.

    Its parameters stay in their dtype, so that weight updates reach it. Raises `ValueError` if the
    head is not a plain linear layer.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ValueError(
            f"the head of {type(model).__name__} is a {type(head).__name__}, which cannot compute "
            "in float32: leave --fp32_head out"
        )

    def logits(states: Tensor) -> Tensor:
        bias = None if head.bias is None else head.bias.float()
        return F.linear(states.float(), head.weight.float(), bias)

    setattr(head, _FORWARD, logits)
