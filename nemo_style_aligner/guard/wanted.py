"""Whether anybody still waits for what a thread does: who serves a request says so, what takes long asks."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

CHECK_SECONDS = 0.25
"""How soon it is noticed that nobody waits."""

wanted: ContextVar[Callable[[], None]] = ContextVar("wanted", default=lambda: None)
"""Raises once nobody waits for this thread's work, which should end then."""
