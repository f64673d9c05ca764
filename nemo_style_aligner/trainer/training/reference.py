"""The reference of preference methods: its log-probs of responses, computed in each step, or once and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel.agreement import on_first_rank
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.data.datasets import Dataset, PreferenceItem
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.preference_losses import PreferenceBatch, response_logprobs

logger = logging.getLogger(__name__)

_AT_ONCE = 256  # examples between two writes


class ReferenceError(UserError, ValueError):
    """The reference's log-probs cannot be used; the message says which, and what to do."""


class Reference(Protocol):
    """What the policy is compared with, such as `FrozenWeights`."""

    def active(self) -> AbstractContextManager[MegatronModel]:
        """A model that computes as the reference does, until the end of the context. Collective."""
        ...


def with_reference(batch: PreferenceBatch, reference: Reference | None, batching: MicroBatching) -> PreferenceBatch:
    """The batch with the reference's log-probs, unless it has them already (None). Collective."""
    if reference is None:
        return batch
    with reference.active() as model:
        return dataclasses.replace(batch, reference=response_logprobs(model, batch, batch.wanted, batching))


class KeptReference:
    """A dataset whose items know the reference's log-probs.

    Args:
        data: the items without.
        logprobs: fp32 [n, 2].
    """

    def __init__(self, data: Dataset[PreferenceItem], logprobs: np.ndarray[Any, Any]) -> None:
        self._data, self._logprobs = data, logprobs

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> PreferenceItem:
        first, second = self._logprobs[index].tolist()
        return dataclasses.replace(self._data[index], reference=(first, second))


def keep_reference(
    data: Dataset[PreferenceItem],
    model: MegatronModel,
    collate: Callable[[Sequence[PreferenceItem], torch.Tensor], PreferenceBatch],
    batching: MicroBatching,
    folder: Path,
    described: Mapping[str, str],
) -> KeptReference:
    """The data with log-probs from ``folder``; those that are missing are computed now, and kept. Collective.

    A pass that was interrupted goes on where it was. Data-parallel ranks share the work.

    Args:
        model: computes as the reference does.
        described: what else the log-probs depend on, such as the model's fingerprint.

    Raises:
        ReferenceError: the file is damaged, or a log-prob is not finite.
        OSError: the folder cannot be written to.
    """
    path, known = on_first_rank(lambda: _open(folder, data, described))
    missing = np.flatnonzero(np.isnan(known).any(1))
    if len(missing):
        logger.info("computing the reference's log-probs of %d examples, kept in %s", len(missing), path)
    else:
        logger.info("the reference's log-probs of %d examples are in %s", len(known), path)
    done = 0
    with activity.phase("reference log-probs"), activity.counting("examples", lambda: (done, len(missing))):
        for start in range(0, len(missing), _AT_ONCE):
            chunk = missing[start : start + _AT_ONCE]
            batch = collate([data[int(index)] for index in chunk], torch.ones(len(chunk)))
            logprobs = response_logprobs(model, batch, batch.wanted, batching, is_whole=True)
            known[chunk] = logprobs.view(-1, 2).numpy()
            if not np.isfinite(known[chunk]).all():
                bad = chunk[~np.isfinite(known[chunk]).all(1)].tolist()
                raise ReferenceError(f"the reference's log-probs of examples {bad[:10]} are NaN or infinite")
            on_first_rank(lambda: _write(path, known[chunk], chunk))  # noqa: B023
            done += len(chunk)
    return KeptReference(data, known)


def _open(
    folder: Path, data: Dataset[PreferenceItem], described: Mapping[str, str]
) -> tuple[Path, np.ndarray[Any, Any]]:
    """The file of some data, made if it is not there, and what is in it: fp32 [n, 2], NaN where it is not known."""
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for item in (data[index] for index in range(len(data))):
        for ids, prompt in zip(item.token_ids, item.prompt_lengths, strict=True):
            digest.update(np.array([len(ids), prompt, *ids], np.int32).tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"reference_logprobs_{digest.hexdigest()[:16]}.npy"
    if not path.exists():
        unfinished = folder / f".{path.name}.{os.getpid()}.tmp.npy"
        np.save(unfinished, np.full((len(data), 2), np.nan, np.float32))
        unfinished.replace(path)
    try:
        known = np.load(path)
    except (ValueError, EOFError) as error:
        raise ReferenceError(f"{path} is damaged ({error}): remove it") from error
    if known.shape != (len(data), 2) or known.dtype != np.float32:
        raise ReferenceError(f"{path} is damaged: it has not two numbers for each of {len(data)} examples: remove it")
    return path, known


def _write(path: Path, values: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
    file = np.lib.format.open_memmap(path, mode="r+")
    file[rows] = values
    file.flush()
