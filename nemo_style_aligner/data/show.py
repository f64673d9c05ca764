"""Show lines of a data file as a job sees them: the tokens, which of them are learnt, how texts begin and end.

    python -m nemo_style_aligner.data.show FILE --model base.nemo [KEY=VALUE ...]

The file goes through the code of the job that would read it (--job, or what the lines' keys say), with that job's
config and any of its keys (model.data.train_ds.add_eos=False). What the code leaves out, cuts off or reads as
something else is logged, as in the job.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_style_aligner.arguments import HelpFormatter

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from nemo_style_aligner.data.datasets import Dataset
    from nemo_style_aligner.data.examples import Example
    from nemo_style_aligner.data.text_format import TextFormat
    from nemo_style_aligner.data.tokenizer import Tokenizer

_JOBS = {"sft": "gpt_sft", "rm": "training_rm", "ppo": "gpt_ppo_actor"}


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        prog="python -m nemo_style_aligner.data.show", description=__doc__, formatter_class=HelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument(
        "--model", type=Path, required=True, metavar="PATH", help="a .nemo archive, or a folder with a tokenizer"
    )
    parser.add_argument("--job", choices=tuple(_JOBS), help="which job reads the file (default: by the lines' keys)")
    parser.add_argument("--example", type=int, default=1, metavar="N", help="the first one to show, counted from 1")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="how many to show")
    parser.add_argument("--tokens", action="store_true", help="also each token, on a line of its own")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="keys of the job's config")
    options = parser.parse_intermixed_args(arguments)
    if options.example < 1 or options.count < 1:
        parser.error("--example and --count: give at least 1")

    from nemo_style_aligner.errors import UserError
    from nemo_style_aligner.telemetry.log_lines import configure_logging

    configure_logging(0)
    try:
        _show(options)
    except (UserError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
    except BrokenPipeError:
        sys.stderr.close()


def _show(options: argparse.Namespace) -> None:
    from nemo_style_aligner.checkpoints.nemo_archive import load_nemo_tokenizer
    from nemo_style_aligner.data.datasets import load_data_prefix
    from nemo_style_aligner.data.examples import shown, summary, texts_of
    from nemo_style_aligner.data.jsonl import DataError
    from nemo_style_aligner.data.tokenizer import load_tokenizer
    from nemo_style_aligner.jobs.supervised_setup import reward_dataset, sft_dataset
    from nemo_style_aligner.rl.rollouts.prompts import prompt_dataset

    is_archive = options.model.is_file() or (options.model / "model_config.yaml").is_file()
    tokenizer = (load_nemo_tokenizer if is_archive else load_tokenizer)(options.model)
    job = options.job or _job_of(options.file)
    cfg = _config(_JOBS[job], options)
    dataset: Dataset[Any]
    if job == "sft":
        dataset, written = sft_dataset(cfg, "train_ds", tokenizer)
    else:
        source = load_data_prefix(cfg.model.data.data_prefix).train
        dataset, written = (reward_dataset if job == "rm" else prompt_dataset)(cfg, source, tokenizer)
    last = min(options.example + options.count - 1, len(dataset))
    if options.example > last:
        raise DataError(f"{options.file}: --example {options.example}: there are {len(dataset)} examples")
    for number in range(options.example, last + 1):
        for example in texts_of(dataset[number - 1]):
            print(f"--- {number}: {example.name}, {summary(example, tokenizer)}")
            print(shown(example, tokenizer))
            if options.tokens:
                learnt = example.learnt or [False] * len(example.token_ids)
                for place, (token, is_learnt) in enumerate(zip(example.token_ids, learnt, strict=True)):
                    text = tokenizer.ids_to_text([token], keep_special=True)
                    print(f"{place:6} {token:8} {'learnt' if is_learnt else '      '} {text!r}")
    _print_counts([text for i in range(len(dataset)) for text in texts_of(dataset[i])], written, tokenizer, cfg)


def _job_of(path: Path) -> str:
    """The job that reads such lines."""
    from nemo_style_aligner.data.jsonl import read_jsonl

    record = read_jsonl(path)[0]
    keys = record.fields.keys()
    if {"chosen", "rejected"} <= keys or "label" in keys:
        return "rm"
    if "text" in keys:
        record.fail("'text' may be one of a pair of a reward model's, or a prompt of PPO's: say --job rm or --job ppo")
    return "sft"


def _config(name: str, options: argparse.Namespace) -> DictConfig:
    """The job's config with the keys given, and this file as its training data."""
    from nemo_style_aligner.config.command_line import config_with
    from nemo_style_aligner.config.loading import check_config

    file = "'" + str(options.file.absolute()).replace("'", "\\'") + "'"
    given = {
        "gpt_sft": [f"model.data.{part}.file_path={file}" for part in ("train_ds", "validation_ds")],
        "training_rm": [f"model.data.data_prefix={{train: [{file}]}}"],
        "gpt_ppo_actor": [f"model.data.data_prefix={{train: [{file}]}}", "model.ppo.num_rollout_samples=1"],
    }[name]
    if name == "gpt_sft":
        given.append("model.restore_from_path=unused")
    cfg = config_with(name, [*given, *options.keys])
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


if __name__ == "__main__":
    main()
