"""A model's files as an engine that can generate."""

from __future__ import annotations

from pathlib import Path

import torch

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import WeightStream
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine, compile_ahead
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS
from nemo_style_aligner.engine.parallel.groups import all_reduce_max, device
from nemo_style_aligner.engine.parallel.machine import available_memory, ranks_on_this_machine
from nemo_style_aligner.engine.shard import TensorParallel
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.engine.vocabulary import vocabulary_options
from nemo_style_aligner.engine.weights.layout import check_shapes, hf_tensors, weight_layout
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.models.files import kind_of, tokenizer_of
from nemo_style_aligner.trainer.models.foreign_models import Source, source_of
from nemo_style_aligner.trainer.models.gpt import parse_precision
from nemo_style_aligner.trainer.models.restore import read_base_model

_SHARE_OF_FREE_MEMORY = 0.8
_NO_LANGUAGE_MODEL = "is a reward model or critic, which generates no text: give a language model"


def load_model(
    path: Path,
    *,
    precision: str,
    num_slots: int,
    max_length: int | None = None,
    kv_cache_tokens: int | None = None,
    ranks: TensorParallel | None = None,
) -> tuple[EmbeddedEngine, Tokenizer]:
    """Load a checkpoint into an engine of this process, which needs process groups (`groups.single_process`).

    Args:
        precision: of weights and computation, "bf16" or "32".
        max_length: the most tokens of a prompt and its response; None: the model's positions.
        kv_cache_tokens: see `EmbeddedEngine`; None: what fits into the memory that is free.
        ranks: that share the engine, and load it together; None: this one alone.

    Raises:
        UserError: the checkpoint cannot be used; the message says why.
    """
    ranks = ranks or TensorParallel()
    dtype = parse_precision(precision)
    architecture, tokenizer, weights = _open(path, precision, ranks.size)
    positions = architecture.max_position_embeddings
    if max_length is not None and max_length > positions:
        raise UserError(f"{path} has {positions} positions, fewer than a maximum length of {max_length}")
    max_length = max_length or positions
    try:
        engine = EmbeddedEngine(
            architecture,
            dtype=dtype,
            device=device(),
            num_slots=num_slots,
            max_sequence_length=max_length,
            kv_cache_tokens=kv_cache_tokens or _kv_cache_tokens(architecture, dtype, num_slots, max_length, ranks.size),
            tensor_parallel=ranks,
            **vocabulary_options(architecture, tokenizer),
        )
    except ValueError as error:
        raise UserError(f"{path} cannot be served so: {error}") from error
    engine.build()
    engine.refit(_finite(path, weights), 0)
    return engine, tokenizer


def _kv_cache_tokens(
    architecture: ModelArchitecture, dtype: torch.dtype, num_slots: int, max_length: int, ranks: int
) -> int:
    """What all slots need at full length, or what fits beside the engine's weights on every rank if that is less."""
    a = architecture
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else available_memory() // ranks_on_this_machine()
    per_token = 2 * a.num_layers * max(1, a.num_query_groups // ranks) * a.kv_channels * dtype.itemsize
    fitting = int(_SHARE_OF_FREE_MEMORY * free - a.num_parameters * dtype.itemsize / ranks) // per_token
    fitting = -all_reduce_max(-fitting)  # ranks that share an engine have equal pages
    return max(max_length + PAGE_TOKENS, min(num_slots * (max_length + PAGE_TOKENS), fitting))


def _open(path: Path, precision: str, num_ranks: int) -> tuple[ModelArchitecture, Tokenizer, WeightStream]:
    kind = kind_of(path)
    if kind == ".nemo archive":
        base = read_base_model(str(path), {}, precision)
        if "reward_model_type" in base.config:
            raise UserError(f"{path} {_NO_LANGUAGE_MODEL}")
        if num_ranks > 1 and base.architecture.experts is not None and base.architecture.bias:
            raise UserError(
                f"{path} has experts with biases, an archive of which ranks cannot share: serve it on one rank, or a "
                "Hugging Face folder of it (nsa convert)"
            )
        compile_ahead("auto", base.architecture, base.dtype, device(), num_ranks)
        return base.architecture, base.tokenizer, export_weights(base.load(trainable=False))
    if kind not in ("Hugging Face directory", "GGUF file"):
        a_kind = f"a{'n' * (kind == 'adapter')} {kind}"
        raise UserError(f"{path} is {a_kind}: make a .nemo archive of it first, with nsa convert")
    try:
        source = source_of(path)
        if source.num_attributes:
            raise UserError(f"{path} {_NO_LANGUAGE_MODEL}")
        check_shapes(source.architecture, source.shapes())
        compile_ahead("auto", source.architecture, parse_precision(precision), device(), num_ranks)
        return source.architecture, tokenizer_of(path), _read_all(source)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from error


def _finite(path: Path, weights: WeightStream) -> WeightStream:
    for name, tensor in weights:
        if not tensor.isfinite().all():
            raise UserError(f"{path}: {name} has values that are NaN or infinite: the weights are damaged")
        yield name, tensor


def _read_all(source: Source) -> WeightStream:
    shapes = source.shapes()
    for name in hf_tensors(weight_layout(source.architecture)):  # some files have more: a tied output layer
        if name in shapes:
            yield name, source.read(name, 0, 0, shapes[name][0])
