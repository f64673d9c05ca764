"""Finished episodes of programs, on disk before they count: a step that is made again takes them as they were.

A program is no function of what it is given, so its episodes cannot be generated again as those of functions can. Each
that has ended is a file in ``<log_dir>/episode_journal/``. A checkpoint needs none of those that were there when its
state was taken.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nemo_style_aligner.errors import NO_ROOM, NotWrittenError, UserError
from nemo_style_aligner.guard.trusted_paths import UntrustedPathError, own_folder, private_folder, write_synced

logger = logging.getLogger(__name__)

FOLDER = "episode_journal"


class EpisodeJournalError(UserError, RuntimeError):
    """The journal is not safe from others, or cannot be read."""

    exit_status = 1


class EpisodeJournal:
    """The journal of one run, of all its ranks that generate.

    Args:
        directory: on a disk that they share, as checkpoints are; created at the first write.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, seed: int, origin: str, episode: dict[str, Any]) -> None:
        """Write an episode, synced to disk.

        Args:
            seed: of its random numbers: no other episode of the run has the same.
            origin: of what it was made; equal where an episode could be this one.
            episode: in plain values.

        Raises:
            NotWrittenError: it cannot be written, for example because the disk is full.
            EpisodeJournalError: others could read or replace it.
        """
        path = self._path(seed)
        content = json.dumps({"origin": origin, "episode": episode}).encode()
        try:
            private_folder(self.directory)
            write_synced(path, content)
        except UntrustedPathError as error:
            raise EpisodeJournalError(
                f"the journal of episodes would not be safe from others: {error}; or remove it"
            ) from error
        except OSError as error:
            raise NotWrittenError(
                error.errno,
                f"{path} of {len(content):,} bytes cannot be written ({error.strerror}); an episode must be on disk "
                f"before it counts. {'Make room' if error.errno in NO_ROOM else 'Mend that'} and start the job again: "
                "it goes on from its last checkpoint, with the episodes that have ended since",
            ) from error

    def read(self, seed: int, origin: str) -> dict[str, Any] | None:
        """The episode that an earlier start has written, if there is one; None also if it is of another origin."""
        path = self._path(seed)
        if not path.exists():
            return None
        try:
            own_folder(path.parent)
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, UntrustedPathError) as error:
            raise EpisodeJournalError(
                f"{path} cannot be read ({error}): mend that, or delete it to run it again"
            ) from error
        if content["origin"] != origin:
            logger.warning("%s: of other weights, or of another prompt or program: it is run again", path)
            return None
        return dict(content["episode"])

    def of_now(self) -> Callable[[], None]:
        """What deletes the episodes that are there now, which a checkpoint that is begun now does not need."""
        there: Sequence[Path] = list(self.directory.iterdir()) if self.directory.is_dir() else ()

        def delete() -> None:
            for path in there:
                path.unlink(missing_ok=True)

        return delete

    def _path(self, seed: int) -> Path:
        return self.directory / f"{seed:016x}.json"
