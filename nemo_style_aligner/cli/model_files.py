"""Files of models, told apart by what they are, whatever their names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from nemo_style_aligner.errors import UserError

if TYPE_CHECKING:
    from nemo_style_aligner.data.tokenizer import Tokenizer

Kind = Literal[".nemo archive", "Hugging Face directory", "GGUF file", "training checkpoint", "tokenizer"]


class UnknownModelError(UserError, ValueError):
    """A path is none of a model."""


def kind_of(path: Path) -> Kind:
    """What there is at ``path``. A file that is no GGUF file is taken for an archive.

    Raises:
        UnknownModelError: a folder of something else; the message says what to name in its place.
        ArchiveError: a directory of NeMo 2.0.
    """
    from nemo_style_aligner.checkpoints.directory import is_training_checkpoint, refuse_nemo_2
    from nemo_style_aligner.data.tokenizer import tokenizer_files

    if path.is_file():
        with path.open("rb") as file:
            return "GGUF file" if file.read(4) == b"GGUF" else ".nemo archive"
    if (path / "model_config.yaml").is_file():
        return ".nemo archive"
    if is_training_checkpoint(path):
        return "training checkpoint"
    if (path / "config.json").is_file():
        return "Hugging Face directory"
    if tokenizer_files(path):
        return "tokenizer"
    refuse_nemo_2(path)
    inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    models = [entry for entry in sorted(inside.iterdir()) if entry.suffix == ".nemo" or is_training_checkpoint(entry)]
    if models:
        raise UnknownModelError(f"{path} holds several models: name one, such as {models[-1]}")
    raise UnknownModelError(
        f"{path} is no model: give a .nemo archive, a Hugging Face directory, a GGUF file or a training checkpoint"
    )


def tokenizer_of(path: Path) -> Tokenizer:
    """The tokenizer of a model, or in a folder. For the errors see `kind_of` and the readers of each kind."""
    from nemo_style_aligner.checkpoints.nemo_archive import load_nemo_tokenizer
    from nemo_style_aligner.data.tokenizer import load_tokenizer
    from nemo_style_aligner.temporary import temporary_folder

    kind = kind_of(path)
    if kind == ".nemo archive":
        return load_nemo_tokenizer(path)
    if kind == "GGUF file":
        from nemo_style_aligner.weights.gguf import GGUFCheckpoint

        with temporary_folder(f"the tokenizer of {path}") as folder:
            GGUFCheckpoint(path).save_tokenizer(folder)
            return load_tokenizer(folder)
    if kind == "training checkpoint":
        from nemo_style_aligner.models.conversion import job_of

        return job_of(path).tokenizer()
    return load_tokenizer(path)
