"""Hugging Face model directories: read and written tensor by tensor."""

from __future__ import annotations

import functools
import itertools
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from nemo_style_aligner.durable import sync_file, sync_tree
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.text.tokenizer import (
    GENERATION_CONFIG,
    load_for_transformers,
    load_tokenizer,
    tokenizer_files,
)
from nemo_style_aligner.engine.weights.expert_families import EXPERT_FAMILIES, own_name, stored_name
from nemo_style_aligner.engine.weights.huggingface_config import FAMILIES, hf_config, hf_family, read_architecture
from nemo_style_aligner.engine.weights.layout import fused_name, hf_tensors, weight_layout
from nemo_style_aligner.engine.weights.stacked_experts import QUANTIZED, ExpertTensor, Stored, apart, is_stack, together
from nemo_style_aligner.errors import LFS_POINTER, is_lfs_pointer
from nemo_style_aligner.guard.file_source import MOST_BESIDE_WEIGHTS
from nemo_style_aligner.guard.parsing import parse_json, read_json
from nemo_style_aligner.wording import some_of

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
DEFAULT_SHARD_BYTES = 2 * 2**30
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors")  # as transformers looks for them
_DTYPES = ("F64", "F32", "F16", "BF16", QUANTIZED)  # as safetensors names them


# ---- weights in -----------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a tensor is: a file, the name of a tensor in it, and the row of that one where it begins."""

    file: Any
    stored: str
    first: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """Its dtype, by safetensors' name for it."""
        dtype: str = self.file.get_slice(self.stored).get_dtype()
        return dtype

    def read(self, dim: int, start: int, length: int) -> torch.Tensor:
        """See `HuggingFaceCheckpoint.read`."""
        lazy = self.file.get_slice(self.stored)
        part: torch.Tensor
        if dim == 0:
            part = lazy[self.first + start : self.first + start + length]
        else:
            part = lazy[self.first : self.first + self.shape[0], start : start + length]
        return part


def _unfused(places: Mapping[str, _Place], architecture: ModelArchitecture) -> Iterator[tuple[str, _Place]]:
    """The tensors of ``places``; in place of fused ones their parts, which lie one after the other."""
    whole = dict(places)
    table = hf_tensors(weight_layout(architecture)).values()
    for fused, parts in itertools.groupby(table, lambda tensor: fused_name(tensor.name)):
        tensors = list(parts)
        if fused == tensors[0].name or fused not in whole:
            continue
        file, first, rows = whole[fused].file, 0, sum(tensor.shape[0] for tensor in tensors)
        if whole.pop(fused).shape != (rows, *tensors[0].shape[1:]):
            raise ValueError(f"{fused} has not the shape {[rows, *tensors[0].shape[1:]]} that config.json gives it")
        for tensor in tensors:
            yield tensor.name, _Place(file, fused, first, tensor.shape)
            first += tensor.shape[0]
    yield from whole.items()


