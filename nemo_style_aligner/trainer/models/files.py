"""Files of models, told apart by what they are, whatever their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from nemo_style_aligner.durable import discard
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.agreement import on_first_rank
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, load_tokenizer, tokenizer_files
from nemo_style_aligner.engine.weights.foreign import refuse_nemo_2
from nemo_style_aligner.engine.weights.gguf import GGUFCheckpoint
from nemo_style_aligner.engine.weights.huggingface import copy_tokenizer_files, require_empty
from nemo_style_aligner.engine.weights.stream import import_weights
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.trusted_paths import temporary_folder
from nemo_style_aligner.trainer.checkpoints.directory import is_training_checkpoint, present_name
from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_config, load_nemo_tokenizer
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import CheckpointMismatchError
from nemo_style_aligner.trainer.models.adapter_files import PEFT_CONFIG
from nemo_style_aligner.trainer.models.conversion import (
    adapter_to_nemo,
    adapter_to_peft,
    checkpoint_to_nemo,
    gguf_to_nemo,
    hf_to_nemo,
    job_of,
    nemo_to_hf,
)
from nemo_style_aligner.trainer.models.foreign_models import foreign_config, is_foreign, source_of
from nemo_style_aligner.trainer.models.gpt import MegatronModel, parse_precision
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.lora import LoraSettings
from nemo_style_aligner.trainer.models.restore import BaseModel, read_base_model
from nemo_style_aligner.wording import download_hint

Kind = Literal[".nemo archive", "Hugging Face directory", "GGUF file", "training checkpoint", "adapter", "tokenizer"]


class UnknownModelError(UserError, ValueError):
    """A path is none of a model."""


def kind_of(path: Path) -> Kind:
    """What there is at ``path``. A file that is no GGUF file is taken for an archive.

    Raises:
        UnknownModelError: nothing, or a folder of something else; the message says what to name in its place.
        ArchiveError: a directory of NeMo 2.0.
    """
    if not path.exists():
        raise UnknownModelError(f"{path} does not exist{download_hint(str(path))}")
    if not path.is_dir():
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        return "GGUF file" if is_gguf else _kind_of_archive(path)
    if (path / "model_config.yaml").is_file():
        return _kind_of_archive(path)
    if (path / PEFT_CONFIG).is_file():
        return "adapter"
    if is_training_checkpoint(path):
        return "training checkpoint"
    if (path / "config.json").is_file():
        return "Hugging Face directory"
    if tokenizer_files(path):
        return "tokenizer"
    refuse_nemo_2(path)
    inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    entries = sorted(inside.iterdir())
    models = [entry for entry in entries if entry.suffix in (".nemo", ".gguf") or is_training_checkpoint(entry)]
    if models:
        raise UnknownModelError(f"{path} holds models: name one, such as {models[-1]}")
    raise UnknownModelError(
        f"{path} is no model (it has no model_config.yaml, manifest.json or config.json): give a .nemo archive, a "
        "Hugging Face directory, a GGUF file or a training checkpoint"
    )


def _kind_of_archive(path: Path) -> Kind:
    return ".nemo archive" if LoraSettings.from_config(load_nemo_config(path)) is None else "adapter"


class ForeignModel(BaseModel):
    """One of a Hugging Face directory or a GGUF file."""

    def require_rewards(self) -> None:
        """See `BaseModel.require_rewards`."""
        if "reward_model_type" not in self.config:
            raise CheckpointMismatchError(f"{self.path} has no reward head (score.weight): give a reward model")

    def load(
        self, *, head: RewardHeadConfig | None = None, trainable: bool = True, needs_head: bool = False
    ) -> MegatronModel:
        """See `BaseModel.load`; a head is always needed."""
        model = self.build(head=head, trainable=trainable)
        import_weights(model, source_of(self.path))
        return model


def open_model(path: Path, precision: str) -> BaseModel:
    """A whole model: an archive, a Hugging Face directory or a GGUF file.

    Args:
        precision: of weights and computation, "bf16" or "32".

    Raises:
        UserError: of a Hugging Face directory or a GGUF file: it cannot be used; the message says why.

    For the errors of an archive see `read_base_model`.
    """
    if not is_foreign(path):
        return read_base_model(str(path), {}, precision)
    config = config_of(path)
    architecture = ModelArchitecture.from_nemo_config(config)
    return ForeignModel(path, architecture, config, parse_precision(precision), tokenizer_of(path))


def config_of(path: Path) -> dict[str, Any]:
    """``model_config.yaml`` of a model like those of `open_model`. For the errors see there."""
    if not is_foreign(path):
        return load_nemo_config(path)
    try:
        return foreign_config(path)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a model, or in a folder. For the errors see `kind_of` and the readers of each kind."""
    kind = kind_of(path)
    if kind == ".nemo archive" or (kind == "adapter" and not (path / PEFT_CONFIG).is_file()):
        return load_nemo_tokenizer(path)
    if kind == "GGUF file":
        with temporary_folder(f"the tokenizer of {path}") as folder:
            GGUFCheckpoint(path).save_tokenizer(folder)
            return load_tokenizer(folder)
    if kind == "training checkpoint":
        return job_of(path).tokenizer()
    tokenizer = load_tokenizer(path)
    if kind == "Hugging Face directory" and tokenizer.generation_config is None:
        with temporary_folder(f"the tokenizer of {path}") as folder:
            copy_tokenizer_files(path, folder)  # config.json may name what ends responses
            return load_tokenizer(folder)
    return tokenizer


