"""Read-only access to a checkpoint's files, in a directory or inside a tar file.

Nothing is unpacked: weights are read from where they lie in the tar, so that loading a large archive costs no disk
space and needs no coordination between ranks. Names that lead out of the checkpoint are refused, and no file that is
a link is read.
"""

from __future__ import annotations

import contextlib
import io
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from nemo_style_aligner.errors import NotWrittenError, UserError
from nemo_style_aligner.wording import download_hint


class DamagedCheckpointError(UserError, ValueError):
    """A checkpoint's files are not what was written."""

    exit_status = 1


class ArchiveError(UserError, ValueError):
    """Not an archive, or one that cannot be read; the message says what it is and what to do."""


class MissingFileError(UserError, FileNotFoundError):
    """A checkpoint lacks a file that is needed, or is not there at all."""

    exit_status = 1


class FileSource(ABC):
    """The files of one checkpoint, by their relative POSIX names."""

    location: Path

    @abstractmethod
    def names(self) -> list[str]:
        """Names of all regular files, sorted."""

    @abstractmethod
    def open(self, name: str) -> IO[bytes]:
        """Open a file for reading; the stream is seekable.

        Raises:
            MissingFileError: no regular file of this name.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what is held open."""

    def read_text(self, name: str) -> str:
        """The whole file as UTF-8 text."""
        with self.open(name) as stream:
            return stream.read().decode("utf-8")

    def below(self, folder: str) -> list[str]:
        """Names of the files in ``folder`` and its subfolders."""
        return [name for name in self.names() if name.startswith(folder + "/")]

    def extract(self, names: list[str], target: Path, *, strip: str = "") -> None:
        """Copy small files to the temporary folder ``target``, without the leading folder ``strip`` in their names.

        Raises:
            NotWrittenError: one cannot be written.
        """
        for name in names:
            destination = target / PurePosixPath(name).relative_to(strip)
            with self.open(name) as source:
                content = source.read()
            try:
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.write_bytes(content)
            except OSError as error:
                raise NotWrittenError(
                    f"{destination} cannot be written ({error.strerror}): make room there, or name another folder for "
                    "temporary files in TMPDIR"
                ) from error

    def _not_found(self, name: str) -> MissingFileError:
        return MissingFileError(f"{self.location} has no file {name}")


class DirectorySource(FileSource):
    """A checkpoint that is a directory."""

    def __init__(self, location: Path) -> None:
        self.location = location

    def names(self) -> list[str]:
        """See `FileSource.names`; symbolic links are left out."""
        files = (p for p in self.location.rglob("*") if p.is_file() and not p.is_symlink())
        return sorted(p.relative_to(self.location).as_posix() for p in files)

    def open(self, name: str) -> IO[bytes]:
        """See `FileSource.open`."""
        relative = PurePosixPath(safe_name(name))
        path = self.location / relative
        link = next(
            (p for part in (relative, *relative.parents[:-1]) if (p := self.location / part).is_symlink()), None
        )
        if link is not None:
            raise MissingFileError(
                f"{link} is a symbolic link, which is not followed: copy the folder, `cp -rL {self.location} FOLDER`, "
                "and give that one"
            )
        if not path.is_file():
            raise self._not_found(name)
        return path.open("rb")

    def close(self) -> None:
        """Nothing is held open."""


class TarSource(FileSource):
    """A checkpoint inside a tar file. Compressed ones work, but slowly. Not thread-safe."""

    def __init__(self, location: Path) -> None:
        self.location = location
        try:
            self._tar = tarfile.open(location, "r:*")  # noqa: SIM115 - closed by close()
            # A member with a dangerous name or that is no regular file cannot be reached.
            self._members = {
                name: member
                for member in self._tar.getmembers()
                if member.isreg() and (name := _normalised(member.name)) is not None
            }
            self._check_end()
        except (tarfile.TarError, EOFError) as error:
            with location.open("rb") as file:
                is_gguf = file.read(4) == b"GGUF"
            if is_gguf:
                raise ArchiveError(
                    f"{location} is a GGUF file, not an archive: convert it with convert_gguf_to_nemo.py"
                ) from error
            reason = str(error).partition(":\n")[0]  # what follows is a line for each compression that tarfile tried
            raise ArchiveError(f"{location} is not a readable tar file: {reason}; it may be cut short") from error

    def _check_end(self) -> None:
        """Check that the tar ends with zeros. One that was cut between two files would otherwise pass as complete."""
        stream = self._tar.fileobj
        if isinstance(stream, io.BufferedReader):  # not compressed: decompression finds a missing end itself
            stream.seek(self._tar.offset)  # where the next header would be
            if stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("the end is missing")

    def names(self) -> list[str]:
        """See `FileSource.names`."""
        return sorted(self._members)

    def open(self, name: str) -> IO[bytes]:
        """See `FileSource.open`."""
        member = self._members.get(safe_name(name))
        stream = self._tar.extractfile(member) if member is not None else None
        if stream is None:
            raise self._not_found(name)
        return stream

    def close(self) -> None:
        """See `FileSource.close`."""
        self._tar.close()


@contextlib.contextmanager
def open_source(location: Path) -> Iterator[FileSource]:
    """The files of the checkpoint at ``location``, a directory or a tar file.

    Raises:
        MissingFileError: nothing is there.
        ArchiveError: it is neither a directory nor a readable tar file.
    """
    if not location.exists():
        raise MissingFileError(f"there is no checkpoint at {location}{download_hint(str(location))}")
    source: FileSource = DirectorySource(location) if location.is_dir() else TarSource(location)
    try:
        yield source
    finally:
        source.close()


def _normalised(name: str) -> str | None:
    """``./a/b`` -> ``a/b``; None for a name that leads out of the checkpoint."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        return None
    return path.as_posix()


def safe_name(name: str) -> str:
    """The normalised name.

    Raises:
        ValueError: it leads out of the checkpoint.
    """
    normalised = _normalised(name)
    if normalised is None:
        raise ValueError(f"file name {name!r} leads out of the checkpoint")
    return normalised
