"""Read-only access to a checkpoint's files, in a directory or inside a tar file.

Nothing is unpacked: weights are read from where they lie in the tar, so that loading a large archive costs no disk
space and needs no coordination between ranks. Names that lead out of the checkpoint are refused, and no file that is
a link is read.
"""

from __future__ import annotations

import contextlib
import gzip
import tarfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from nemo_style_aligner.errors import LFS_POINTER, NotWrittenError, UserError, is_lfs_pointer
from nemo_style_aligner.guard.parsing import read_bytes
from nemo_style_aligner.wording import download_hint

MOST_BESIDE_WEIGHTS = 512 << 20
"""Bytes of a model's tokenizer files together; of known ones the largest have a tenth."""

# Of a tar, while its list of files is made. A header has 512 bytes, or three times as many for a long name.
_MOST_HEADER_BYTES = 8 << 20
_LEAST_EXPANDED, _MOST_EXPANSION = 64 << 20, 10  # weights hardly become smaller when they are compressed


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
        """The whole file as UTF-8 text; ValueError if it is not, or larger than `parsing.MAX_BYTES`."""
        with self.open(name) as stream:
            return read_bytes(stream, f"{self.location}: {name}").decode("utf-8")

    def below(self, folder: str) -> list[str]:
        """Names of the files in ``folder`` and its subfolders."""
        return [name for name in self.names() if name.startswith(folder + "/")]

    def extract(self, names: list[str], target: Path, *, strip: str = "") -> None:
        """Copy small files to the temporary folder ``target``, without the leading folder ``strip`` in their names.

        Raises:
            ValueError: they are not small.
            NotWrittenError: one cannot be written.
        """
        room = MOST_BESIDE_WEIGHTS
        for name in names:
            destination = target / PurePosixPath(name).relative_to(strip)
            with self.open(name) as source:
                content = read_bytes(source, f"{self.location}: {name}", room)
            room -= len(content)
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


class _BoundedStream:
    """A stream that `tarfile` makes its list of files from: it ends where that would take too much time or memory."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        """``size``: bytes that there may be."""
        self._stream, self._size, self._left = stream, size, _MOST_HEADER_BYTES

    def read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise ValueError(f"its headers have more than {_MOST_HEADER_BYTES:,} bytes")
        content = self._stream.read(size)
        if b"GNU.sparse." in content:  # a map of the file would follow, of any size
            raise ValueError("it has a sparse file: pack it without --sparse")
        return content

    def seek(self, offset: int) -> int:
        if not 0 <= offset <= self._size:
            raise ValueError(f"a file in it ends at byte {offset:,} of at most {self._size:,}")
        return self._stream.seek(offset)

    def tell(self) -> int:
        return self._stream.tell()


class TarSource(FileSource):
    """A checkpoint inside a tar file. Those compressed by gzip work, but slowly. Not thread-safe.

    A member with a dangerous name or that is no regular file (a link, a device) cannot be reached.
    """

    def __init__(self, location: Path) -> None:
        self.location = location
        if not location.is_file():
            raise ArchiveError(f"{location} is neither a file nor a directory")
        self._stream, size = _open_tar(location)
        try:
            self._tar = tarfile.TarFile(fileobj=_BoundedStream(self._stream, size))  # type: ignore[arg-type]
            self._members = self._regular_files()
            self._check_end()
        except (tarfile.TarError, EOFError, OSError, ArithmeticError, ValueError, zlib.error) as error:
            self._stream.close()
            if isinstance(error, OSError) and error.errno is not None:  # without: of the decompression
                raise
            raise ArchiveError(f"{location} is not a readable tar file: {error}; it may be cut short") from error
        self._tar.fileobj = self._stream

    def _regular_files(self) -> dict[str, tarfile.TarInfo]:
        found: dict[str, tarfile.TarInfo] = {}
        for member in self._tar:
            name = _normalised(member.name)
            if member.issparse():
                raise tarfile.ReadError(f"{member.name} is a sparse file: pack it without --sparse")
            if not member.isreg() or name is None:
                continue
            if name in found:
                raise tarfile.ReadError(f"it has two files {name}")
            found[name] = member
        return found

    def _check_end(self) -> None:
        """Check that the tar ends with zeros. One that was cut between two files would otherwise pass as complete."""
        self._stream.seek(self._tar.offset)  # where the next header would be
        if self._stream.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
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
        self._stream.close()


def _open_tar(location: Path) -> tuple[IO[bytes], int]:
    """The file, decompressed if need be, and how many bytes it may have."""
    size = location.stat().st_size
    with location.open("rb") as file:
        start = file.read(8)
    if start.startswith(b"GGUF"):
        raise ArchiveError(f"{location} is a GGUF file, not an archive: convert it with nsa convert")
    if is_lfs_pointer(location):
        raise ArchiveError(f"{location} {LFS_POINTER}")
    if start.startswith(b"\x1f\x8b"):
        return cast(IO[bytes], gzip.GzipFile(location)), max(_LEAST_EXPANDED, _MOST_EXPANSION * size)
    return location.open("rb"), size


@contextlib.contextmanager
def open_source(location: Path) -> Iterator[FileSource]:
    """The files of the checkpoint at ``location``, a directory or a tar file.

    Raises:
        MissingFileError: nothing is there.
        ArchiveError: it is neither a directory nor a readable tar file.
    """
    if not location.exists():
        raise MissingFileError(f"there is no checkpoint at {location}{download_hint(str(location))}")
    if location.suffix == ".safetensors":
        raise ArchiveError(f"{location} has weights alone: give the folder that config.json and tokenizer are in, too")
    source: FileSource = DirectorySource(location) if location.is_dir() else TarSource(location)
    try:
        yield source
    finally:
        source.close()


def _normalised(name: str) -> str | None:
    """``./a/b`` -> ``a/b``; None for a name that leads out of the checkpoint."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
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
