"""``nsa convert``: models from one format into another. The scripts ``convert_*.py`` are the same."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.cli.main import SETTINGS, announce, run
from nemo_style_aligner.wording import download_hint

_EXAMPLES = """\b
Examples:
  nsa convert ~/models/Llama-3.1-8B-Instruct llama.nemo
  nsa convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2.nemo
  nsa convert results/sft/checkpoints/megatron_gpt_sft-step=20-last step20.nemo
  nsa convert results/actor/checkpoints/megatron_gpt_ppo_actor.nemo policy-hf
  nsa convert lora-peft merged.nemo --base llama.nemo
  torchrun --nproc-per-node 4 -m nemo_style_aligner convert llama-hf llama.nemo --tensor-parallel 4
"""

_path = click.Path(path_type=Path)


@click.command(epilog=_EXAMPLES)
@click.argument("source", metavar="IN", type=_path)
@click.argument("target", metavar="OUT", type=_path)
@click.option("--precision", help="Of the weights written: bf16 or 32.  [default: bf16; the job's of a checkpoint]")
@click.option("--tensor-parallel", type=click.IntRange(min=1), default=1, help="Split layers over so many processes.")
@click.option("--pipeline-parallel", type=click.IntRange(min=1), default=1, help="Spread layers over so many.")
@click.option("--base", type=_path, help="Of an adapter: its model's .nemo; of a checkpoint: its base's, if moved.")
@click.option("--as-adapter", is_flag=True, help="Take a checkpoint's LoRA adapters alone, instead of merging them.")
@click.option(
    "--hyperparameters", type=_path, help="Of a checkpoint: its job's hyperparameters.yaml, if that was moved."
)
def command(source: Path, target: Path, **options: Any) -> None:
    """Convert IN into OUT.

    IN is a Hugging Face directory, a GGUF file, a training checkpoint, a .nemo archive or an adapter (PEFT's, or an
    archive's), whatever its name. OUT becomes a .nemo archive if its name ends so, with adapters merged; else a
    Hugging Face directory, where a reward model is a sequence classifier and an adapter is PEFT's. What is at OUT
    already is not replaced.
    """
    if target.suffix in (".gguf", ".safetensors", ".bin", ".pt"):
        raise click.BadParameter(f"{target}: name a .nemo file, or a folder for a Hugging Face model", param_hint="OUT")
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise UserError(f"{target} is there already: remove it, or give another name")
    _convert(source, target, target.suffix == ".nemo", **options)


def _convert(
    source: Path, target: Path, to_archive: bool, tensor_parallel: int, pipeline_parallel: int, **options: Any
) -> None:
    if not source.expanduser().exists():
        raise UserError(f"{source} does not exist{download_hint(str(source))}")
    announce(f"torch and megatron-core, then {source}")
    from nemo_style_aligner.trainer.launch.supervisor import end_with_supervisor
    from nemo_style_aligner.trainer.models.conversion import run_conversion
    from nemo_style_aligner.trainer.models.files import convert

    end_with_supervisor()  # where a job does this on its way
    source, target = source.expanduser(), target.expanduser()
    run_conversion(lambda: convert(source, target, to_archive, **options), target, tensor_parallel, pipeline_parallel)


def script(description: str | None, source: str, target: str) -> None:
    """Run one of the scripts ``convert_*.py``, which replace an archive that is there.

    Args:
        description: the script's docstring.
        source, target: its options for IN and OUT. ``--output-dir`` is a Hugging Face directory's; with ``--adapter``
            the name of OUT decides.
    """
    of_adapter = source == "--adapter"

    def convert(**values: Any) -> None:
        to_archive = values["target"].suffix == ".nemo" if of_adapter else target != "--output-dir"
        _convert(to_archive=to_archive, **values | {"as_adapter": of_adapter})

    named = [
        click.Option([flag, name], required=True, type=_path) for flag, name in ((source, "source"), (target, "target"))
    ]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    text = "\n\n".join(f"\b\n{paragraph}" for paragraph in (description or "").split("\n\n"))
    run(click.Command("convert", SETTINGS, convert, [*named, *options], help=text), Path(sys.argv[0]).name)
