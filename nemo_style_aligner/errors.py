"""Errors that a user can fix, such as those of the config, the data, or another job that does not answer."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import ClassVar, NoReturn

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Numbers of errors of writing: the disk, or the user's share of it, is full."""


class UserError(Exception):
    """An error that is not the program's own; the message says what is wrong, where, and what to do.

    A job that ends with one shows only its message; with ``exp_manager.log_level=debug`` the traceback as well.
    """

    exit_status: ClassVar[int] = 2
    """The job's exit status: 2 for a mistake, which every rank finds and another start would not fix (docs/jobs.md)."""


class NotWrittenError(UserError, OSError):
    """A file of the job could not be written, mostly for want of space; the message says which, and what to do."""

    exit_status = 1


class UnreadableError(UserError, OSError):
    """A file that is there cannot be read at the moment; the message names it."""

    exit_status = 1


class NonFiniteError(UserError, FloatingPointError):
    """NaN or Inf that the run does not tolerate. The message names the samples or tensors; nothing was applied."""

    exit_status = 1


class OtherRankError(OSError):
    """Something failed on another rank; the message says on which, and why."""


LFS_POINTER = "is only Git LFS's pointer to the file: run `git lfs pull` in its folder"
"""What to do about a file that `is_lfs_pointer`."""


def is_lfs_pointer(path: str | os.PathLike[str]) -> bool:
    """Whether a file is the note that Git LFS leaves in a clone in place of the file itself."""
    with open(path, "rb") as file:
        return file.read(40).startswith(b"version https://git-lfs.github.com/spec/")


def comes_from(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether ``error`` is of this kind, or was raised because of one that is, or while one was handled.

    A signal's handler may raise in the middle of other code, which may make another error of it. Python itself does, of
    what is raised within the ``__set_name__`` of a class, as in imports.
    """
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error is not None


@contextlib.contextmanager
def excepthook_kept() -> Iterator[None]:
    """Put `sys.excepthook` back at the end: for calls of libraries that put their own in front of it.

    Theirs would print a traceback before ours says whether there is one, or hold back what ours prints until it
    returns, which it never does (`nemo_style_aligner.trainer.launch.ending.install_excepthook`).
    """
    hook = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook


def end_process(error: BaseException) -> NoReturn:
    """End this process from any thread, as an uncaught error in the main thread does; of a job, that ends all ranks."""
    sys.excepthook(type(error), error, error.__traceback__)
    os._exit(1)
