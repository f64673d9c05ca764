"""Models that are no archive yet, but can become one: Hugging Face directories and GGUF files, before it is made."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from nemo_style_aligner.engine.weights.layout import check_shapes
from nemo_style_aligner.trainer.checkpoints.directory import is_training_checkpoint

if TYPE_CHECKING:
    from nemo_style_aligner.engine.weights.gguf import GGUFCheckpoint
    from nemo_style_aligner.engine.weights.huggingface import HuggingFaceCheckpoint

Source: TypeAlias = "HuggingFaceCheckpoint | GGUFCheckpoint"
"""What reads such a model's weights."""


def is_foreign(path: Path) -> bool:
    """Whether this is a Hugging Face directory or a GGUF file."""
    if path.is_dir():
        is_archive = (path / "model_config.yaml").is_file() or is_training_checkpoint(path)
        return (path / "config.json").is_file() and not is_archive
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def foreign_config(path: Path) -> dict[str, Any]:
    """``model_config.yaml`` of the archive that would be made of it. No weights are read.

    Raises:
        FileNotFoundError, ValueError: config or weights are missing, are not supported, or do not fit together.
    """
    return config_of_source(source_of(path))


def source_of(path: Path) -> Source:
    """The model's weights, before any is read. For the errors see `foreign_config`."""
    # Imported here: few jobs begin with such a model.
    from nemo_style_aligner.engine.weights.gguf import GGUFCheckpoint
    from nemo_style_aligner.engine.weights.huggingface import HuggingFaceCheckpoint

    return HuggingFaceCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)


def config_of_source(source: Source) -> dict[str, Any]:
    """See `foreign_config`."""
    architecture, num_attributes = source.architecture, source.num_attributes
    check_shapes(architecture, source.shapes(), num_attributes)  # before memory is taken for what config.json claims
    config = architecture.to_nemo_config() | {"encoder_seq_length": architecture.max_position_embeddings}
    return config | (_reward_config(num_attributes) if num_attributes else {})


def _reward_config(num_attributes: int) -> dict[str, Any]:
    config: dict[str, Any] = {"reward_model_type": "binary_ranking", "use_avg_pool": False}
    if num_attributes > 1:
        regression = {"num_attributes": num_attributes, "merge_attributes": False}
        config |= {"reward_model_type": "regression", "regression": regression}
    return config | {"force_head_dtype": "float32"}


def state_of(path: Path) -> str:
    """A digest of the names, sizes and times of a model's files: another one when they have changed."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    seen = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr(seen).encode()).hexdigest()
