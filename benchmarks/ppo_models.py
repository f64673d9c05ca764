"""What the contenders of `ppo_step.py` and `grpo_step.py` work on: models in the forms that both read, and prompts."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import string
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from common import SHAPES, long_tailed
from model_files import prepare, smollm2_or_random

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.engine.weights.huggingface import HuggingFaceCheckpoint, copy_tokenizer_files, write_checkpoint
from nemo_style_aligner.engine.weights.huggingface_config import read_architecture
from nemo_style_aligner.engine.weights.layout import hf_tensors, weight_layout
from nemo_style_aligner.trainer.checkpoints.nemo_archive import nemo_tokenizer_dir
from nemo_style_aligner.trainer.models.conversion import hf_to_nemo

# The words of prompts. Fixed, so that figures of all versions of this repository are for the same text.
_WORDS = """
a about after again all along also although always among an and another any apple are around as at autumn away back
bank basket be because before begin behind below better between bird boat book both branch bread bridge bright bring
brother build but by call can candle carry castle century certain change child city clear cloud coast cold corner
could country cross dark daughter day deep different distance do door down dream during each early earth east eight
empty end engine enough even evening ever every eye face fact fall family far farmer father feather few field fire
first fish five flower follow for forest four free friend from front garden gate gentle glass go golden good grass
great green ground had half hand harbour have he head hear heavy her high hill his history hold home horse hour house
how hundred I ice idea if in into iron island it journey just keep kind king kitchen knew lake lamp land large last
late laugh leaf learn leave letter light like line listen little long look low made many market may meadow middle
might milk mind minute moment money moon more morning most mother mountain move much music must name narrow near never
new next night nine no north not now number ocean of off often old on once one only open or orange order other our out
over paper part people perhaps place plain plant point poor possible quick quiet rain reach read ready red remember
rest rich right river road room round sail salt same sand school sea second see seven shadow she ship shore short
should side silver simple since sister six sky sleep slow small snow so some song soon sound south spring square stand
star stay still stone storm story street strong such summer sun sure table take tall tell ten than that the their them
then there these they thing think this those three through time to together town tree true turn two under until up
upon us valley very village voice wait walk wall warm was water way we well were west what wheel when where which
while white who why wide will wind window winter with without woman wood word work world would write year yellow yet
you
"""
_MAX_TRIES = 10_000  # places to cut a prompt at, until it is new and its text gives its tokens again


@dataclasses.dataclass(frozen=True)
class Models:
    """Policy, and critic and reward model: the same body with a random head. All bf16.

    Attributes:
        description: for the report.
        policy, reward_model: Hugging Face directories, for TRL.
        policy_nemo, reward_model_nemo: archives, for our jobs.
    """

    description: str
    policy: Path
    reward_model: Path
    policy_nemo: Path
    reward_model_nemo: Path

    @classmethod
    def in_folder(cls, description: str, folder: Path) -> Models:
        """The models that `make_models` writes into ``folder``."""
        names = ("model/hf", "reward_model", "policy.nemo", "reward_model.nemo")
        return cls(description, *(folder / name for name in names))

    @property
    def architecture(self) -> ModelArchitecture:
        """That of all of them, heads aside."""
        return read_architecture(self.policy)

    @property
    def tokenizer(self) -> Tokenizer:
        """That of all of them, as our jobs read it."""
        with nemo_tokenizer_dir(self.policy_nemo) as folder:
            return load_tokenizer(folder)


def make_models(model: str | None, folder: Path) -> Models:
    """Write the models into ``folder``, unless they are there from an earlier run.

    Args:
        model: a GGUF file, a Hugging Face directory, a .nemo archive or the name of a shape in `SHAPES`; None: SmolLM2,
            or random weights in its shape.

    Raises:
        SystemExit: ``folder`` has another model's files.
    """
    record = folder / "models.json"
    asked = "default" if model is None else model if model in SHAPES else str(Path(model).resolve())
    if record.exists():
        written = json.loads(record.read_text())
        if written["model"] != asked:
            raise SystemExit(f"{folder} has the models made of {written['model']}, not of {asked}: name another folder")
        return Models.in_folder(written["description"], folder)
    if folder.exists() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty, and what is in it was not completed by this version: empty it")
    files = prepare(smollm2_or_random() if model is None else model, folder / "model", want_gguf=False)
    tokenizer = files.tokenizer
    if tokenizer is None:  # random weights: a token per character
        tokenizer = folder / "tokenizer"
        train_character_tokenizer(string.ascii_letters + string.digits + string.punctuation + " \n", tokenizer)
    copy_tokenizer_files(tokenizer, files.hf)
    models = Models.in_folder(files.description, folder)
    weights = classifier_weights(files.architecture, files.hf)
    write_checkpoint(models.reward_model, files.architecture, weights, num_attributes=1, tokenizer_dir=tokenizer)
    with single_process():
        hf_to_nemo(models.policy, models.policy_nemo, torch.bfloat16)
        hf_to_nemo(models.reward_model, models.reward_model_nemo, torch.bfloat16)
    record.write_text(json.dumps({"model": asked, "description": files.description}))
    return models


def classifier_weights(architecture: ModelArchitecture, policy: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The policy's body with a random head of one output, the same in every run."""
    body = HuggingFaceCheckpoint(policy)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in hf_tensors(weight_layout(architecture, num_attributes=1)).items():
        if name == "score.weight":
            yield name, (torch.randn(tensor.shape, generator=generator) * 0.02).bfloat16()
        elif name != "score.bias":
            yield name, body.read(name, 0, 0, body.shapes()[name][0])