def convert(
    source: Path,
    target: Path,
    to_archive: bool,
    precision: str | None = None,
    base: Path | None = None,
    hyperparameters: Path | None = None,
    as_adapter: bool = False,
) -> ModelArchitecture:
    """Convert a model of any kind to an archive or a Hugging Face directory. Collective.

    Args:
        precision: of the weights written; None: a training checkpoint's job's, else bf16.
        base, hyperparameters: see `checkpoint_to_nemo`; ``base`` also of an adapter.
        as_adapter: take the adapters of a training checkpoint alone.

    Raises:
        UnknownModelError: see `kind_of`; or ``source`` is of the kind wanted already.

    For other errors see the conversions of `conversion`.
    """
    source = present_name(source)
    kind = kind_of(source)
    if kind == "tokenizer":
        raise UnknownModelError(f"{source} has a tokenizer, but no model: there is no config.json")
    if kind == (".nemo archive" if to_archive else "Hugging Face directory"):
        raise UnknownModelError(f"{source} is a {kind} already, as {target} would be")
    of_checkpoint = kind == "training checkpoint"
    if hyperparameters and (not of_checkpoint or as_adapter):
        raise UnknownModelError("--hyperparameters is of a training checkpoint that is taken whole: leave it out")
    if base and not (of_checkpoint or kind == "adapter" or as_adapter):
        raise UnknownModelError(f"--base is of adapters and training checkpoints; {source} is a {kind}: leave it out")
    if kind == "adapter" or as_adapter:
        if base is None:
            raise UnknownModelError(
                f"{source} is an adapter: name the .nemo archive of the model that it is of (--base)"
            )
        with_base = adapter_to_nemo if to_archive else adapter_to_peft
        return with_base(source, target, parse_precision(precision or "bf16", "--precision"), base=base)
    of_job = of_checkpoint and precision is None
    dtype = job_of(source, hyperparameters).dtype if of_job else parse_precision(precision or "bf16", "--precision")
    if kind == ".nemo archive":
        return nemo_to_hf(source, target, dtype)
    readers: dict[Kind, Callable[[Path, Path, torch.dtype], ModelArchitecture]] = {
        "Hugging Face directory": hf_to_nemo,
        "GGUF file": gguf_to_nemo,
        "training checkpoint": partial(checkpoint_to_nemo, base=base, hyperparameters=hyperparameters),
    }
    if to_archive:
        return readers[kind](source, target, dtype)
    on_first_rank(lambda: require_empty(target))  # before all of the model is read
    between = target.with_name(f".{target.name}.nemo")
    try:
        readers[kind](source, between, dtype)
        return nemo_to_hf(between, target, dtype)
    finally:
        if dist.get_rank() == 0:
            discard(between)
