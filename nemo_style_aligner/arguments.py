"""Types of arguments that several scripts have, for argparse: what they refuse is an error of the command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from nemo_style_aligner.seeds import LARGEST_SEED


def seed_argument(text: str) -> int:
    """A random seed."""
    if not text.isdecimal() or int(text) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number in [0, {LARGEST_SEED}]")
    return int(text)


def output_argument(text: str) -> Path:
    """A file to write."""
    path = Path(text)
    if (reason := why_unwritable(path.absolute().parent)) is not None:
        raise argparse.ArgumentTypeError(f"{path} cannot be written: {reason}")
    return path


def why_unwritable(folder: Path) -> str | None:
    """Why files cannot be written in ``folder``, which may have to be made first; None if they can."""
    # A link counts as what it points to. A dangling one is no folder, and none can be made in its place.
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not os.path.isdir(nearest):
        return f"{nearest} is not a folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"this user may not write in {nearest}"
