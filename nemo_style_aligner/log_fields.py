"""What a log record may have beside its text."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

# Attributes of records, see `with_fields` and `warn_for_all_ranks`.
FIELDS, OF_ALL_RANKS = "fields", "of_all_ranks"


def warn_for_all_ranks(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a warning that every rank would log alike: rank 0 does, once."""
    logger.warning(message, *args, extra={OF_ALL_RANKS: True})


def with_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The ``extra`` argument that adds ``fields`` to a record's JSON line. Text lines do not show them."""
    return {FIELDS: dict(fields)}
