"""The reference's logprobs of a file's pairs, computed once before the first step.

Losses of pairs sum over each answer. So 16 bytes a pair are all that is kept: the means over the
trained tokens of both answers. A file beside the rows keeps them for a resume.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from agentrl.configs import ComputeConfig, ModelConfig
from agentrl.configs.digests import model_digest
from agentrl.file_digest import Digest
from agentrl.training.parallel.agreement import Agreement
from agentrl.training.step.reference import Reference
from agentrl.training.step.schedule import make_schedule
from agentrl.training.supervised.file_rows import FileRows, place_of
from agentrl.whole_file import write_whole

logger = logging.getLogger(__name__)

_EVERY_S = 10.0  # between two lines of progress, each of what is kept by then

Means = NDArray[np.float64]  # [pairs, 2], of the chosen and the rejected answer


def kept_means(rows: Path, start: ModelConfig, compute: ComputeConfig) -> Path:
    """The file that keeps the means of a folder of rows: by the model and how it computes."""
    digest = Digest()
    digest.part((model_digest(Path(start.model_name_or_path or "")) or "").encode())
    digest.part(f"{compute.bf16} {compute.fp32_head}".encode())
    return rows.with_name(f"{rows.name}.reference-{digest.text()}.npy")


def answer_means(
    rows: FileRows,
    wanted: Sequence[int],
    load: Callable[[], Reference],
    compute: ComputeConfig,
    kept: Path,
    rows_at_once: int,
    agreement: Agreement,
    stops: Callable[[], bool],
) -> Means | None:
    """The means of at least the rows `wanted`; others may be NaN. None if it was stopped.

    `load` is called if the file `kept` lacks any. `stops` is asked after every `rows_at_once` rows;
    what is computed until then is kept, as it is every few seconds. Collective.
    """
    means = agreement.from_main(lambda: _read(kept, len(rows)))
    missing = [row for row in wanted if np.isnan(means[row]).any()]
    if not missing:
        return means

    def is_due() -> bool:
        return time.monotonic() - kept_at > _EVERY_S

    reference, kept_at, done = load(), time.monotonic(), 0
    stopped = stops()
    while done < len(missing) and not stopped:
        part = missing[done : done + rows_at_once]
        means[part] = _of_part(rows, part, reference, compute)
        done += len(part)
        if agreement.from_main(is_due):  # clocks of processes differ
            agreement.from_main(lambda: _write(kept, means))
            logger.info("the reference's logprobs of %d of %d pairs", done, len(missing))
            kept_at = time.monotonic()
        stopped = stops()
    agreement.from_main(lambda: _write(kept, means))
    if stopped:
        logger.info("the reference's logprobs of %d of %d pairs", done, len(missing))
        return None
    logger.info("computed the reference's logprobs of %d pairs, once", done)
    return means


def _of_part(
    rows: FileRows, part: Sequence[int], reference: Reference, compute: ComputeConfig
) -> Means:
    """The means of some rows [p, 2]. Collective."""
    step, mesh = rows.of(part), rows.mesh
    schedule = make_schedule(
        reference.model, step.mine, compute.token_budget, compute.pad_to_multiple_of, mesh
    )
    places = torch.tensor([place_of(row) for row in step.ids[step.rank]], device=mesh.device)
    sums = torch.zeros(2 * len(part), 2, dtype=torch.float64, device=mesh.device)
    for batch, logprobs in zip(schedule.batches, reference.logprobs(schedule), strict=True):
        rejected = batch.columns["advantages"] < 0
        answer = 2 * places[batch.sequence[batch.mask]] + rejected[batch.mask]
        trained = logprobs[batch.mask].double()
        sums.index_add_(0, answer, torch.stack([trained, torch.ones_like(trained)], dim=1))
    dist.all_reduce(sums, group=mesh.dp_group)
    means = sums[:, 0] / sums[:, 1].clamp(min=1.0)
    of_pairs: Means = means.reshape(len(part), 2).cpu().numpy()
    return of_pairs


def _read(kept: Path, n_rows: int) -> Means:
    if kept.exists():
        found: Means = np.load(kept)
        return found
    return np.full((n_rows, 2), np.nan)


def _write(kept: Path, means: Means) -> None:
    with write_whole(kept) as partial:
        np.save(partial, means)
