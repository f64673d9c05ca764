"""Arguments that several scripts have, and types of arguments, which refuse with an error of the command line.

Scripts read their command lines before they import what takes seconds: ``--help`` and mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from nemo_style_aligner.seeds import LARGEST_SEED


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A format of ``--help`` with the default of each option that has one and does not describe it itself."""

    def _format_action(self, action: argparse.Action) -> str:
        value, text = action.default, action.help or ""
        if action.nargs != 0 and value not in (None, (), [], argparse.SUPPRESS) and "default" not in text:
            shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            shown = f"default: {shown}".replace("%", "%%")
            action.help = f"{text} ({shown})" if text else shown
        return super()._format_action(action)


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


def output_folder_argument(text: str) -> Path:
    """A folder to write into, which may have to be made."""
    path = Path(text)
    if (reason := why_unwritable(path.absolute())) is not None:
        raise argparse.ArgumentTypeError(f"{path} cannot be written to: {reason}")
    return path


def why_unwritable(folder: Path) -> str | None:
    """Why files cannot be written in ``folder``, which may have to be made first; None if they can."""
    # A link counts as what it points to. A dangling one is no folder, and none can be made in its place.
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not os.path.isdir(nearest):
        return f"{nearest} is not a folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"this user may not write in {nearest}"


def may_not_read(path: Path) -> bool:
    """Whether this user is denied to read what is at ``path``, or to look whether anything is there."""
    try:
        os.stat(path)
    except OSError as error:
        return isinstance(error, PermissionError)
    return not os.access(path, os.R_OK)
