"""NeMo archives: a model's config, weights and tokenizer in one ``.nemo`` tar file, or unpacked in a directory.

    model_config.yaml    architecture keys, sections ``tokenizer`` and ``text_format`` (how its texts are written)
    model_weights/       Megatron distributed checkpoint, keys prefixed with ``model.``
    tokenizer/           Hugging Face tokenizer files
    checksums.json       size and SHA-256 of every other file, compared when the archive is loaded

Archives that NeMo wrote have no checksums and no ``tokenizer/``, but a file beside the config that the config refers
to as ``nemo:<hash>_tokenizer.model``; these are read as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import yaml

from nemo_style_aligner import activity
from nemo_style_aligner.durable import UNFINISHED, discard, publish, remove_path, require_space, sync_file
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.agreement import on_first_rank, patiently_on_first_rank
from nemo_style_aligner.engine.text.text_format import TEXT_FORMAT, TextFormat
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from nemo_style_aligner.engine.weights.foreign import refuse_nemo_2
from nemo_style_aligner.guard.file_source import (
    ArchiveError,
    DamagedCheckpointError,
    FileSource,
    MissingFileError,
    open_source,
    safe_name,
)
from nemo_style_aligner.guard.parsing import parse_json, parse_yaml, read_json
from nemo_style_aligner.guard.trusted_paths import temporary_folder
from nemo_style_aligner.trainer.checkpoints.directory import is_training_checkpoint
from nemo_style_aligner.trainer.checkpoints.manifest import describe_files, find_changes
from nemo_style_aligner.trainer.checkpoints.sharded_index import Index
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import (
    HEAD_PREFIX,
    MODEL_PREFIX,
    CheckpointMismatchError,
    Part,
    load_sharded_tensors,
    model_parts,
    stored_index,
    stored_shapes,
)
from nemo_style_aligner.trainer.checkpoints.sharded_writing import bytes_to_write, own_parts, write_tensors

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.models.gpt import MegatronModel

logger = logging.getLogger(__name__)

IS_CRITIC = "is_critic"
"""Key in ``model_config.yaml`` of a critic's archive."""

_CONFIG = "model_config.yaml"
WEIGHTS = "model_weights"
"""The folder of an archive's distributed checkpoint."""

_TOKENIZER = "tokenizer"
_CHECKSUMS = "checksums.json"
_HF_CONFIG = "config.json"
_OUTPUT_LAYER = MODEL_PREFIX + "output_layer."
_EMBEDDING = MODEL_PREFIX + "embedding.word_embeddings.weight"
_WHAT_TO_DO = (
    f"unpack it (tar -xf) and put a Hugging Face tokenizer's files into {_TOKENIZER}/: jobs read the folder as they "
    "read the archive"
)
_BYTES_OF_IDENTITY = 1 << 20  # of each file
_COPIED_AT_ONCE = 16 << 20  # bytes; tarfile's default is 16 KiB


# ---- writing --------------------------------------------------------------------------------


def save_nemo(
    path: Path,
    model: MegatronModel,
    model_config: Mapping[str, Any],
    tokenizer: Tokenizer | Path | None,
) -> None:
    """Write an archive. Collective. It appears at ``path`` once it is complete, and replaces the file that was there.

    Args:
        path: on a file system that all ranks share.
        model: its weights are written as they are, or merged with their adapters.
        model_config: the contents of ``model_config.yaml``; only rank 0's is used.
        tokenizer: what the archive gets, or the folder of its Hugging Face files; None for none. Rank 0's is used.

    Raises:
        OSError: it could not be written, or does not fit on the disk; what was at ``path`` is still there.
        ValueError: ``path`` is a directory.
    """
    write_nemo(path, own_parts(model.merged_parts()), model_config, tokenizer)


