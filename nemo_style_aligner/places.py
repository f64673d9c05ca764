"""Where the files are that the package uses beside its modules, in a checkout and where a wheel has been installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

CONFIGS = (_PACKAGE / "shipped" / "conf").resolve()
"""One YAML file per job."""

SCRIPTS = (_PACKAGE / "shipped" / "examples" / "nlp" / "gpt").resolve()
"""The entry scripts, with NeMo-Aligner's names."""

REPOSITORY = CONFIGS.parent
"""The folder that has ``conf/``, ``examples/`` and ``slurm/``: the checkout, to which ``shipped/`` has links; or
``shipped/`` itself, where a wheel has been installed."""

IS_CHECKOUT = (REPOSITORY / "pyproject.toml").is_file()


def commit() -> str | None:
    """The commit that this is made of, with ``+`` where files of a checkout have changed since; None: nobody knows."""
    recorded = _PACKAGE / "commit.txt"  # by `make dist`
    if recorded.is_file():
        return recorded.read_text().strip()
    if not (REPOSITORY / ".git").exists():
        return None
    command = ["git", "-C", str(REPOSITORY), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None
