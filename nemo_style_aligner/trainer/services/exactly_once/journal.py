"""The training batches that a critic may need again, on disk from before they are sent until saves confirm them.

One file per batch in ``<log_dir>/critic_journal/``, named by its sequence number. ``run.json`` beside them holds the
run's id and where the critic was when it began, so that an actor job that dies before its first checkpoint is the same
run when it is started again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, save

from nemo_style_aligner.durable import UNFINISHED
from nemo_style_aligner.errors import NO_ROOM, NotWrittenError, UserError
from nemo_style_aligner.guard.trusted_paths import UntrustedPathError, private_folder, write_synced
from nemo_style_aligner.trainer.checkpoints.directory import DAMAGED
from nemo_style_aligner.trainer.checkpoints.manifest import NOT_THERE, read_patiently
from nemo_style_aligner.trainer.services.exactly_once.ledger import CriticPosition, batch_digest

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
_RUN = "run.json"


class JournalError(UserError, RuntimeError):
    """A file of the journal that is needed is missing, damaged or unreadable. The message names it."""

    exit_status = 1


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A batch on disk. ``position``: where the critic is before it trains on the batch."""

    path: Path
    position: CriticPosition
    digest: str
    num_bytes: int


class CriticJournal:
    """The journal of one run, on rank 0. Not thread-safe.

    Args:
        directory: created at the first write.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory)
        self._entries: dict[int, _Entry] = {}

    # ---- the run ----------------------------------------------------------------------------

    def run_start(self) -> CriticPosition | None:
        """Where the critic was when the run of this directory began; None before the first run."""
        path = self.directory / _RUN
        try:
            content = json.loads(read_patiently(path, lambda: path.read_text(encoding="utf-8")))
            return CriticPosition(str(content["run_id"]), 1, str(content["history"]))
        except NOT_THERE:
            return None
        except OSError as error:
            raise _unreadable(path, error) from error
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(
                f"{path} cannot be read ({error}): delete it to start the run from the beginning"
            ) from error

    def begin_run(self, position: CriticPosition) -> None:
        """Note that a run begins, with the critic at ``position``."""
        content = json.dumps({"run_id": position.run_id, "history": position.history})
        self._write_file(self.directory / _RUN, content.encode())

    # ---- batches ----------------------------------------------------------------------------

    def write(self, position: CriticPosition, arrays: Mapping[str, np.ndarray], digest: str) -> None:
        """Write a batch, synced to disk. ``position``: the critic's before the batch; ``digest``: its `batch_digest`.

        Raises:
            OSError: it could not be written, for example because the disk is full.
        """
        path = self.directory / f"{position.next_number:08d}{_SUFFIX}"
        metadata = {
            "run_id": position.run_id,
            "sequence_number": str(position.next_number),
            "history": str(position.history),
            "digest": digest,
        }
        content = save(dict(arrays), metadata)
        self._write_file(path, content)
        self._entries[position.next_number] = _Entry(path, position, digest, len(content))

    def read(self, number: int) -> dict[str, np.ndarray]:
        """The batch with this number.

        Raises:
            JournalError: it is missing, cannot be read now, or is not what was written.
        """
        entry = self._entries.get(number)
        if entry is None:
            raise JournalError(f"{self.directory} has no training batch {number}, only {self._describe()}")
        try:
            arrays = load(read_patiently(entry.path, entry.path.read_bytes))
            if batch_digest(arrays) == entry.digest:
                return arrays
            reason = "its checksum is wrong"
        except (*NOT_THERE, SafetensorError, KeyError) as error:
            reason = str(error)
        except OSError as error:
            raise _unreadable(entry.path, error) from error
        raise JournalError(
            f"the training batch {entry.path} is damaged ({reason}): the critic cannot be brought up to date"
        )

    def positions(self, position: CriticPosition) -> list[CriticPosition]:
        """Positions from which the batches here lead to ``position`` without a gap: oldest first, itself included."""
        found = [position]
        while (entry := self._entries.get(found[0].next_number - 1)) is not None:
            if entry.position.after(entry.digest) != found[0]:
                break
            found.insert(0, entry.position)
        return found

    def scan(self) -> None:
        """Read which batches are in the directory.

        Raises:
            JournalError: one cannot be read now. It may be needed.
            NotWrittenError: what was left unfinished cannot be deleted.
        """
        self._entries = {}
        if not self.directory.is_dir():
            return
        for path in self.directory.glob(f"*{UNFINISHED}"):
            _delete(path)
        entries = [entry for path in self.directory.glob(f"*{_SUFFIX}") if (entry := _read_entry(path)) is not None]
        self._entries = {entry.position.next_number: entry for entry in entries}

    def rewind(self, position: CriticPosition) -> None:
        """Delete the batches that do not lead to ``position``, where the run continues.

        Raises:
            NotWrittenError: one cannot be deleted.
        """
        leading_there = {point.next_number for point in self.positions(position)[:-1]}
        for number in self._entries.keys() - leading_there:
            self._drop(number)
        logger.info(
            "critic journal %s: the run continues at training batch %d, with %s",
            self.directory,
            position.next_number,
            self,
        )

    def prune(self, first_needed: int) -> None:
        """Delete the batches before number ``first_needed``."""
        for number in [number for number in self._entries if number < first_needed]:
            self._drop(number)
        logger.info("critic journal %s: keeps %s", self.directory, self)

    def __str__(self) -> str:
        return f"{self._describe()}, {self._num_bytes / 2**20:.1f} MiB"

    @property
    def _num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values())

    def _describe(self) -> str:
        numbers = sorted(self._entries)
        return f"batches {numbers[0]} to {numbers[-1]}" if numbers else "no batches"

    def _drop(self, number: int) -> None:
        _delete(self._entries.pop(number).path)

    def _write_file(self, path: Path, content: bytes) -> None:
        try:
            private_folder(self.directory)  # nobody else may read the samples
            write_synced(path, content)
        except UntrustedPathError as error:
            raise JournalError(f"the critic journal would not be safe from others: {error}; or remove it") from error
        except OSError as error:
            raise NotWrittenError(
                error.errno,
                f"{path} of {len(content) / 2**20:.1f} MiB cannot be written ({error.strerror}); it must be on disk "
                f"before the critic is trained. {'Make room' if error.errno in NO_ROOM else 'Mend that'} and start the "
                "job again: it goes on from its last checkpoint",
            ) from error


def _read_entry(path: Path) -> _Entry | None:
    """A batch's entry, from the header of its file; None if the file is damaged, which is then renamed.

    Raises:
        JournalError: the file cannot be read now: no descriptors are left, or a file server does not answer.
    """

    def read() -> tuple[dict[str, str], int]:
        with path.open("rb"):  # safetensors reports every file that it cannot open as missing
            pass
        with safe_open(path, framework="np") as file:
            return file.metadata(), path.stat().st_size

    try:
        metadata, size = read_patiently(path, read)
        position = CriticPosition(metadata["run_id"], int(metadata["sequence_number"]), metadata["history"])
        return _Entry(path, position, metadata["digest"], size)
    except OSError as error:
        raise _unreadable(path, error) from error
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        aside = path.with_name(path.name + DAMAGED)
        logger.warning("%s is not a valid batch of the journal, renaming it to %s: %s", path, aside.name, error)
        path.rename(aside)
        return None


def _unreadable(path: Path, error: OSError) -> JournalError:
    return JournalError(f"{path} cannot be read now ({error}): start the job again when it can")


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        problem = f"{path} cannot be deleted ({error.strerror}): mend that and start the job again"
        raise NotWrittenError(error.errno, problem) from error
