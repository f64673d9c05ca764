"""The manifest of a training checkpoint: what it is, and size and SHA-256 of each of its files.

A checkpoint is damaged if files are missing or differ from what was written. If the system cannot read a file at the
moment (no descriptors left, a server that does not answer), that is not damage: reading is tried again for some
seconds, and then it is an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

import torch.distributed as dist

from nemo_style_aligner import activity
from nemo_style_aligner.durable import sync_file
from nemo_style_aligner.engine.parallel.agreement import on_every_rank, on_first_rank, patiently_on_every_rank
from nemo_style_aligner.errors import UnreadableError
from nemo_style_aligner.guard.file_source import DamagedCheckpointError, DirectorySource, FileSource
from nemo_style_aligner.guard.parsing import read_json

logger = logging.getLogger(__name__)

T = TypeVar("T")

MANIFEST = "manifest.json"
_FORMAT = 1
_READ_PAUSES = (0.2, 1.0, 3.0)  # seconds between tries to read


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What is known of a checkpoint without reading its tensors.

    Attributes:
        sequence: number of the checkpoint within its directory; the newest has the largest.
        step: the trainer's step.
        value: the monitored metric, None where it was not measured.
        files: name -> {"bytes": ..., "sha256": ...} of every file but the manifest.
        resumed_from: the `resume_from_checkpoint` of the run that wrote it; see `directory.origin_in`.
        monitor: the metric's name.
    """

    sequence: int
    step: int
    value: float | None
    files: Mapping[str, Mapping[str, Any]]
    resumed_from: str | None = None
    monitor: str | None = None

    def write(self, directory: Path) -> None:
        """Write ``manifest.json``, with a checksum of itself, and sync it to disk."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        path = directory / MANIFEST
        path.write_text(json.dumps(content | {"sha256": _checksum(content)}, indent=1), encoding="utf-8")
        sync_file(path)

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read ``manifest.json``.

        Raises:
            DamagedCheckpointError: there is none, or it is not what was written.
            OSError: it cannot be read now.
        """
        path = directory / MANIFEST
        try:
            content = read_patiently(path, lambda: read_json(path))
            checksum, version = content.pop("sha256"), content.pop("format")
        except (*NOT_THERE, ValueError, KeyError, AttributeError, TypeError) as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
        if version != _FORMAT or checksum != _checksum({"format": version, **content}):
            raise DamagedCheckpointError(f"{path} is damaged, or of another version")
        try:
            return cls(**content)
        except TypeError as error:  # keys of a later version
            raise DamagedCheckpointError(f"{path} is of another version: {error}") from error


NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of reading that are damage: the file is gone. Of any other, it may be readable later."""


def read_patiently(path: Path, read: Callable[[], T]) -> T:
    """``read()`` of a file, tried again if the system cannot read it at the moment, but not if it does not exist.

    Raises:
        UnreadableError: the last try failed, too.
    """
    pauses = iter(_READ_PAUSES)
    while True:
        try:
            return read()
        except OSError as error:
            if isinstance(error, NOT_THERE) or error.errno is None:  # None: raised by Python, about the contents
                raise
            if (pause := next(pauses, None)) is None:
                raise UnreadableError(error.errno, error.strerror, str(path)) from error  # it may lack the path
            logger.warning("%s: %s; retrying", path, error)
            time.sleep(pause)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe_files(directory: Path, group: dist.ProcessGroup | None = None) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file in ``directory``. Collective in ``group``: each rank reads its share."""
    files = on_first_rank(lambda: [p for p in directory.rglob("*") if p.is_file()], group)
    share = _own_share(sorted(file.relative_to(directory).as_posix() for file in files))
    parts = patiently_on_every_rank(lambda: {name: describe_file(directory / name) for name in share}, group)
    return {name: description for part in parts for name, description in part.items()}


def find_damage(directory: Path, group: dist.ProcessGroup | None = None) -> list[str]:
    """What is wrong with the checkpoint; empty if nothing is. Collective in ``group``: each rank reads its share.

    Raises:
        OSError: files cannot be read now.
    """
    content, damage = on_first_rank(lambda: _read_or_damage(directory), group)
    if content is None:
        return [damage]
    return find_changes(DirectorySource(directory), content, group)


def _own_share(names: list[str]) -> list[str]:
    return names[dist.get_rank() :: dist.get_world_size()]


def verify_on_disk(directory: Path, group: dist.ProcessGroup | None = None) -> list[str]:
    """`find_damage` of files that were just written and synced, read from disk if the system allows it.

    The checksums were computed from the page cache. Here the cache is asked to drop the files first, so that they are
    compared with what the disk gives back. File systems in memory, and some network ones, answer from memory all the
    same.
    """
    if hasattr(os, "posix_fadvise"):
        content, _ = on_first_rank(lambda: _read_or_damage(directory), group)
        share = _own_share(sorted(content or ()))  # those that this rank reads back
        # Collective, so that an error of one rank is raised on all of them.
        on_every_rank(lambda: _forget([directory / name for name in share]), group)
    return find_damage(directory, group)


def _forget(paths: list[Path]) -> None:
    """Drop synced files' pages from the page cache."""
    for path in filter(Path.is_file, paths):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _read_or_damage(directory: Path) -> tuple[Mapping[str, Any] | None, str]:
    try:
        return Manifest.read(directory).files, ""
    except DamagedCheckpointError as error:
        return None, str(error)


def describe_file(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as stream:
        return describe_stream(stream)


def describe_stream(stream: IO[bytes]) -> dict[str, Any]:
    """Number and SHA-256 of the bytes that are left in a stream."""
    digest, size = hashlib.sha256(), 0
    while block := stream.read(1 << 20):
        digest.update(block)
        size += len(block)
        activity.progress()
    return {"bytes": size, "sha256": digest.hexdigest()}


def find_changes(
    source: FileSource, expected: Mapping[str, Mapping[str, Any]], group: dist.ProcessGroup | None = None
) -> list[str]:
    """What is missing from ``source`` or differs from ``expected``. Collective: each rank reads its share.

    Raises:
        OSError: files cannot be read now.
    """
    share = _own_share(sorted(expected))
    parts = patiently_on_every_rank(lambda: [_compare(source, name, expected[name]) for name in share], group)
    return sorted(problem for part in parts for problem in part if problem)


def _compare(source: FileSource, name: str, expected: Mapping[str, Any]) -> str | None:
    path = source.location / name

    def read() -> dict[str, Any]:
        with source.open(name) as stream:
            return describe_stream(stream)

    try:
        found = read_patiently(path, read)
    except NOT_THERE:
        return f"{path}: No such file or directory"
    except OSError as error:
        if error.errno is not None:
            raise
        return f"{path}: {error}"
    if found["bytes"] != expected["bytes"]:
        return f"{path}: {found['bytes']} bytes instead of {expected['bytes']}"
    if found["sha256"] != expected["sha256"]:
        return f"{path}: its contents have changed (SHA-256 differs)"
    return None
