"""The secret that the jobs of one run share: whoever does not send it is answered 401.

It is taken from the first of these that exists:

1. the config's ``token``, when that is neither ``auto`` nor ``none``;
2. the environment variable ``NEMO_STYLE_ALIGNER_TOKEN``;
3. the file that ``NEMO_STYLE_ALIGNER_TOKEN_FILE`` names;
4. ``~/.nemo_style_aligner/token``, made by whichever job of this user comes first.

A secret file must belong to the user or root, and be closed to everybody else; any other is refused.
``python -m nemo_style_aligner.guard.secret PATH`` makes one for a single run and prints its path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.trusted_paths import UntrustedPathError, trusted_path

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "NEMO_STYLE_ALIGNER_TOKEN"
TOKEN_FILE_VARIABLE = "NEMO_STYLE_ALIGNER_TOKEN_FILE"
AUTO, NONE = "auto", "none"
HOW_TO_SHARE = (
    "The log of each job says where its secret came from; if the jobs share no home directory, set "
    f"{TOKEN_VARIABLE} for both"
)
"""Advice for errors about two jobs with different secrets."""
_MAX_BYTES = 4096


class SecretError(UserError, RuntimeError):
    """The secret cannot be used or made; the message says where it is and what to do."""


@dataclasses.dataclass(frozen=True)
class Secret:
    """The shared secret and where it came from. ``value`` stays out of every printed form."""

    value: str = dataclasses.field(repr=False)
    source: str


@functools.cache
def _tell(source: str) -> None:
    """Once: a job with work queue and critic asks three times."""
    logger.info("shared secret from %s", source)


def resolve_token(configured: str | None, key: str) -> str | None:
    """The secret for the config value ``configured`` of the key ``key``; None when authentication is off.

    Logs each source once, and a warning when authentication is off. Raises `SecretError`.
    """
    if configured is None or str(configured).lower() == NONE:
        logger.warning("%s=none: no authentication, whoever reaches the port can read, train and save", key)
        return None
    secret = find_secret(str(configured), key)
    _tell(secret.source)
    return secret.value


def find_secret(configured: str = AUTO, key: str = "token") -> Secret:
    """The secret ``configured``; if that is `AUTO` the environment's, else the user's own, made when there is none."""
    if configured.lower() != AUTO:
        return Secret(_checked(configured, key), key)
    if os.environ.get(TOKEN_VARIABLE):
        return Secret(_checked(os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE), f"${TOKEN_VARIABLE}")
    named = os.environ.get(TOKEN_FILE_VARIABLE)
    if named:
        return read_secret(named)
    return make_secret(user_secret_path())


def user_secret_path() -> Path:
    """Where the secret of this user's jobs is when nothing else was configured."""
    try:
        return Path.home() / ".nemo_style_aligner" / "token"
    except RuntimeError as error:  # no HOME, and the user is not in the password database
        raise SecretError(f"there is no home directory for the shared secret: set {TOKEN_VARIABLE}") from error


def read_secret(path: str | os.PathLike[str]) -> Secret:
    """Read a secret file. Raises `SecretError` when it is missing, somebody else's, or open to others."""
    path = Path(path)
    try:
        # Not blocking: opening a FIFO would wait for its writer.
        descriptor = os.open(trusted_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except UntrustedPathError as error:
        raise SecretError(
            f"what is at {path} need not be the secret: {error}; or name another file in {TOKEN_FILE_VARIABLE}"
        ) from error
    except OSError as error:
        raise SecretError(
            f"the secret file {path} cannot be read ({error.strerror}): name another in {TOKEN_FILE_VARIABLE}, or make "
            f"it with `python -m nemo_style_aligner.guard.secret {path}`"
        ) from error
    status = os.fstat(descriptor)  # of the open file: it cannot be replaced after the check
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise SecretError(f"the secret file {path} is not a regular file: name another in {TOKEN_FILE_VARIABLE}")
    with open(descriptor, "rb") as file:
        if status.st_uid not in (os.geteuid(), 0):
            raise SecretError(
                f"the secret file {path} belongs to user {status.st_uid}, not to {os.geteuid()} who runs this job: "
                f"name a file of your own in {TOKEN_FILE_VARIABLE}"
            )
        if status.st_mode & 0o077:
            raise SecretError(
                f"the secret file {path} is open to others (mode {stat.S_IMODE(status.st_mode):04o}): remove it, as "
                "others may have read it, and start again; if nobody can have, `chmod 600` is enough"
            )
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise SecretError(f"the secret file {path} is larger than {_MAX_BYTES} bytes: it is not a secret file")
    return Secret(_checked(content.decode("utf-8", "replace").strip(), f"the secret file {path}"), str(path))


def make_secret(path: str | os.PathLike[str]) -> Secret:
    """Read the secret file ``path``, after making it if it does not exist.

    It appears with its content or not at all, so any number of jobs may do this at once: all get the same.
    """
    path = Path(path)
    if not os.path.exists(path):  # False also in a folder that cannot be entered, for which Path.exists raises
        try:
            trusted_path(path.parent, make=0o700)
            _create(path)
        except UntrustedPathError as error:
            raise SecretError(cannot_be_made(path, str(error))) from error
        except OSError as error:
            raise SecretError(cannot_be_made(path, str(error.strerror))) from error
    return read_secret(path)


def cannot_be_made(path: Path, reason: str) -> str:
    """The error message for a secret file ``path`` that does not exist and cannot be made."""
    return (
        f"the secret file {path} cannot be made ({reason}): put the secret into {TOKEN_VARIABLE}, or name a file in "
        f"another folder, or on another file system, in {TOKEN_FILE_VARIABLE}"
    )


def _create(path: Path) -> None:
    """Write a new secret to a file beside ``path`` and link it there, unless another process was faster."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask took away
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(descriptor)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _checked(value: str, source: str) -> str:
    if not value or not value.isascii() or not value.isprintable() or " " in value:
        raise SecretError(f"{source} does not hold a secret: one word of printable ASCII characters is needed")
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the secret file named on the command line, or check the one that is there, and print its path."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m nemo_style_aligner.guard.secret PATH", file=sys.stderr)
        return 2
    try:
        print(make_secret(arguments[0]).source)
    except SecretError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
