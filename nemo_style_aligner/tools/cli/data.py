"""``nsa data``: data files as a job sees them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_style_aligner.tools.cli.main import announce, writable
from nemo_style_aligner.wording import spelt, unescaped

if TYPE_CHECKING:
    from nemo_style_aligner.engine.contract import GenerationResult
    from nemo_style_aligner.engine.text.encoding import Lines
    from nemo_style_aligner.engine.text.jsonl import Record
    from nemo_style_aligner.engine.text.text_format import TextFormat
    from nemo_style_aligner.engine.text.texts import TextDataset
    from nemo_style_aligner.engine.text.tokenizer import Tokenizer
    from nemo_style_aligner.trainer.config.job_config import JobConfig
    from nemo_style_aligner.trainer.data.examples import Example, Piece
    from nemo_style_aligner.trainer.rl.sample import Sample

_JOBS = {  # the config of each, and what its lines are
    "sft": ("gpt_sft", "examples for fine-tuning"),
    "rm": ("training_rm", "texts for a reward model"),
    "dpo": ("gpt_dpo", "pairs of responses to a prompt"),
    "kto": ("gpt_kto", "judged responses"),
    "kd": ("gpt_knowledge_distillation", "texts with a teacher's logits"),
    "ppo": ("gpt_ppo_actor", "prompts for reinforcement learning"),
}
_HAS_BOTH = {"chosen", "chosen_response"}  # keys of lines that are a pair each
_LOOKED_AT = 1000  # examples of which notes are counted

_EXAMPLES = """\b
Examples:
  nsa data show train_sft.jsonl --model base.nemo
  nsa data show train_sft.jsonl --model base.nemo --line 7 --count 3
  nsa data show train_sft.jsonl --model ~/models/Qwen3-0.6B --tokens model.data.train_ds.add_eos=False
  nsa data show comparisons.jsonl --model sft.nemo --job rm model.data.append_eod=True
  nsa data show prompts.jsonl --model sft.nemo | less
  nsa data show prompts.jsonl --model sft.nemo --environment my_env.py:episode
  nsa data show prompts.jsonl --model sft.nemo --count 8 --rewards "[{source: my_rewards.py:polite}]"
  nsa data show prompts.jsonl --model sft.nemo --rewards "[{source: exact_match}]" --response "It is 42."
