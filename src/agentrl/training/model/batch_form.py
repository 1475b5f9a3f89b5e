"""The forms in which a model takes the sequences of a micro-batch, and which one it uses."""

from enum import StrEnum

from transformers import PreTrainedModel

from agentrl.training.attention import IMPLEMENTATION, has_tree_attention

_EQUAL_LENGTHS = "takes_equal_lengths"


class BatchForm(StrEnum):
    """From the cheapest to the one with the fewest requirements."""

    TREE = "tree"  # one line, in which shared prefixes are computed once
    PADDED = "padded"  # a line for each sequence, padded to the longest
    EQUAL_LENGTHS = "equal lengths"  # a line for each sequence, all of one length


def batch_form(model: PreTrainedModel) -> BatchForm:
    """The form of the micro-batches of `model`."""
    if has_tree_attention(model):
        return BatchForm.TREE
    equal = vars(model).get(_EQUAL_LENGTHS, False)
    return BatchForm.EQUAL_LENGTHS if equal else BatchForm.PADDED


def use_batch_form(model: PreTrainedModel, form: BatchForm, attention: str) -> None:
    """Make `model` take micro-batches of `form`, with the implementation `attention`.

    A model that does not let its implementation be changed keeps its own.
    """
    assert (form is BatchForm.TREE) == attention.startswith(IMPLEMENTATION), "trees need their own"
    vars(model)[_EQUAL_LENGTHS] = form is BatchForm.EQUAL_LENGTHS
    if model._can_set_attn_implementation():
        model.set_attn_implementation(attention)
