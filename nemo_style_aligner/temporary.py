"""Temporary folders that no neighbour can look into or replace."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from nemo_style_aligner.errors import NotWrittenError
from nemo_style_aligner.trusted_paths import temporary_base


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
