"""Errors that people mend, not programmers: of the config, the data, another job that does not answer."""

from __future__ import annotations

from typing import ClassVar


class UserError(Exception):
    """What went wrong is none of the program's own errors; the message says what, where, and what to do.

    A job that ends with one shows its message alone, and the traceback with ``exp_manager.log_level=debug``.
    """

    exit_status: ClassVar[int] = 2
    """Of the job: 2 for a mistake, which every rank finds and another start does not mend (docs/jobs.md)."""


class OtherRankError(OSError):
    """Something failed on another rank; says on which, and why."""
