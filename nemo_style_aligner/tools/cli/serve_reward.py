"""``nsa serve-reward``: a reward model, or a Python function, as a service."""

from __future__ import annotations

import click

from nemo_style_aligner.tools.cli.train import run_script


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """A reward model as a service; with --function FILE.py:NAME a function of yours."""
    is_function = any(argument.partition("=")[0] == "--function" for argument in arguments)
    run_script("serve_reward_function.py" if is_function else "serve_reward_model.py", arguments)