def write_nemo(
    path: Path,
    tensors: Sequence[Part],
    model_config: Mapping[str, Any],
    tokenizer: Tokenizer | Path | None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """`save_nemo` of what `own_parts` returned, in any thread. Collective in ``group``.

    Args:
        tensors: what this rank writes, with keys under `MODEL_PREFIX`.
        group: of all ranks; the default group where it is None.
    """
    staging = path.with_name(f".{path.name}{UNFINISHED}")
    size = bytes_to_write(tensors, group)
    on_first_rank(lambda: _prepare(path, staging, 2 * size), group)
    try:
        write_tensors(tensors, staging / WEIGHTS, group)
        on_first_rank(lambda: _write_small_files(staging, model_config, tokenizer), group)
        checksums = describe_files(staging, group)
        patiently_on_first_rank(lambda: _pack(path, staging, checksums), group)
    finally:
        on_first_rank(lambda: discard(staging), group)


def make_place(path: Path) -> None:
    """Make the folder that an archive is to be written into. Not collective.

    Raises:
        OSError: it cannot be made.
        ValueError: ``path`` is a directory.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise ValueError(f"{path} is a directory, in the place of the file to write: give a path that ends in .nemo")


def _prepare(path: Path, staging: Path, size: int) -> None:
    make_place(path)
    remove_path(staging)
    (staging / WEIGHTS).mkdir(parents=True)
    require_space(staging, size)


def _write_small_files(staging: Path, model_config: Mapping[str, Any], tokenizer: Tokenizer | Path | None) -> None:
    config = dict(model_config)
    if tokenizer is not None:
        if isinstance(tokenizer, Path):
            shutil.copytree(tokenizer, staging / _TOKENIZER)
        else:
            tokenizer.save(staging / _TOKENIZER)
            config[TEXT_FORMAT] = tokenizer.format.to_config()
        config["tokenizer"] = {"library": "huggingface", "type": _TOKENIZER, "model": None}
    (staging / _CONFIG).write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True), encoding="utf-8")


def _pack(path: Path, staging: Path, checksums: Mapping[str, Any]) -> None:
    (staging / _CHECKSUMS).write_text(json.dumps(checksums, indent=1), encoding="utf-8")
    tar_path = path.with_name(f".{path.name}.tar{UNFINISHED}")
    try:
        _move_into_tar(staging, tar_path)
        publish(tar_path, path)
    finally:
        discard(tar_path)


def _move_into_tar(directory: Path, tar_path: Path) -> None:
    """Put the files into an uncompressed tar, deleting each once it is in, so that at most one is on disk twice."""
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    # The config first, for those who read nothing else.
    files.sort(key=lambda p: p.name != _CONFIG)
    with tarfile.TarFile(tar_path, "w", copybufsize=_COPIED_AT_ONCE) as tar:
        for file in files:
            activity.progress()
            tar.add(file, arcname=file.relative_to(directory).as_posix())
            file.unlink()
    sync_file(tar_path)


# ---- reading --------------------------------------------------------------------------------


def load_nemo_config(path: Path) -> dict[str, Any]:
    """The contents of ``model_config.yaml``, with ``vocab_size`` filled in, which NeMo leaves to the tokenizer.

    Raises:
        FileNotFoundError: no archive, or one without a config.
        ArchiveError: not an archive (for a training checkpoint or a Hugging Face directory, the message says how to
            convert it), or the config is not a YAML mapping.
    """
    with open_source(path) as source:
        config = _read_config(source)
    if config.get("vocab_size") is None:
        with contextlib.suppress(FileNotFoundError, TokenizerError):  # reported where the tokenizer is needed
            config["vocab_size"] = config.get("override_vocab_size") or load_nemo_tokenizer(path).vocab_size
    return config


def _read_config(source: FileSource) -> dict[str, Any]:
    try:
        text = source.read_text(_CONFIG)
    except FileNotFoundError:
        _name_what_it_is(source.location)
        raise
    try:
        config = parse_yaml(text)
    except ValueError as error:
        raise ArchiveError(f"{source.location}: {_CONFIG} is not plain YAML: {error}") from error
    if not isinstance(config, dict):
        raise ArchiveError(f"{source.location}: {_CONFIG} is not a mapping")
    return config


def _name_what_it_is(location: Path) -> None:
    """Raise ArchiveError for a training checkpoint or a Hugging Face directory, saying what converts it."""
    if is_training_checkpoint(location):
        raise ArchiveError(f"{location} is a training checkpoint, not an archive: convert it with nsa convert")
    refuse_nemo_2(location)
    if (location / _HF_CONFIG).is_file():
        raise ArchiveError(f"{location} is a Hugging Face directory, not an archive: convert it with nsa convert")
    if (location / "adapter_config.json").is_file():
        raise ArchiveError(f"{location} is PEFT's adapter: merge it into its base's archive with nsa convert --base")


def _stored_checksums(source: FileSource) -> dict[str, Any]:
    """What ``checksums.json`` says; nothing for archives that others wrote.

    Raises:
        DamagedCheckpointError: it cannot be read.
    """
    if _CHECKSUMS not in source.names():
        return {}
    try:
        stored = parse_json(source.read_text(_CHECKSUMS))
        return {name: {"bytes": file["bytes"], "sha256": file["sha256"]} for name, file in stored.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{source.location}: {_CHECKSUMS} cannot be read: {error}") from error


def archive_identity(path: Path) -> str:
    """SHA-256, in hex, of what an archive's ``checksums.json`` says of its config, tokenizer and weights.

    A tar and the directory that it was made of have the same, and so has an archive that is made again of the same
    model. Of an archive without checksums, the names, sizes and first bytes of its files count. Not collective.

    Raises:
        FileNotFoundError: no archive at ``path``.
        ArchiveError: not an archive.
        DamagedCheckpointError: its checksums cannot be read.
    """
    with open_source(path) as source:
        files: dict[str, Any] = _stored_checksums(source)
        for name in () if files else source.names():
            with source.open(name) as stream:
                head = hashlib.sha256(stream.read(_BYTES_OF_IDENTITY)).hexdigest()
                files[name] = [stream.seek(0, os.SEEK_END), head]
    told = {name: files[name] for name in sorted(files) if not name.endswith(".metadata")}  # has a random number
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def load_nemo_weights(path: Path, model: MegatronModel, *, needs_head: bool = False) -> None:
    """Load an archive's weights into a model of any tensor- and pipeline-parallel layout, in place. Collective.

    A model with a reward head also takes a language model's archive: the head keeps its values, and the archive's
    output layer is ignored. The padding of the vocabulary may differ. An optimizer that exists already keeps its main
    weights until its ``megatron.reload_model_params()`` is called.

    Raises:
        FileNotFoundError: no archive at ``path``.
        DamagedCheckpointError: its files differ from their checksums.
        UnsupportedFormatError: its weights are in another of NeMo's formats.
        CheckpointMismatchError: missing or unexpected keys, or other shapes, all named; or ``needs_head``, and the
            archive has no reward head, or a critic's; or the archive has one, and the model has none.
    """
    logger.info("loading the weights of %s", path)
    with open_source(path) as source:
        require_undamaged(path, source)
        stored = stored_shapes(source, WEIGHTS)
        per_layer_keys = any(key.startswith(f"{MODEL_PREFIX}decoder.layers.0.") for key in stored)
        parts = model_parts(model.gpt, per_layer_keys=per_layer_keys)
        rows, vocab_size = stored.get(_EMBEDDING, (0,))[0], model.architecture.vocab_size
        if _EMBEDDING in stored and rows < vocab_size:
            raise CheckpointMismatchError(f"{path} has {rows} embeddings, the model needs {vocab_size} (vocab_size)")
        head = model.has_reward_head
        if needs_head:
            _require_reward_head(source, stored)
        elif head and not has_reward_head(stored):
            logger.info("%s has no reward head: it starts from its initial values", path)
        elif not head and has_reward_head(stored):
            raise CheckpointMismatchError(
                f"{path} has a reward head: it is a reward model's or a critic's. Give a language model "
                "(train_gpt_sft.py makes one)"
            )
        optional, ignored = ((HEAD_PREFIX,), (_OUTPUT_LAYER,)) if head else ((), ())
        load_sharded_tensors(parts, source, WEIGHTS, optional=optional, ignored=ignored)


def require_undamaged(path: Path, source: FileSource) -> None:
    """Raise DamagedCheckpointError if an archive's files differ from their checksums."""
    if problems := find_changes(source, _stored_checksums(source)):
        raise DamagedCheckpointError(f"{path} is damaged: {'; '.join(problems)}. Copy it again")


def stored_weights(path: Path) -> Index:
    """Key -> every tensor of an archive's weights. For the errors see `load_nemo_weights`."""
    with open_source(path) as source:
        return stored_index(source, WEIGHTS)


def require_weights(path: Path, architecture: ModelArchitecture) -> None:
    """Check that an archive's weights could be those that its config describes, before memory is taken for them.

    For the errors see `ModelArchitecture.require_weights` and `load_nemo_weights`.
    """
    architecture.require_weights((tensor.shape for tensor in stored_weights(path).values()), path)


def require_reward_head(path: Path) -> None:
    """Raise CheckpointMismatchError if an archive is a language model's or a critic's, whose heads give no rewards."""
    with open_source(path) as source:
        _require_reward_head(source, stored_shapes(source, WEIGHTS))


def _require_reward_head(source: FileSource, stored: Iterable[str]) -> None:
    if not has_reward_head(stored):
        raise CheckpointMismatchError(
            f"{source.location} has no reward head: it is a language model's, and its rewards would come from an "
            "untrained head. Give a reward model (train_reward_model.py makes one)"
        )
    if _read_config(source).get(IS_CRITIC):
        raise CheckpointMismatchError(
            f"{source.location} is a critic's, whose values are no rewards. Give a reward model; a critic may start "
            "from this if a service of its own gives the rewards (trainer.ppo.combine_rm_and_critic_server=False)"
        )


def has_reward_head(stored: Iterable[str]) -> bool:
    """Whether these keys of a model's tensors, in an archive or a training checkpoint, include a reward head's."""
    return any(key.startswith(HEAD_PREFIX) for key in stored)


def load_nemo_tokenizer(path: Path) -> Tokenizer:
    """Load the archive's tokenizer, with the format of the texts that its model was trained on. Not collective.

    Raises:
        FileNotFoundError: no archive, or none with a tokenizer in it.
        TokenizerError: it cannot be read, or is of an unsupported kind.
        TextFormatError: the format cannot be read.
        NotWrittenError: there is no temporary folder with room to unpack it.
    """
    with nemo_tokenizer_dir(path) as directory:
        try:
            tokenizer = load_tokenizer(directory)
        except TokenizerError as error:  # it names the copy, which is gone then
            raise TokenizerError(f"the tokenizer of {path} cannot be used: {error}") from error
    with open_source(path) as source:
        tokenizer.format = TextFormat.from_config(_read_config(source).get(TEXT_FORMAT), str(path))
    return tokenizer


@contextlib.contextmanager
def nemo_tokenizer_dir(path: Path) -> Iterator[Path]:
    """The archive's tokenizer files within the context: a Hugging Face directory, or a sentencepiece ``.model`` file.

    Raises:
        FileNotFoundError: no archive, or none with a tokenizer in it.
        TokenizerError: it is of an unsupported kind.
        NotWrittenError: there is no temporary folder with room for it.
    """
    with temporary_folder(f"the tokenizer of {path}") as folder:
        yield _extract_tokenizer(path, folder)


def _extract_tokenizer(path: Path, target: Path) -> Path:
    with open_source(path) as source:
        if names := source.below(_TOKENIZER):
            source.extract(names, target, strip=_TOKENIZER)
            return target
        section = _read_config(source).get("tokenizer") or {}
        if not isinstance(section, dict):
            raise TokenizerError(f"{path}: tokenizer in its {_CONFIG} is no section")
        _refuse_foreign_tokenizers(path, section)
        for key in ("model", "tokenizer_model", "vocab_file"):
            reference = section.get(key)
            if isinstance(reference, str) and reference.startswith("nemo:"):
                name = safe_name(reference.removeprefix("nemo:"))
                source.extract([name], target)
                if (found := _tokenizer_of_file(target / name)) is not None:
                    return found
        kind = section.get("type")
        if section.get("library") == "huggingface" and isinstance(kind, str) and kind and Path(kind).is_dir():
            return Path(kind)  # where NeMo's converter found it
    where = f" (its config names {kind}, which is no directory here; nothing is downloaded)" if kind else ""
    raise MissingFileError(
        f"{path} has no tokenizer{where}: neither {_TOKENIZER}/ nor a nemo: reference in its config to a sentencepiece "
        f"model or a tokenizer.json; {_WHAT_TO_DO}"
    )


def _refuse_foreign_tokenizers(path: Path, section: Mapping[str, Any]) -> None:
    library, kind = section.get("library"), section.get("type")
    if library == "tiktoken" or (library == "megatron" and str(kind).startswith("GPT2BPE")):
        name = library if library == "tiktoken" else f"{library} {kind}"
        raise TokenizerError(f"{path}: tokenizers of the library {name} are not supported; {_WHAT_TO_DO}")
    for key in ("special_tokens", "additional_special_tokens"):  # which NeMo adds to those of the tokenizer's file
        if section.get(key):
            raise TokenizerError(
                f"{path}: tokenizer.{key}={section[key]} in its config is not supported: these tokens would be read as "
                f"text; {_WHAT_TO_DO}, with these tokens in them"
            )


def _tokenizer_of_file(file: Path) -> Path | None:
    """A sentencepiece file as it is; for a ``tokenizer.json``, which gets its proper name, the folder that it is in.

    None for another JSON file: NeMo's converters put in a ``vocab.json``, which has no merges.
    """
    if file.suffix != ".json":
        return file
    try:
        content = read_json(file)
    except ValueError as error:
        raise TokenizerError(f"{file.name} in the archive is not JSON: {error}") from error
    if not isinstance(content, dict) or not {"model", "added_tokens"} <= content.keys():
        file.unlink()
        return None
    os.rename(file, file.with_name("tokenizer.json"))
    return file.parent
