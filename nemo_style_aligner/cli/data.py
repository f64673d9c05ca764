"""``nsa data``: data files as a job sees them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_style_aligner.data.datasets import Dataset
    from nemo_style_aligner.data.examples import Example
    from nemo_style_aligner.data.text_format import TextFormat
    from nemo_style_aligner.data.tokenizer import Tokenizer

_JOBS = {"sft": "gpt_sft", "rm": "training_rm", "dpo": "gpt_dpo", "kto": "gpt_kto", "ppo": "gpt_ppo_actor"}

_EXAMPLES = """\b
Examples:
  nsa data show train_sft.jsonl --model base.nemo
  nsa data show train_sft.jsonl --model base.nemo --example 7 --tokens
  nsa data show comparisons.jsonl --model sft.nemo --job rm model.data.append_eod=True
"""


@click.group()
def command() -> None:
    """Look at data files as a job sees them."""


@command.command(epilog=_EXAMPLES)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("keys", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="A .nemo archive, or a folder with a tokenizer.",
)
@click.option("--job", type=click.Choice(tuple(_JOBS)), help="Which job reads the file.  [default: by the lines' keys]")
@click.option("--example", type=click.IntRange(min=1), default=1, help="The first one to show.")
@click.option("--count", type=click.IntRange(min=1), default=1, help="How many to show.")
@click.option("--tokens", is_flag=True, help="Also each token, on a line of its own.")
def show(
    file: Path, keys: tuple[str, ...], model: Path, job: str | None, example: int, count: int, tokens: bool
) -> None:
    """Show examples of FILE as a job sees them, and count over all of it.

    The file goes through the code of the job that would read it, with that job's config and any of its keys
    (KEY=VALUE). What that code leaves out, cuts off or reads as something else is logged, as in the job.
    """
    from nemo_style_aligner.checkpoints.nemo_archive import load_nemo_tokenizer
    from nemo_style_aligner.data.datasets import load_data_prefix
    from nemo_style_aligner.data.examples import shown, summary, texts_of
    from nemo_style_aligner.data.jsonl import DataError
    from nemo_style_aligner.data.tokenizer import load_tokenizer
    from nemo_style_aligner.jobs.preference_setup import mismatched_dataset, pair_dataset
    from nemo_style_aligner.jobs.supervised_setup import reward_dataset, sft_dataset
    from nemo_style_aligner.rl.rollouts.prompts import prompt_dataset
    from nemo_style_aligner.telemetry.log_lines import configure_logging

    configure_logging(0)
    is_archive = model.is_file() or (model / "model_config.yaml").is_file()
    tokenizer = (load_nemo_tokenizer if is_archive else load_tokenizer)(model)
    job = job or _job_of(file)
    cfg = _config(_JOBS[job], file, keys)
    dataset: Dataset[Any]
    if job == "sft":
        dataset, written = sft_dataset(cfg, "train_ds", tokenizer)
    else:
        source = load_data_prefix(cfg.model.data.data_prefix).train
        build = {"rm": reward_dataset, "dpo": pair_dataset, "kto": mismatched_dataset, "ppo": prompt_dataset}[job]
        dataset, written = build(cfg, source, tokenizer)
    last = min(example + count - 1, len(dataset))
    if example > last:
        raise DataError(f"{file}: --example {example}: there are {len(dataset)} examples")
    for number in range(example, last + 1):
        for text in texts_of(dataset[number - 1]):
            print(f"--- {number}: {text.name}, {summary(text, tokenizer)}")
            print(shown(text, tokenizer))
            if tokens:
                learnt = text.learnt or [False] * len(text.token_ids)
                for place, (token, is_learnt) in enumerate(zip(text.token_ids, learnt, strict=True)):
                    spelt = tokenizer.ids_to_text([token], keep_special=True)
                    print(f"{place:6} {token:8} {'learnt' if is_learnt else '      '} {spelt!r}")
    _print_counts([text for i in range(len(dataset)) for text in texts_of(dataset[i])], written, tokenizer, cfg)


def _job_of(path: Path) -> str:
    """The job that reads such lines."""
    from nemo_style_aligner.data.jsonl import read_jsonl

    record = read_jsonl(path)[0]
    keys = record.fields.keys()
    if {"chosen_response", "rejected_response"} <= keys:
        return "dpo"
    if {"response", "preference"} <= keys or {"completion", "label"} <= keys:
        return "kto"
    if {"chosen", "rejected"} <= keys or "label" in keys:
        return "rm"
    if "text" in keys:
        record.fail("'text' may be one of a pair of a reward model's, or a prompt of PPO's: say --job rm or --job ppo")
    return "sft"


def _config(name: str, path: Path, keys: Sequence[str]) -> DictConfig:
    """The job's config with the keys given, and this file as its training data."""
    from nemo_style_aligner.config.command_line import config_with
    from nemo_style_aligner.config.loading import check_config

    file = "'" + str(path.absolute()).replace("'", "\\'") + "'"
    given = [f"model.data.data_prefix={{train: [{file}]}}"]
    if name == "gpt_sft":
        given = [f"model.data.{part}.file_path={file}" for part in ("train_ds", "validation_ds")]
        given.append("model.restore_from_path=unused")
    if name == "gpt_ppo_actor":
        given.append("model.ppo.num_rollout_samples=1")
    cfg = config_with(name, [*given, *keys])
    check_config(cfg, name)
    return cfg


def _print_counts(texts: Sequence[Example], written: TextFormat, tokenizer: Tokenizer, cfg: DictConfig) -> None:
    """Counts over all texts that the job would use, and what ends responses."""
    from omegaconf import OmegaConf

    from nemo_style_aligner.data.examples import has_end
    from nemo_style_aligner.wording import unescaped

    ends = tokenizer.end_strings(written.end_strings)
    sampling = OmegaConf.select(cfg, "model.ppo.sampling_params")
    lengths = sorted(len(text.token_ids) for text in texts)
    print(f"--- in all: {len(texts)} texts of {lengths[0]} to {lengths[-1]} tokens, {sum(lengths)} together", end="")
    print(f", {sum(sum(text.learnt or ()) for text in texts)} of them learnt" if texts[0].learnt is not None else "")
    with_bos = sum(text.token_ids[0] == tokenizer.bos_id for text in texts)
    print(f"texts that begin with BOS: {with_bos} of {len(texts)}")
    if sampling is None:
        print(f"texts whose end generation knows: {sum(has_end(t, tokenizer, ends) for t in texts)} of {len(texts)}")
    else:
        ends = tokenizer.end_strings([*ends, *map(unescaped, sampling.end_strings or ())])
    stops = [tokenizer.ids_to_text([i], keep_special=True) for i in tokenizer.stop_ids]
    print(f"a response ends with {' or '.join(map(repr, dict.fromkeys([*stops, *ends])))}")