@dataclasses.dataclass(frozen=True)
class Workload:
    """The rollouts of a step: the same in every step.

    Attributes:
        name: for the tables.
        prompts: the tokens of each rollout's prompt; those of a group follow each other.
        texts: the different prompts as text, of which the tokenizer makes exactly those tokens.
        lengths: tokens that each rollout's response is forced to have.
        group: rollouts per prompt.
    """

    name: str
    prompts: list[list[int]]
    texts: list[str]
    lengths: list[int]
    group: int = 1

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts together, each as often as it has rollouts."""
        return sum(map(len, self.prompts))

    @property
    def new_tokens(self) -> int:
        """Of all responses together."""
        return sum(self.lengths)

    @property
    def sequence_lengths(self) -> list[int]:
        """Prompt and response."""
        return [len(prompt) + length for prompt, length in zip(self.prompts, self.lengths, strict=True)]


def sentences(seed: int) -> Iterator[str]:
    """Endless text: random sentences of `_WORDS`, drawn with ``seed``."""
    draw, words = random.Random(seed), _WORDS.split()
    while True:
        chosen = draw.choices(words, k=draw.randint(4, 14))
        yield " ".join(chosen).capitalize() + draw.choice((". ", ". ", ". ", "? ", ", then ", ".\n"))


def make_workloads(args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[Workload]:
    """The workloads of ``args``; lengths and prompts are drawn with ``args.seed``, a prompt for ``args.group``."""
    draw = random.Random(args.seed)
    for name in args.workloads:
        if name == "ragged":
            lengths = long_tailed(args.rollouts, args.ragged_lengths, draw)
            prompt_lengths = [draw.randint(*args.ragged_prompts) for _ in lengths[:: args.group]]
        else:
            lengths = [args.new_tokens] * args.rollouts
            prompt_lengths = [args.prompt_tokens] * (args.rollouts // args.group)
        prompts, texts = cut_prompts(tokenizer, prompt_lengths, args.seed)
        prompts = [prompt for prompt in prompts for _ in range(args.group)]
        yield Workload(name, prompts, texts, lengths, args.group)


def cut_prompts(tokenizer: Tokenizer, lengths: Sequence[int], seed: int = 1) -> tuple[list[list[int]], list[str]]:
    """Tokens and texts of different pieces of `sentences` of these lengths; each text gives the same tokens again."""
    source = sentences(seed)
    prompts: list[list[int]] = []
    texts: list[str] = []
    ids: list[int] = []
    for length in lengths:
        for _ in range(_MAX_TRIES):
            while len(ids) < length:
                ids += tokenizer.text_to_ids("".join(itertools.islice(source, 100)))
            piece = ids[:length]
            text = tokenizer.ids_to_text(piece)
            if tokenizer.text_to_ids(text) == piece and piece not in prompts:
                break
            del ids[0]
        else:
            raise SystemExit(
                f"there are no {len(lengths)} different prompts with one of {length} tokens: ask for fewer"
            )
        del ids[:length]
        prompts.append(piece)
        texts.append(text)
    return prompts, texts
