"""``nsa``: its commands, and how it ends.

A command ``NAME`` is ``command`` in the module ``NAME`` beside this one, which is imported when it is used. These
modules import at their top only what is light: ``--help`` of any command, and completion, take no torch.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from nemo_style_aligner import __version__
from nemo_style_aligner.arguments import why_unwritable
from nemo_style_aligner.engine.parallel.detection import detect_launch
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.masking import masked_text
from nemo_style_aligner.places import commit
from nemo_style_aligner.wording import spelt

COMMANDS = {
    "train": "Run a training job: sft, rm, ppo, reinforce, dpo, kto, rs, kd.",
    "serve-critic": "Serve PPO's critic, and train it.",
    "serve-reward": "Serve a reward model, or a function of yours, to PPO.",
    "convert": "Convert models: Hugging Face, GGUF, training checkpoints, .nemo.",
    "inspect": "Describe a model: architecture, sizes, tokenizer, what it was trained from.",
    "data": "Look at data files as a job sees them; convert them.",
    "eval": "Measure a model: right answers, win rate, KL, perplexity, a reward model's accuracy.",
    "report": "Write a page about a run: outcome, samples, charts.",
    "chat": "Talk to a checkpoint or a server.",
    "serve": "Serve a checkpoint behind an OpenAI-compatible API.",
    "plan": "Plan a run on a cluster: what fits where, and how long a step takes.",
    "launch": "Start a plan's jobs, on this machine or on a cluster.",
    "doctor": "Say what of this machine is usable, and what would make it more so.",
}
"""Each command and what it does."""

_EXAMPLES = """\b
Examples:
  nsa convert ~/models/SmolLM2-135M-Instruct base.nemo
  nsa train sft model.restore_from_path=base.nemo model.data.train_ds.file_path=train.jsonl
  nsa data show train.jsonl --model base.nemo
  nsa eval policy.nemo --against sft.nemo --prompts test.jsonl --reward-model rm.nemo
  nsa report results/actor
  nsa chat policy.nemo
  nsa serve policy.nemo --port 8000
  nsa plan --model 8b --cluster 2x8xh100 --write plan.yaml
  nsa launch plan.yaml --with slurm

\b
"nsa COMMAND --help" has examples of each. "nsa train" runs the scripts in examples/nlp/gpt.
Completion: eval "$(_NSA_COMPLETE=bash_source nsa)" in ~/.bashrc; zsh_source and fish_source likewise.
"""

SETTINGS: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 120,
    "show_default": True,
}
"""The settings of all commands."""


def writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """The value of an option that names a file to write; click looks only at files that exist."""
    if value is not None and (reason := why_unwritable(value.absolute().parent)) is not None:
        raise click.BadParameter(f"{value} cannot be written: {reason}")
    return value


def announce(what: str) -> None:
    """Say on standard error, on the first rank, what is about to take seconds: importing torch, reading a model."""
    if detect_launch(os.environ).rank == 0:
        click.echo(f"loading {spelt(what)}", err=True)


class _Imported(click.Command):
    """A command whose module is imported when it is used: before, only its name and what it does are known."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        module = str(self.name).replace("-", "_")
        command: click.Command = importlib.import_module(f"nemo_style_aligner.tools.cli.{module}").command
        return command.make_context(info_name, args, parent, **extra)


def _say_version(context: click.Context, parameter: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(f"nsa, version {__version__}" + (f" ({found})" if (found := commit()) else ""))
        context.exit()


@click.group(
    context_settings=SETTINGS,
    epilog=_EXAMPLES,
    commands=[_Imported(name, short_help=text) for name, text in COMMANDS.items()],
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_say_version, help="Say which.")
def nsa() -> None:
    """Look at, convert and try models and data of nemo_style_aligner; plan and launch its jobs."""


def main() -> None:
    """Run ``nsa`` and end the process."""
    run(nsa, "nsa")


def run(command: click.Command, name: str) -> NoReturn:
    """Run a command with this process's arguments, and end it. A user's mistake is said in a line, with its status."""
    try:
        status = command.main(prog_name=name, standalone_mode=False)
    except click.ClickException as error:
        error.message = spelt(error.message)  # type: ignore[misc]  # final, and shown with the usage
        error.show()
        status = error.exit_code
    except UserError as error:  # this is no rank, whatever the environment says
        print(spelt(masked_text(f"error: {error}")), file=sys.stderr)
        status = error.exit_status
    except Exception as error:  # noqa: BLE001 - how a job ends
        from nemo_style_aligner.trainer.launch.ending import fail_job

        fail_job(error)
    sys.exit(status)
