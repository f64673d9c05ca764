"""``nsa train``: a training job, as its script in ``examples/nlp/gpt`` runs it."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence

import click

from nemo_style_aligner.places import SCRIPTS

_EXAMPLES = """\b
Examples:
  nsa train sft --model ~/models/SmolLM2-135M --data chats.jsonl --output results/sft
  nsa train sft model.restore_from_path=base.nemo model.data.train_ds.file_path=train.jsonl
  torchrun --nproc-per-node 8 --no-python nsa train dpo trainer.devices=8 ...
  mpirun -n 2 nsa train ppo trainer.devices=2 ...
  srun nsa train rm --config-path=/my/conf --config-name=mine

\b
"nsa train JOB --help" has all keys of its config, which are docs/config.md's.
"""

TRAINERS = {
    "sft": ("train_gpt_sft.py", "Supervised fine-tuning."),
    "rm": ("train_reward_model.py", "A reward model."),
    "ppo": ("train_gpt_ppo_actor.py", "PPO's actor, and group estimators without a critic."),
    "grpo": ("train_gpt_ppo_actor.py", "GRPO: the same with trainer.ppo.estimator=grpo, 8 responses to a prompt."),
    "reinforce": ("train_gpt_reinforce_actor.py", "REINFORCE."),
    "dpo": ("train_gpt_dpo.py", "DPO, IPO and RPO."),
    "kto": ("train_gpt_kto.py", "KTO."),
    "rs": ("train_gpt_rs_actor.py", "Best of n (rejection sampling)."),
    "kd": ("train_gpt_knowledge_distillation.py", "Distillation from stored logits."),
}
"""Each job's script, and what it trains."""

PRESETS = {"grpo": ("trainer.ppo.estimator=grpo", "trainer.ppo.num_rollouts_per_prompt=8")}
"""What a job begins its command line with; what follows counts more."""


def run_script(script: str, arguments: tuple[str, ...]) -> None:
    """Run an entry script as if it had been started itself; ranks that it starts run this process's command line.

    Whatever it raises ends the whole job, as it does there: this process may be one of several ranks.
    """
    sys.argv = [str(SCRIPTS / script), *arguments]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001
        from nemo_style_aligner.trainer.launch.ending import fail_job

        fail_job(error)


def job(
    name: str, script: str | Callable[[Sequence[str]], str], text: str, preset: tuple[str, ...] = ()
) -> click.Command:
    """A command that hands all of its arguments, ``--help`` among them, to an entry script, which they may decide."""

    @click.command(
        name,
        help=text,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def run(arguments: tuple[str, ...]) -> None:
        run_script(script if isinstance(script, str) else script(arguments), (*preset, *arguments))

    return run


command = click.Group(
    "train",
    {name: job(name, *described, PRESETS.get(name, ())) for name, described in TRAINERS.items()},
    help="Run a training job: the same as its script, from any folder, alone or as a rank of torchrun, mpirun or srun.",
    epilog=_EXAMPLES,
)
