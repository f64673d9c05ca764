"""``nsa serve-reward``: a reward model, or a Python function, as a service."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_style_aligner.tools.cli.train import job


def _script(arguments: Sequence[str]) -> str:
    is_function = any(argument.partition("=")[0] == "--function" for argument in arguments)
    return "serve_reward_function.py" if is_function else "serve_reward_model.py"


command = job("serve-reward", _script, "A reward model as a service; with --function FILE.py:NAME a function of yours.")
