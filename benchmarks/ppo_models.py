"""What the contenders of `ppo_step.py` work on: models in the forms that both read, and prompts."""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from common import long_tailed
from model_files import INSTALL_SMOLLM2, find_smollm2, prepare

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.data.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.data.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.models.conversion import hf_to_nemo
from nemo_style_aligner.parallel.groups import single_process
from nemo_style_aligner.weights.huggingface import (
    HuggingFaceCheckpoint,
    copy_tokenizer_files,
    read_architecture,
    write_checkpoint,
)
from nemo_style_aligner.weights.layout import hf_tensors, weight_layout

REPOSITORY = Path(__file__).resolve().parents[1]


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
        """Where `make_models` puts them."""
        names = ("model/hf", "reward_model", "policy.nemo", "reward_model.nemo")
        return cls(description, *(folder / name for name in names))

    @property
    def architecture(self) -> ModelArchitecture:
        """Of all of them, heads aside."""
        return read_architecture(self.policy)

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all of them."""
        return load_tokenizer(self.policy)


def make_models(model: str | None, folder: Path) -> Models:
    """Write the models into ``folder``, unless they are there from an earlier run.

    Args:
        model: a GGUF file or the name of a shape in `SHAPES`; None: SmolLM2, or random weights in its shape.
    """
    record = folder / "description.txt"
    if record.exists():
        return Models.in_folder(record.read_text(), folder)
    if model is None:
        found = find_smollm2()
        if found is None:
            print(f"SmolLM2-135M-Instruct is not installed ({INSTALL_SMOLLM2}): random weights in its shape")
        model = str(found or "smollm2-135m")
    files = prepare(model, folder / "model", want_gguf=False)
    tokenizer = files.tokenizer
    if tokenizer is None:  # random weights: a token per character
        tokenizer = folder / "tokenizer"
        train_character_tokenizer(documentation(), tokenizer)
    copy_tokenizer_files(tokenizer, files.hf)
    models = Models.in_folder(files.description, folder)
    weights = classifier_weights(files.architecture, files.hf)
    write_checkpoint(models.reward_model, files.architecture, weights, num_attributes=1, tokenizer_dir=tokenizer)
    with single_process():
        hf_to_nemo(models.policy, models.policy_nemo, torch.bfloat16)
        hf_to_nemo(models.reward_model, models.reward_model_nemo, torch.bfloat16)
    record.write_text(files.description)
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
        prompts: their tokens.
        texts: the prompts as text, of which the tokenizer makes exactly those tokens.
        lengths: tokens that each prompt's response is forced to have.
    """

    name: str
    prompts: list[list[int]]
    texts: list[str]
    lengths: list[int]

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts together."""
        return sum(map(len, self.prompts))

    @property
    def new_tokens(self) -> int:
        """Of all responses together."""
        return sum(self.lengths)

    @property
    def sequence_lengths(self) -> list[int]:
        """Prompt and response."""
        return [len(prompt) + length for prompt, length in zip(self.prompts, self.lengths, strict=True)]


def documentation() -> str:
    """The text that prompts are cut from."""
    return "\n".join(path.read_text() for path in [REPOSITORY / "README.md", REPOSITORY / "docs" / "architecture.md"])


def make_workloads(args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[Workload]:
    """Prompts are pieces of this project's documentation."""
    draw = random.Random(1)
    for name in args.workloads:
        if name == "ragged":
            lengths = long_tailed(args.rollouts, args.ragged_lengths, draw)
            prompt_lengths = [draw.randint(*args.ragged_prompts) for _ in lengths]
        else:
            lengths, prompt_lengths = [args.new_tokens] * args.rollouts, [args.prompt_tokens] * args.rollouts
        prompts, texts = cut_prompts(tokenizer, prompt_lengths)
        yield Workload(name, prompts, texts, lengths)


def cut_prompts(tokenizer: Tokenizer, lengths: Sequence[int]) -> tuple[list[list[int]], list[str]]:
    """Different pieces of the documentation, of these many tokens, whose text gives the same tokens again."""
    ids = tokenizer.text_to_ids(documentation())
    prompts: list[list[int]] = []
    texts = []
    start = 0
    for length in lengths:
        while True:
            if start + length > len(ids):
                raise SystemExit(f"the documentation is too short for prompts of {sum(lengths)} tokens: ask for fewer")
            piece = ids[start : start + length]
            text = tokenizer.ids_to_text(piece)
            if tokenizer.text_to_ids(text) == piece and piece not in prompts:
                break
            start += 1
        start += length
        prompts.append(piece)
        texts.append(text)
    return prompts, texts
