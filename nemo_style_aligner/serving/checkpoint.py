"""A checkpoint as an engine that can generate: a .nemo archive, a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from omegaconf import OmegaConf

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.data.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.engine.contract import WeightStream
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.models.gpt import parse_precision
from nemo_style_aligner.models.restore import open_base_model
from nemo_style_aligner.parallel.groups import device
from nemo_style_aligner.parallel.machine import available_memory
from nemo_style_aligner.rl.rollouts.setup import vocabulary_options
from nemo_style_aligner.serving.app import LoadedModel
from nemo_style_aligner.temporary import temporary_folder
from nemo_style_aligner.weights.gguf import GGUFCheckpoint
from nemo_style_aligner.weights.huggingface import HuggingFaceCheckpoint
from nemo_style_aligner.weights.huggingface_config import read_architecture
from nemo_style_aligner.weights.layout import check_shapes, hf_tensors, weight_layout
from nemo_style_aligner.weights.stream import WeightSource, export_weights

_SHARE_OF_FREE_MEMORY = 0.8


def load_model(
    path: Path,
    *,
    precision: str,
    num_slots: int,
    max_length: int | None = None,
    kv_cache_tokens: int | None = None,
) -> LoadedModel:
    """Load a checkpoint into an engine of this process, which needs process groups (`groups.single_process`).

    Args:
        precision: of weights and computation, "bf16" or "32".
        max_length: the most tokens of a prompt and its response; None: the model's positions.
        kv_cache_tokens: see `EmbeddedEngine`; None: what fits into the memory that is free.

    Raises:
        UserError: the checkpoint cannot be used; the message says why.
    """
    dtype = parse_precision(precision)
    with _open(path, precision) as (architecture, tokenizer, weights):
        positions = architecture.max_position_embeddings
        if max_length is not None and max_length > positions:
            raise UserError(f"{path} has {positions} positions, fewer than a maximum length of {max_length}")
        max_length = max_length or positions
        engine = EmbeddedEngine(
            architecture,
            dtype=dtype,
            device=device(),
            num_slots=num_slots,
            max_sequence_length=max_length,
            kv_cache_tokens=kv_cache_tokens or _kv_cache_tokens(architecture, dtype, num_slots, max_length),
            **vocabulary_options(architecture, tokenizer),
        )
        engine.build()
        engine.refit(weights, 0)
    return LoadedModel(engine, tokenizer, architecture.vocab_size, max_length)


def _kv_cache_tokens(architecture: ModelArchitecture, dtype: torch.dtype, num_slots: int, max_length: int) -> int:
    """What all slots need at full length, or what fits beside the engine's weights if that is less."""
    a = architecture
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else available_memory()
    per_token = 2 * a.num_layers * a.num_query_groups * a.kv_channels * dtype.itemsize
    fitting = int(_SHARE_OF_FREE_MEMORY * free - a.num_parameters * dtype.itemsize) // per_token
    return max(max_length + PAGE_TOKENS, min(num_slots * (max_length + PAGE_TOKENS), fitting))


@contextlib.contextmanager
def _open(path: Path, precision: str) -> Iterator[tuple[ModelArchitecture, Tokenizer, WeightStream]]:
    if path.suffix != ".gguf" and not (path / "config.json").is_file():
        base = open_base_model(str(path), OmegaConf.create({"model": {}, "trainer": {"precision": precision}}))
        if "reward_model_type" in base.config:
            raise UserError(f"{path} is a reward model or critic, which generates no text: give a language model")
        yield base.architecture, base.tokenizer, export_weights(base.load(trainable=False))
        return
    try:
        source, architecture, tokenizer = _foreign(path)
        check_shapes(architecture, source.shapes())
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error
    yield architecture, tokenizer, _read_all(source, architecture)


def _foreign(path: Path) -> tuple[WeightSource, ModelArchitecture, Tokenizer]:
    """Of a GGUF file or a Hugging Face directory."""
    if path.suffix != ".gguf":
        architecture = read_architecture(path)
        return HuggingFaceCheckpoint(path, architecture), architecture, load_tokenizer(path)
    gguf = GGUFCheckpoint(path)
    with temporary_folder(f"the tokenizer of {path}") as folder:
        gguf.save_tokenizer(folder)
        return gguf, gguf.architecture, load_tokenizer(folder)


def _read_all(source: WeightSource, architecture: ModelArchitecture) -> Iterator[tuple[str, torch.Tensor]]:
    shapes = source.shapes()
    for name in hf_tensors(weight_layout(architecture)):  # some files have more: the output layer of tied embeddings
        if name in shapes:
            yield name, source.read(name, 0, 0, shapes[name][0])
