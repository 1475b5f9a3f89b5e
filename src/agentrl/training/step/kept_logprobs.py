"""The logprobs of a step's trained tokens, kept while its passes run, for the rows' marks."""

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.training.losses import LossInputs


class KeptLogprobs:
    """The policy's logprobs of one rank's rows, each token once.

    They stay on the device until the step ends: a copy of each micro-batch would wait for the GPU.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def add(self, inputs: LossInputs) -> None:
        """Keep those of one micro-batch."""
        assert inputs.place is not None, "micro-batches say where their tokens are"
        # The token of a placeholder is of no row.
        row = torch.where(inputs.mask, inputs.sequence, -1)
        self._parts.append((row, inputs.place, inputs.logprobs.detach()))

    def of_rows(self, n_rows: int) -> list[NDArray[np.float32]]:
        """The logprobs of each row's trained tokens, in the order of the row's tree."""
        if not self._parts:
            return [np.empty(0, dtype=np.float32) for _ in range(n_rows)]
        columns = [torch.cat(parts).cpu().numpy() for parts in zip(*self._parts, strict=True)]
        rows, places, values = columns
        order = np.lexsort((places, rows))
        rows, values = rows[order], values[order].astype(np.float32)
        bounds = np.searchsorted(rows, np.arange(n_rows + 1))
        return np.split(values, bounds)[1 : n_rows + 1]  # not what is of no row