"""


@click.group()
def command() -> None:
    """Look at data files as a job sees them, and bring them into a form that jobs read."""


@command.command(epilog=_EXAMPLES)
@click.argument("file", type=click.Path(exists=True, path_type=Path))
@click.argument("keys", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    required=True,
    help="Whose tokenizer: a .nemo archive, a Hugging Face directory, a GGUF file, a training checkpoint.",
)
@click.option("--job", type=click.Choice(tuple(_JOBS)), help="Which job reads the file.  [default: by its first line]")
@click.option("--line", type=click.IntRange(min=1), default=1, help="The first line to show.")
@click.option("--count", type=click.IntRange(min=1), default=1, help="How many examples to show.")
@click.option(
    "--environment", metavar="ENVIRONMENT", help="FILE.py:NAME, http://..., or '{command: [...]}': run episodes."
)
@click.option("--rewards", metavar="LIST", help="Try trainer.ppo.rewards on these lines: each response's reward.")
@click.option("--response", "responses", multiple=True, help="To try them on.  [default: one that MODEL generates]")
@click.option("--tokens", is_flag=True, help="Also each token, on a line of its own.")
@click.option("--color/--no-color", default=None, help="Colours.  [default: on a terminal, unless NO_COLOR is set]")
def show(
    file: Path,
    keys: tuple[str, ...],
    model: Path,
    job: str | None,
    line: int,
    count: int,
    environment: str | None,
    rewards: str | None,
    responses: tuple[str, ...],
    tokens: bool,
    color: bool | None,
) -> None:
    """Show lines of FILE as a job sees them, and count over all of it.

    FILE goes through the code of the job that would read it, with that job's config and any of its keys (KEY=VALUE).
    What is learnt stands in ⟦brackets⟧; special tokens have a colour. Below each example stands what of its line is
    not in the text or is in it twice. What the code cuts off or reads as something else is logged, as in the job.

    With --environment, MODEL and the function of that name have an episode about each of the lines: what the policy has
    sampled stands in brackets, beside what it was told, and below it why it ended and what it is worth.
    """
    if rewards is None and responses:
        raise click.UsageError("--response needs --rewards")
    if rewards is not None and environment is not None:
        raise click.UsageError("--environment shows what its function returns: leave out --rewards")
    if rewards is not None:
        if job not in (None, "ppo"):
            raise click.UsageError(f"--rewards is of reinforcement learning: leave out --job {job}")
        job, keys = "ppo", (*keys, f"trainer.ppo.rewards={rewards}")
    announce(f"torch, then {model}")
    from nemo_style_aligner.engine.text.chats import form_of
    from nemo_style_aligner.engine.text.jsonl import parse_line, read_lines
    from nemo_style_aligner.trainer.models.files import tokenizer_of
    from nemo_style_aligner.trainer.telemetry.log_lines import configure_logging

    configure_logging(0)
    if color is not None or "NO_COLOR" in os.environ:  # else click looks whether it writes to a terminal
        click.get_current_context().color = bool(color)
    first_line = parse_line(file, *next(read_lines(file)))
    first = first_line.fields
    job = job or ("ppo" if environment is not None else _job_of(first_line))
    if environment is not None and job != "ppo":
        raise click.UsageError("--environment needs prompts: --job ppo")
    on_one_line = job not in ("rm", "dpo") or _HAS_BOTH & first.keys() or "label" in first
    lines_of_example = 1 if on_one_line else 2
    chosen = _lines(file, line, count, lines_of_example)
    config = _config(job, file, first, keys)
    tokenizer = tokenizer_of(model.expanduser())
    tokenizer.format = tokenizer.format.with_special_tokens(config.get("model.special_tokens_as_text"))
    dataset, written = _dataset(job, config, tokenizer)
    click.echo(f"{file}: {form_of(first_line)}, read as {_JOBS[job][1]} (--job {job})")
    if environment is not None:
        _show_episodes(chosen, dataset, model, config, environment, tokens)
        return
    for lines in chosen:
        _show_lines(lines, dataset, tokenizer, tokens)
    if rewards is not None:
        _show_rewards(
            config, [item for lines in chosen for item in dataset.of_lines(lines)[0]], tokenizer, responses, model
        )
        return
    _show_counts(dataset, written, tokenizer, config)
    _show_notes(_lines(file, 1, _LOOKED_AT, lines_of_example), dataset, tokenizer)


def _job_of(first: Record) -> str:
    """The job that reads a file with such a first line."""
    from nemo_style_aligner.engine.text.chats import is_conversation, read_conversation

    keys = first.fields.keys()
    if {"chosen_response", "rejected_response"} <= keys:
        return "dpo"
    if "topk_logits" in keys:
        return "kd"
    if {"response", "preference"} <= keys or {"completion", "label"} <= keys:
        return "kto"
    if {"chosen", "rejected"} <= keys or "label" in keys:
        return "rm"
    if "answer" in keys and not isinstance(first.fields.get("question"), str):
        return "ppo"
    if "text" in keys:
        first.fail("'text' may be one of a pair of a reward model's, or a prompt of PPO's: say --job rm or --job ppo")
    return "ppo" if is_conversation(first) and read_conversation(first).turns[-1].kind != "assistant" else "sft"


def _lines(path: Path, line: int, count: int, per_example: int) -> list[Lines]:
    """The lines of the examples to show: ``count`` of them, beginning with that of which ``line`` is a part."""
    from nemo_style_aligner.engine.text.encoding import batches
    from nemo_style_aligner.engine.text.jsonl import DataError

    found: list[Lines] = []
    last = 0
    for example in batches([path], per_example):
        last = example.lines[-1][0]
        if last >= line and len(example.lines) == per_example:
            found.append(example)
        if len(found) == count:
            break
    if not found:
        raise DataError(f"{path}: --line {line}: the last line is {last}")
    return found


def _config(job: str, path: Path, first: Mapping[str, Any], keys: Sequence[str]) -> JobConfig:
    """The job's config with the keys given, and this file as its training data."""
    from nemo_style_aligner.trainer.config.command_line import config_with
    from nemo_style_aligner.trainer.config.loading import check_config
    from nemo_style_aligner.trainer.config.schema import JOBS

    file = "'" + str(path.absolute()).replace("'", "\\'") + "'"
    given = {
        "sft": [
            *(f"model.data.{part}.file_path={file}" for part in ("train_ds", "validation_ds")),
            "model.restore_from_path=unused",
        ],
        "rm": ["model.reward_model_type=regression"] if "label" in first else [],
        "ppo": ["model.ppo.num_rollout_samples=1"],
    }.get(job, [])
    if job != "sft":
        given.append(f"model.data.data_prefix={{train: [{file}]}}")
    cfg = config_with(_JOBS[job][0], [*given, *keys])
    check_config(cfg, _JOBS[job][0])
    return JOBS[_JOBS[job][0]].sections.read(cfg)


