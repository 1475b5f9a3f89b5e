"""The logprobs of a step's trained tokens, kept while its passes run, for the rows' marks; and the
entropies, if the step computes them anyway."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.databases.arrays import pack_floats, pack_halves
from agentrl.databases.trained_logprobs import KeptColumns
from agentrl.training.losses import LossInputs


@dataclass(frozen=True)
class KeptTokens:
    """What is kept of a row's trained tokens, each float32 [n] in the order of the row's tree."""

    logprobs: NDArray[np.float32]
    entropies: NDArray[np.float32] | None

    def pack(self) -> KeptColumns:
        """As the row's mark has them."""
        columns = {"logprobs": pack_floats(self.logprobs)}
        if self.entropies is not None:
            columns["entropies"] = pack_halves(self.entropies)
        return columns


class KeptLogprobs:
    """The policy's logprobs and entropies of one rank's rows, each token once.

    They stay on the device until the step ends: a copy of each micro-batch would wait for the GPU.
    """

    def __init__(self) -> None:
        self._parts: list[tuple[torch.Tensor, ...]] = []

    @torch.no_grad()
    def add(self, inputs: LossInputs) -> None:
        """Keep those of one micro-batch."""
        assert inputs.place is not None, "micro-batches say where their tokens are"
        # The token of a placeholder is of no row.
        row = torch.where(inputs.mask, inputs.sequence, -1)
        values = [inputs.logprobs] if inputs.entropy is None else [inputs.logprobs, inputs.entropy]
        self._parts.append((row, inputs.place, *(each.detach() for each in values)))

    def of_rows(self, n_rows: int) -> list[KeptTokens]:
        """What is kept of each row."""
        if not self._parts:
            return [KeptTokens(np.empty(0, dtype=np.float32), None) for _ in range(n_rows)]
        columns = [torch.cat(parts).cpu().numpy() for parts in zip(*self._parts, strict=True)]
        rows, places, *values = columns
        order = np.lexsort((places, rows))
        bounds = np.searchsorted(rows[order], np.arange(n_rows + 1))
        of_rows = [  # not what is of no row
            np.split(each[order].astype(np.float32), bounds)[1 : n_rows + 1] for each in values
        ]
        entropies = of_rows[1] if len(of_rows) > 1 else [None] * n_rows
        return [KeptTokens(*pair) for pair in zip(of_rows[0], entropies, strict=True)]
