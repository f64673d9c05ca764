"""Log lines of a job with many ranks: one line per record, each with its rank."""

from __future__ import annotations

import logging
import sys

_FORMAT = "%(asctime)s [rank {rank}] %(levelname)s %(name)s: %(message)s"


def configure_logging(rank: int = 0, level: int = logging.INFO) -> None:
    """Send log records to standard error as single lines that start with time and rank.

    Rank 0 logs from ``level`` on, the others only warnings and worse: what all ranks have to say alike is
    said once. Calling it again replaces the earlier set-up.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT.format(rank=rank), datefmt="%H:%M:%S"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level if rank == 0 else max(level, logging.WARNING))
    # These packages report every request and every kernel at INFO.
    for noisy in ("urllib3", "werkzeug", "waitress", "filelock", "megatron", "torch", "transformers", "httpx"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))