def _dataset(job: str, config: Any, tokenizer: Tokenizer) -> tuple[TextDataset[Any], TextFormat]:
    """The job's own dataset of the file, and how its texts are written."""
    from nemo_style_aligner.engine.text.texts import TextDataset
    from nemo_style_aligner.trainer.data.datasets import load_data_prefix
    from nemo_style_aligner.trainer.jobs.datasets import dataset_of
    from nemo_style_aligner.trainer.jobs.supervised_setup import sft_dataset

    made: Any
    if job == "sft":
        made, written = sft_dataset(config, "train_ds", tokenizer)
    else:
        source = load_data_prefix(config.model.data.data_prefix).train
        made, written = dataset_of(config, source, tokenizer)
    assert isinstance(made, TextDataset)  # of a single file
    return made, written


_CONVERT_EXAMPLES = """\b
Examples:
  nsa data convert train.parquet train.jsonl
  nsa data convert questions.csv prompts.jsonl --map question=text --map solution=answer
"""


def _renamings(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    renamed = dict[str, str]()
    for value in values:
        old, is_pair, new = value.partition("=")
        if not (old and is_pair and new) or old in renamed:
            raise click.BadParameter(f"{value!r}: say OLD=NEW, once for each")
        renamed[old] = new
    if len(set(renamed.values())) < len(renamed):
        raise click.BadParameter("two keys would have the same name")
    return renamed


@command.command(epilog=_CONVERT_EXAMPLES)
@click.argument("source", metavar="IN", type=click.Path(exists=True, path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(dir_okay=False, path_type=Path), callback=writable)
@click.option("--map", "renamed", multiple=True, metavar="OLD=NEW", callback=_renamings, help="Rename a key.")
def convert(source: Path, target: Path, renamed: dict[str, str]) -> None:
    """Write the rows of IN as JSON lines into OUT, keys renamed as --map says.

    IN is any data file that jobs read: JSON lines, a JSON array, CSV, TSV, Parquet, each but the last also as .gz, or a
    folder of Dataset.save_to_disk. Most need no conversion: jobs read them as they are.
    """
    from nemo_style_aligner.engine.text.chats import form_of
    from nemo_style_aligner.engine.text.jsonl import parse_line, read_lines, write_jsonl

    if target.suffix != ".jsonl":
        raise click.BadParameter(f"{target}: name a file that ends with .jsonl", param_hint="OUT")
    if target.exists():
        raise click.BadParameter(f"{target} is there already", param_hint="OUT")
    forms = dict[str, int]()

    def rows() -> Iterator[dict[str, Any]]:
        for number, raw in read_lines(source):
            record = parse_line(source, number, raw)
            for old, new in renamed.items():
                if old not in record.fields:
                    record.fail(f"--map {old}={new}: the keys are {', '.join(map(repr, record.fields)) or 'none'}")
                if new in record.fields and new not in renamed:
                    record.fail(f"--map {old}={new}: there is a key {new!r} already")
            row = {renamed.get(key, key): value for key, value in record.fields.items()}
            form = form_of(dataclasses.replace(record, fields=row))
            forms[form] = forms.get(form, 0) + 1
            yield row

    click.echo(f"{target}: {write_jsonl(target, rows()):,} lines")
    for form, count in forms.items():
        click.echo(f"  {count:,}: {spelt(form)}")


# ---- examples ----------------------------------------------------------------------------------


def _show_lines(lines: Lines, dataset: TextDataset[Any], tokenizer: Tokenizer, with_tokens: bool) -> None:
    """Print the examples of one line, or of the two lines of a pair."""
    from nemo_style_aligner.engine.text.jsonl import DataError
    from nemo_style_aligner.trainer.data.examples import shown, spelt, summary, texts_of

    place = f"{lines.path}:{'-'.join(str(number) for number, _ in lines.lines)}"
    items, counts = dataset.of_lines(lines)
    try:
        dataset.encoder.report(counts, [place])
    except DataError as error:  # also what is wrong with a file of one line alone
        if not items:
            click.echo(f"--- left out: {error}")
    texts = [text for item in items for text in texts_of(item)]
    for text in texts:
        click.secho(f"--- {place}: {text.name}, {summary(text, tokenizer)}", bold=True)
        click.echo(shown(text, tokenizer, _paint))
        if with_tokens:
            _show_tokens(text, tokenizer)
    for note in _notes(lines, texts, tokenizer):
        click.secho(f"note: {spelt(note)}", fg="yellow")


def _notes(lines: Lines, texts: Sequence[Example], tokenizer: Tokenizer) -> list[str]:
    from nemo_style_aligner.trainer.data.examples import changes

    return changes([record.fields for record in lines.records()], texts, tokenizer) if texts else []


def _paint(piece: Piece) -> str:
    color = "cyan" if piece.is_special else "green" if piece.is_learnt else None
    return click.style(piece.text, fg=color, bold=piece.is_learnt or None)


def _show_tokens(text: Example, tokenizer: Tokenizer) -> None:
    from nemo_style_aligner.trainer.data.examples import Piece

    special = {tokenizer.bos_id: "BOS", tokenizer.eos_id: "EOS"}
    learnt = text.learnt or [False] * len(text.token_ids)
    for place, (token, is_learnt) in enumerate(zip(text.token_ids, learnt, strict=True)):
        token_text = repr(tokenizer.token_text(token))
        is_special = token in tokenizer.markup_ids
        kind = special.get(token, "special" if is_special else "")
        piece = _paint(Piece(token_text, is_learnt, is_special))
        click.echo(f"{place:6} {token:8} {'learnt' if is_learnt else '':6} {kind:7} {piece}")


# ---- episodes ----------------------------------------------------------------------------------


def _show_episodes(
    chosen: Sequence[Lines], dataset: TextDataset[Any], model: Path, config: Any, named: str, with_tokens: bool
) -> None:
    """Print an episode about each of the lines."""
    from nemo_style_aligner.engine.parallel.groups import single_process
    from nemo_style_aligner.engine.text.jsonl import DataError
    from nemo_style_aligner.tools.evaluation.evaluation import generate, open_policy
    from nemo_style_aligner.trainer.rl.rollouts.setup import sampling_params

    items = [item for lines in chosen for item in dataset.of_lines(lines)[0]]
    if not items:
        raise DataError(f"none of these lines of {chosen[0].path} is a prompt that the job would use")
    with single_process(config.model.seed):
        base, sampling = open_policy(model, "32"), sampling_params(config.model.ppo, config.trainer.ppo.trt_llm.seed)
        room = base.architecture.max_position_embeddings - max(len(item.token_ids) for item in items)
        sampling = dataclasses.replace(sampling, max_new_tokens=max(1, min(sampling.max_new_tokens, room)))
        environment = named, config.trainer.ppo.episodes
        policy = base.load(trainable=False)
        made = generate(base, policy, items, sampling, num_slots=len(items), environment=environment)
    for sample, episode in made:
        _show_episode(sample, episode, base.tokenizer, with_tokens)


def _show_episode(sample: Sample, result: GenerationResult, tokenizer: Tokenizer, with_tokens: bool) -> None:
    from nemo_style_aligner.trainer.data.examples import Example, shown, spelt
    from nemo_style_aligner.trainer.rl.episodes.runner import Episode

    assert isinstance(result, Episode)
    learnt = [False] * sample.prompt_length + result.mask
    text = Example("episode", sample.token_ids, learnt)
    told = len(result.mask) - sum(result.mask)
    replies = f"{result.num_replies} {'reply' if result.num_replies == 1 else 'replies'}"
    rows = f" in {len(result.row_lengths)} rows" if result.further_rows else ""
    sizes = f"{replies}{rows}, {sum(result.mask)} tokens sampled, {told} inserted"
    click.secho(f"--- {sample.place}: episode, {sizes}, {result.seconds:.2g} s in the environment", bold=True)
    click.echo(shown(text, tokenizer, _paint))
    if with_tokens:
        _show_tokens(text, tokenizer)
    if result.problem is not None:
        click.secho(f"failed: {spelt(result.problem)}", fg="red")
        return
    click.echo(f"the last reply {'ended' if sample.ended else 'was cut off'}; returned: {spelt(repr(result.outcome))}")


def _show_rewards(
    config: Any, prompts: Sequence[Any], tokenizer: Tokenizer, responses: Sequence[str], model: Path
) -> None:
    """Print each response with its reward and the parts of it. Exit status 1 if one has none."""
    from nemo_style_aligner.tools.evaluation.reward_trial import try_rewards
    from nemo_style_aligner.trainer.data.examples import spelt

    tried = try_rewards(config, prompts, tokenizer, [*map(unescaped, responses)], model.expanduser())
    for one in tried:
        parts = ", ".join(f"{name} {value:.6g}" for name, value in one.reward.parts.items())
        value = f"{one.reward.value:.6g} ({parts})" if one.reward.problem is None else f"none: {one.reward.problem}"
        click.secho(f"--- {one.prompt.place}: reward {spelt(value)}", bold=True)
        click.echo(spelt(one.response))
    if any(one.reward.problem is not None for one in tried):
        raise click.exceptions.Exit(1)


# ---- the whole file ----------------------------------------------------------------------------


def _show_counts(dataset: TextDataset[Any], written: TextFormat, tokenizer: Tokenizer, config: JobConfig) -> None:
    """Print counts over all texts that the job would use, and what ends responses."""
    from nemo_style_aligner.trainer.config.schema import PPOActor
    from nemo_style_aligner.trainer.data.examples import has_end, texts_of

    ends = tokenizer.end_strings(written.end_strings)
    lengths: list[int] = []
    learnt: int | None = None
    with_bos = with_end = 0
    for text in itertools.chain.from_iterable(texts_of(dataset[i]) for i in range(len(dataset))):
        lengths.append(len(text.token_ids))
        learnt = learnt if text.learnt is None else (learnt or 0) + sum(text.learnt)
        with_bos += text.token_ids[0] == tokenizer.bos_id
        with_end += has_end(text, tokenizer, ends)
    lengths.sort()
    total, number = sum(lengths), len(lengths)
    middle, most = statistics.median_low(lengths), lengths[math.ceil(0.95 * number) - 1]
    click.echo(f"--- all of the file: {number:,} texts, {total:,} tokens")
    click.echo(f"tokens of a text: {lengths[0]:,} to {lengths[-1]:,}, median {middle:,}, 95% have at most {most:,}")
    if learnt is not None:
        click.echo(f"learnt: {learnt:,} tokens, {learnt / total:.1%}")
    click.echo(f"begin with BOS: {with_bos:,} of {number:,}")
    if isinstance(config, PPOActor):
        ends = tokenizer.end_strings([*ends, *map(unescaped, config.model.ppo.sampling_params.end_strings or ())])
    else:
        click.echo(f"end where generation stops: {with_end:,} of {number:,}")
    stops = [tokenizer.ids_to_text([i], keep_special=True) for i in tokenizer.stop_ids]
    click.echo(f"a response ends with {' or '.join(map(repr, dict.fromkeys([*stops, *ends])))}")


def _show_notes(examples: Sequence[Lines], dataset: TextDataset[Any], tokenizer: Tokenizer) -> None:
    """Print how many of the examples have which notes, and where the first of them is."""
    from nemo_style_aligner.trainer.data.examples import spelt, texts_of

    places: dict[str, list[int]] = {}
    for lines in examples:
        texts = [text for item in dataset.of_lines(lines)[0] for text in texts_of(item)]
        for note in dict.fromkeys(re.sub(r"\[\d+\]", "[]", note) for note in _notes(lines, texts, tokenizer)):
            places.setdefault(note, []).append(lines.lines[0][0])
    for note, found in sorted(places.items(), key=lambda entry: -len(entry[1])):
        of = f"{len(found):,} of {len(examples):,} examples (line {found[0]}{', ...' if found[1:] else ''})"
        click.echo(f"{of}: {spelt(note)}")