class HuggingFaceCheckpoint:
    """The safetensors of a Hugging Face directory, one file or many, as a `WeightSource`.

    Opening reads headers only; tensors and slices are read when asked for.

    Raises:
        FileNotFoundError: no safetensors, or a file the index names is not there.
        ValueError: one of these, or the index, cannot be read; or there are weights beside them.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        index = self.directory / INDEX_NAME
        files = _indexed_files(index) if index.is_file() else ["model.safetensors"]
        _refuse_others(self.directory, files, index)
        missing = [name for name in files if not (self.directory / name).is_file()]
        if missing:
            hint = " (pytorch_model.bin files must be converted to safetensors first)" if not index.is_file() else ""
            raise FileNotFoundError(f"{self.directory} lacks {some_of(missing)}{hint}")
        places: dict[str, _Place] = {}
        for file in (_open_safetensors(self.directory / name) for name in files):
            for stored in file.keys():  # noqa: SIM118 (not a dict)
                name = own_name(stored)
                if name in places:
                    raise ValueError(f"{self.directory} has two tensors {stored}, in two of its files")
                if not name.endswith("rotary_emb.inv_freq"):  # a buffer that old Llama checkpoints carry
                    places[name] = _Place(file, stored, 0, tuple(file.get_slice(stored).get_shape()))
        places = self._without_further_tokens(places)
        stacks = self._stacks(places)
        others, experts = {name: place for name, place in places.items() if name not in stacks}, apart(stacks)
        for name, found in (others | experts).items():
            if found.dtype not in _DTYPES:
                raise ValueError(
                    f"{self.directory}: {name} is of type {found.dtype}, as quantized weights are: take the model's "
                    "unquantized weights (bf16, fp16 or fp32)"
                )
        if any(name.endswith(".qkv_proj.weight") for name in others):
            others = dict(_unfused(others, self.architecture))
        self._places: dict[str, _Place | ExpertTensor] = others | experts

    def _stacks(self, places: Mapping[str, _Place]) -> dict[str, Stored]:
        """The tensors of all of a layer's experts, in families whose files have such."""
        found = {name: Stored(place.file, place.stored) for name, place in places.items() if is_stack(name)}
        family = EXPERT_FAMILIES.get(self.architecture.family) if found else None
        return found if family is not None and family.is_stacked else {}

    def _without_further_tokens(self, places: Mapping[str, _Place]) -> dict[str, _Place]:
        """Without layers behind the model's own that predict the token after the next (MTP: GLM-4.5, DeepSeek)."""
        found = {name.removesuffix("eh_proj.weight") for name in places if name.endswith(".eh_proj.weight")}
        if found:
            logger.warning("%s: %s predict further tokens and are left out", self.directory, some_of(sorted(found)))
        return {name: place for name, place in places.items() if not name.startswith(tuple(found))}

    @functools.cached_property
    def architecture(self) -> ModelArchitecture:
        """What config.json describes; for the errors see `read_architecture`."""
        return read_architecture(self.directory)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape; the parts of fused ones and of all experts' in place of them."""
        return {name: place.shape for name, place in self._places.items()}

    def read(self, name: str, dim: int, start: int, length: int) -> torch.Tensor:
        """A slice of a tensor, in the file's dtype; in bfloat16, if it is quantised there."""
        return self._places[name].read(dim, start, length)

    def dtypes(self) -> list[str]:
        """Every tensor's dtype, by safetensors' name for it."""
        return [place.dtype for place in self._places.values()]

    @property
    def num_attributes(self) -> int:
        """Outputs of the reward head: 0 for a language model."""
        shape = self.shapes().get("score.weight")
        return shape[0] if shape else 0


def _indexed_files(index: Path) -> list[str]:
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        if outside := [name for name in names if not name or Path(name).name != name]:
            raise ValueError(f"{some_of(outside)} is not the name of a file beside it")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
    return names


def _refuse_others(directory: Path, files: Sequence[str], index: Path) -> None:
    """Refuse weights beside those that would be read: one of both is what is left of another model."""
    if others := sorted(
        p.name for p in directory.glob("*.safetensors") if _WEIGHTS.fullmatch(p.name) and p.name not in files
    ):
        read = f"{index.name} names {some_of(files)}" if index.is_file() else f"there is no {index.name} for them"
        raise ValueError(f"{directory} has {some_of(others)}, but {read}: leave in it what belongs together")


