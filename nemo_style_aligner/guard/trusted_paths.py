"""Nothing that a neighbour has planted is loaded, followed or written through.

A neighbour is every user but root and the one who runs this process. Paths are checked from the root down, links
included. In a folder that has passed, no neighbour can change what lies at the next name, so there is no moment between
check and use at which it could be something else. Access control lists beyond POSIX's are not seen.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nemo_style_aligner.durable import UNFINISHED, publish
from nemo_style_aligner.errors import NotWrittenError, UserError

_MOST_STEPS = 1000  # names on the way, those of links included; more are links in a circle


class UntrustedPathError(UserError):
    """A neighbour can change what lies at a path. The message says where and why; callers add what to do instead."""


def cache_folder(name: str) -> Path:
    """Where this user's folder ``name`` for what is made once is; it may not exist. RuntimeError: there is no home."""
    root = os.environ.get("NEMO_STYLE_ALIGNER_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "nemo_style_aligner" / name


def trusted_path(path: str | os.PathLike[str], *, strict: bool = False, make: int | None = None) -> Path:
    """The path, without links, of what lies at ``path``, where no neighbour can have put or can put anything else.

    A folder that everybody may write to needs the sticky bit, and what lies in it, like all links, must be this user's
    or root's. Other owners, and groups, are trusted with the folders that they have from those above: a team's share
    works. Not if ``strict``: then every folder must be this user's or root's, and writable by nobody else.

    Args:
        make: mode of folders that are made where there are none, less the umask; None: none are made.

    Raises:
        UntrustedPathError: a neighbour could.
        OSError: there is nothing, or no folder can be made.
    """
    names = [*reversed((Path.cwd() / path).parts)]
    place, is_shared = Path("/"), False
    for _ in range(_MOST_STEPS):
        if not names:
            return place
        name = names.pop()
        entry = place.parent if name == ".." else place / name
        is_shared &= name != "/"
        is_link = stat.S_ISLNK(_status(entry, make).st_mode)
        if strict or is_shared or is_link:
            _require_owner(entry, is_shared)
        if is_link:
            names += reversed(entry.readlink().parts)
        else:  # the last may be a file
            place, is_shared = entry, _is_shared(entry, strict, " or +t" if names else "")
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def own_folder(path: str | os.PathLike[str], *, strict: bool = False, make: int | None = None) -> Path:
    """`trusted_path` of a folder that is also this user's or root's, and that not everybody may write to."""
    folder = trusted_path(path, strict=strict, make=make)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    _require_owner(folder, is_shared=False)
    _require_not_writable(folder, 0o022 if strict else 0o002)
    return folder


def private_folder(path: str | os.PathLike[str], *, strict: bool = False) -> None:
    """Make a folder that is this user's alone (mode 0700), or make sure that the one that is there is.

    Raises:
        UntrustedPathError: it was not, and others may have planted something in it.
        OSError: it cannot be made.
    """
    folder = own_folder(path, strict=strict, make=0o700)
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise UntrustedPathError(f"{folder} belongs to {_user(status.st_uid)}")
    _require_not_writable(folder, 0o022)
    if status.st_mode & 0o077:
        folder.chmod(0o700)


def why_untrusted(folder: Path) -> str | None:
    """Why no `own_folder` can be had or made there; None if one can, as far as is seen without making it."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        (own_folder if nearest == folder else trusted_path)(nearest)
    except UntrustedPathError as error:
        return str(error)
    except OSError:  # there is something else
        return None
    return None


def unless_planted(path: str, flags: int) -> int:
    """Open a file whose name others can foresee: for ``open(..., opener=unless_planted)``.

    Whatever others' links, or second names of a file, lead to is neither truncated nor written to. This user's and
    root's own links are followed, except with ``O_NOFOLLOW``.

    Raises:
        OSError: there is a link or something else in the file's place.
    """
    try:
        descriptor = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        if flags & os.O_NOFOLLOW or os.lstat(path).st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, "there is a link in its place: remove it", path) from error
        return os.open(path, flags, 0o666)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(errno.EMLINK, "it is no file, or has other names (hard links): remove it", path)
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all, synced to disk, past what others may have planted. Raises OSError."""
    staging = path.with_name(path.name + UNFINISHED)
    try:
        with open(staging, "wb", opener=unless_planted) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        publish(staging, path)
    except OSError:
        with contextlib.suppress(OSError):
            staging.unlink()  # give a full disk its room back
        raise


def temporary_base() -> str:
    """The folder for temporary files and folders.

    Raises:
        UntrustedPathError: others can replace what lies in ``TMPDIR``.
    """
    base = tempfile.gettempdir()
    try:
        trusted_path(base)
    except UntrustedPathError as error:
        raise UntrustedPathError(f"no temporary files are safe in {base}: {error}; or set TMPDIR") from error
    return base


@contextlib.contextmanager
def temporary_folder(contents: str) -> Iterator[Path]:
    """A folder of this user's alone, in ``TMPDIR`` or ``/tmp``, that is removed at the end.

    Args:
        contents: what is put there, for the message.

    Raises:
        NotWrittenError: it cannot be made.
        UntrustedPathError: others can replace what lies there.
    """
    try:
        folder = tempfile.TemporaryDirectory(
            prefix="nemo_style_aligner.", dir=temporary_base(), ignore_cleanup_errors=True
        )
    except OSError as error:  # Python says which folders it has tried
        raise NotWrittenError(
            f"{contents} cannot be unpacked ({error.strerror}): name a folder for temporary files, with room in it, in "
            "TMPDIR"
        ) from error
    with folder as path:
        yield Path(path)


def _status(entry: Path, make: int | None) -> os.stat_result:
    """Of what is there, links not followed; of a folder that is made if there is nothing."""
    try:
        return entry.lstat()
    except FileNotFoundError:
        if make is None:
            raise
    with contextlib.suppress(FileExistsError):  # by now
        entry.mkdir(make)
    return entry.lstat()


def _is_shared(folder: Path, strict: bool, remedy: str) -> bool:
    """Whether everybody can put something beside what lies in the folder, but in its place nobody can."""
    mode = folder.lstat().st_mode
    if not mode & stat.S_ISVTX:
        _require_not_writable(folder, 0o022 if strict else 0o002, remedy)
    return bool(mode & 0o002)


def _require_owner(entry: Path, is_shared: bool) -> None:
    owner = entry.lstat().st_uid
    # In a container, folders of the machine's root may be nobody's.
    if owner not in (0, os.geteuid()) and (is_shared or owner != _unmapped_user()):
        raise UntrustedPathError(f"{entry} belongs to {_user(owner)}, who can put something else there")


def _require_not_writable(folder: Path, mask: int, remedy: str = "") -> None:
    status = folder.lstat()
    if status.st_mode & mask & 0o002:
        raise UntrustedPathError(f"{folder} is writable by others: chmod o-w{remedy} it")
    if status.st_mode & mask & 0o020 and not _is_group_of_one(folder, status.st_gid):
        raise UntrustedPathError(f"{folder} is writable by others of group {status.st_gid}: chmod g-w{remedy} it")


def _is_group_of_one(folder: Path, number: int) -> bool:
    """Whether the folder's group is root's, or this user's own as most systems make one, with no other members."""
    with contextlib.suppress(OSError):  # there is no list; where there is one, the mode does not say who may write
        return not os.getxattr(folder, "system.posix_acl_access")
    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
        if (user.pw_gid, user.pw_name) == (number, group.gr_name) and set(group.gr_mem) <= {user.pw_name}:
            return True
    return number == 0


@functools.cache
def _unmapped_user() -> int | None:
    """Who owns, in a container with users of its own, what belongs to the machine's; None elsewhere."""
    with contextlib.suppress(OSError, ValueError):
        nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
        numbers = [int(number) for number in Path("/proc/self/uid_map").read_text().split()]
        if not any(start <= nobody < start + count for start, count in zip(numbers[::3], numbers[2::3], strict=True)):
            return nobody
    return None


def _user(number: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(number).pw_name}"
    return f"user {number}"
