"""Log lines of a job with many ranks: one line per record, each with its rank, as text or as JSON."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, get_args

from nemo_style_aligner.guard.masking import masked, masked_text
from nemo_style_aligner.kinds import LogFormat, LogLevel
from nemo_style_aligner.log_fields import FIELDS, OF_ALL_RANKS
from nemo_style_aligner.trainer.config.section_names import translated
from nemo_style_aligner.wording import spelt

LOG_FORMATS: tuple[str, ...] = get_args(LogFormat)
LOG_LEVELS: tuple[str, ...] = get_args(LogLevel)

_TEXT = "%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"
_PACKAGE = __name__.split(".")[0]


def configure_logging(rank: int = 0, level: int = logging.INFO, log_format: LogFormat = "text") -> None:
    """Send log records to standard error, one line each: text that starts with time and rank, or a JSON object.

    Rank 0 logs from ``level`` on, the others only warnings and worse: what all ranks would say alike is
    said once. Below INFO only this package logs. Calling it again replaces the earlier set-up.
    """
    handler = logging.StreamHandler(sys.stderr)
    text = TextFormatter(_TEXT.format(rank=rank), datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter(rank) if log_format == "json" else text)
    handler.addFilter(lambda record: rank == 0 or not hasattr(record, OF_ALL_RANKS))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    level = level if rank == 0 else max(level, logging.WARNING)
    root.setLevel(max(level, logging.INFO))
    logging.getLogger(_PACKAGE).setLevel(level if level < root.level else logging.NOTSET)
    # These packages report every request and every kernel at INFO.
    for noisy in ("urllib3", "werkzeug", "filelock", "megatron", "torch", "transformers", "httpx"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


def warn_plainly() -> None:
    """Send warnings to standard error, without time and rank: for commands."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class TextFormatter(logging.Formatter):
    """Records as text, without the package in its loggers' names: nearly every line would repeat it.

    What they quote may be anybody's, so that control characters are spelt out.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline, and the traceback if there is one."""
        return spelt(masked_text(translated(super().format(record))))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line's first part, as `logging.Formatter`'s."""
        shown = logging.makeLogRecord(record.__dict__ | {"name": record.name.removeprefix(f"{_PACKAGE}.")})
        return super().formatMessage(shown)


class JsonFormatter(logging.Formatter):
    """Records as JSON objects, one per line.

    Keys: ``time`` (ISO 8601, UTC), ``rank``, ``level``, ``logger``, ``message``; ``exception``, with the traceback, if
    there is one; and the record's own fields (`with_fields`).
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its newline."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, Any] = {
            "time": time.isoformat("T", "milliseconds"),
            "rank": self._rank,
            "level": record.levelname,
            "logger": record.name,
            "message": masked_text(translated(record.getMessage())),
        }
        if record.exc_info:
            line["exception"] = masked_text(translated(self.formatException(record.exc_info)))
        return json.dumps({**masked(getattr(record, FIELDS, {})), **line}, default=str)