def _open_safetensors(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        hint = f"it {LFS_POINTER}" if is_lfs_pointer(file) else f"{error}; copy it again"
        raise ValueError(f"{file} is not a whole safetensors file: {hint}") from error


# ---- weights out ----------------------------------------------------------------------------------


def write_checkpoint(
    directory: str | Path,
    architecture: ModelArchitecture,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    num_attributes: int = 0,
    tokenizer_dir: str | Path | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a model directory that transformers loads. At most one shard is held in memory, or a layer's experts where
    a file has them together.

    A new directory is written under a temporary name beside ``directory``, and renamed when it is complete and on disk.
    One that exists may be a mount point or the working directory, which cannot be replaced: the files are written in a
    folder within it and moved out of that folder, config.json last.
    One rank calls this; the others of the model-parallel group must drain their own `export_weights`.

    Args:
        directory: must not exist, or be empty.
        architecture: the model's shape.
        weights: the stream of `export_weights`.
        num_attributes: outputs of the reward head; 0 for a language model.
        tokenizer_dir: a Hugging Face tokenizer directory to copy in; it also gives the generation config.
        max_shard_bytes: size limit of one safetensors file (a larger tensor gets a file of its own).

    Raises:
        FileExistsError: ``directory`` has something in it.
        ValueError: no Hugging Face family can express the architecture.
    """
    target = Path(directory).resolve()
    require_empty(target)
    family = hf_family(architecture)  # fails before any work
    exists = target.exists()
    work = (target if exists else target.parent) / _unfinished(target)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    weights = _fused(weights) if FAMILIES[family].fused else weights
    if architecture.experts is not None and EXPERT_FAMILIES[family].is_stacked:
        weights = together(weights, architecture.experts.number)
    dtype = _write_shards(work, ((stored_name(family, name), t) for name, t in weights), max_shard_bytes)
    token_ids = {}
    if tokenizer_dir:
        copy_tokenizer_files(tokenizer_dir, work)
        token_ids = _token_ids(work)
    if num_attributes and token_ids:
        token_ids["pad_token_id"] = _pad_not_by_eos(work, architecture.vocab_size)
    elif (token_ids.get("pad_token_id") or 0) >= architecture.vocab_size:
        token_ids["pad_token_id"] = None  # of a token that was added to the tokenizer alone: transformers refuses it
    config = hf_config(architecture, dtype, num_attributes=num_attributes, token_ids=token_ids)
    _write_json(work / "config.json", config)
    if token_ids and not num_attributes:
        _complete_generation_config(work, token_ids)
    for file in work.glob("*.safetensors"):
        shutil.copymode(work / "config.json", file)  # safetensors makes files that only their owner can read
    sync_tree(work)
    if exists:
        for file in sorted(work.iterdir(), key=lambda file: file.name == "config.json"):
            file.rename(target / file.name)
        work.rmdir()
        sync_file(target)
    else:
        work.rename(target)
        sync_file(target.parent)


def _unfinished(target: Path) -> str:
    return f".{target.name}.incomplete"


def require_empty(directory: Path) -> None:
    """Check that `write_checkpoint` can write into ``directory``.

    Raises:
        FileExistsError: it has something in it, or is a file.
    """
    target = directory.resolve()
    left_behind = target / _unfinished(target)  # by a conversion that was killed
    if target.exists() and (not target.is_dir() or any(file != left_behind for file in target.iterdir())):
        raise FileExistsError(f"{directory} is not empty: choose another directory or remove it")


def copy_tokenizer_files(source: str | Path, target: str | Path) -> None:
    """Copy a directory's tokenizer files and its generation config, if any.

    Without a generation config, the one that transformers then makes of config.json takes its place: old models name
    the tokens that end a response there.
    """
    source, target = Path(source), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    files = tokenizer_files(source)
    if (size := sum(file.stat().st_size for file in files.values())) > MOST_BESIDE_WEIGHTS:
        raise ValueError(f"{source}: the files of its tokenizer have {size:,} bytes, more than {MOST_BESIDE_WEIGHTS:,}")
    for name, file in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / name)
    if GENERATION_CONFIG not in files and (source / "config.json").is_file():
        config = read_json(source / "config.json")
        token_ids = {key: config[key] for key in _TOKEN_IDS if config.get(key) is not None}
        if "eos_token_id" in token_ids:
            _write_json(target / GENERATION_CONFIG, token_ids)


def _token_ids(directory: Path) -> dict[str, int | None]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` of a directory's tokenizer.

    Empty if the directory has no tokenizer_config.json (a bare sentencepiece model).
    """
    if not (directory / "tokenizer_config.json").is_file():
        return {}
    tokenizer = load_for_transformers(directory)
    return {key: getattr(tokenizer, key) for key in _TOKEN_IDS}


def _complete_generation_config(directory: Path, token_ids: Mapping[str, int | None]) -> None:
    """Have a directory's generation config, a new one if there is none, name all tokens that end responses here."""
    tokenizer = load_tokenizer(directory)
    given = tokenizer.generation_config
    config = {k: v for k, v in token_ids.items() if v is not None} if given is None else parse_json(given)
    named, stop_ids = config.get("eos_token_id"), list(tokenizer.stop_ids)
    if given is None or set(stop_ids) != set(named if isinstance(named, list) else [named]):
        _write_json(directory / GENERATION_CONFIG, config | {"eos_token_id": stop_ids if stop_ids[1:] else stop_ids[0]})


def _pad_not_by_eos(directory: Path, vocab_size: int) -> int | None:
    """Make a classifier's tokenizer pad with a token other than EOS, and return its id; None if there is none.

    Classifiers read their output at the last token that is not padding: EOS, which ends every text, must not count as
    padding. Where it does, or the padding token is none of the model's ``vocab_size``, the first of these takes its
    place: a special token with "pad" in its name, BOS, the unknown token.
    """
    tokenizer = load_for_transformers(directory)
    if tokenizer.pad_token_id not in (None, tokenizer.eos_token_id) and tokenizer.pad_token_id < vocab_size:
        return tokenizer.pad_token_id
    added = tokenizer.added_tokens_decoder.items()
    special = [token.content for i, token in added if token.special and i < vocab_size]
    candidates = [*(token for token in special if "pad" in token.lower()), tokenizer.bos_token, tokenizer.unk_token]
    chosen = next((token for token in candidates if token not in (None, tokenizer.eos_token)), None)
    if chosen is None:
        logger.warning(
            "the tokenizer has no token to pad with but EOS, at which a classifier reads its reward: config.json has "
            "no pad_token_id, and transformers takes one text at a time (docs/checkpoints.md)"
        )
        return None
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).is_file():
            _write_json(directory / name, read_json(directory / name) | {"pad_token": chosen})
    return tokenizer.convert_tokens_to_ids(chosen)


def _write_shards(directory: Path, weights: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> torch.dtype:
    """Write the safetensors files and their index, and return the dtype of the first tensor, the embedding."""
    file_of: dict[str, int] = {}
    shard: dict[str, torch.Tensor] = {}
    dtype: torch.dtype | None = None
    size = total = count = 0

    def flush() -> None:
        nonlocal shard, size, count
        save_file(shard, directory / f"{count}.part", metadata={"format": "pt"})
        shard, size, count = {}, 0, count + 1

    for name, tensor in weights:
        if shard and size + tensor.nbytes > max_shard_bytes:
            flush()
        # A copy: views share memory, which safetensors refuses, and may be of live parameters.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        file_of[name] = count
        size += tensor.nbytes
        total += tensor.nbytes
        dtype = dtype or tensor.dtype
    if dtype is None:
        raise ValueError("the stream of weights is empty")
    flush()
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    if count == 1:
        names = ["model.safetensors"]
    for i, name in enumerate(names):
        (directory / f"{i}.part").rename(directory / name)
    if count > 1:
        weight_map = {name: names[i] for name, i in file_of.items()}
        _write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return dtype


def _fused(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream, with one tensor for those that are fused, which follow each other."""
    for fused, parts in itertools.groupby(weights, lambda named: fused_name(named[0])):
        tensors = [tensor for _, tensor in parts]
        yield fused, torch.cat(tensors) if len(tensors) > 1 else tensors[0]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
