"""``nsa inspect``: what the files of a model say of it, without loading a weight."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from nemo_style_aligner.engine.architecture import ModelArchitecture
    from nemo_style_aligner.engine.text.tokenizer import Tokenizer
    from nemo_style_aligner.trainer.checkpoints.sharded_index import Index

_EXAMPLES = """\b
Examples:
  nsa inspect policy.nemo
  nsa inspect ~/models/Qwen3-0.6B
  nsa inspect results/sft/checkpoints/*-last
  nsa inspect SmolLM2-135M-Instruct.Q4_1.gguf --json | jq .architecture.num_layers
"""


@click.command(epilog=_EXAMPLES)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def command(model: Path, as_json: bool) -> None:
    """Describe MODEL: a .nemo archive, a Hugging Face directory, a GGUF file or a training checkpoint.

    Architecture, sizes, tokenizer, how its texts are written, and what it was trained from; of a checkpoint also step,
    metrics and the job's layout. No weight is loaded and no checksum is compared; jobs do both.
    """
    import yaml

    found = describe(model)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        click.echo(yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=1000), nl=False)


def describe(path: Path) -> dict[str, Any]:
    """What ``nsa inspect`` knows of a model, as JSON has it; what is not known is left out.

    Raises:
        UserError: no model, or one whose files cannot be read or are of a kind that is not supported.
    """
    from nemo_style_aligner.errors import UserError
    from nemo_style_aligner.trainer.models.files import kind_of, tokenizer_of
    from nemo_style_aligner.wording import size_of

    kind = kind_of(path)
    read = {
        ".nemo archive": _archive,
        "Hugging Face directory": _foreign,
        "GGUF file": _foreign,
        "training checkpoint": _checkpoint,
        "adapter": _adapter,
        "tokenizer": lambda _: {},
    }[kind]
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    found: dict[str, Any] = {"path": str(path), "kind": kind, "bytes": size, "size": size_of(size)}
    try:
        found |= read(path)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"{path} is a{'n' * (kind == 'adapter')} {kind} that cannot be used here: {error}") from error
    try:
        found["tokenizer"] = _tokenizer(tokenizer_of(path))
    except (ValueError, FileNotFoundError) as error:  # the rest is worth to be known
        found["tokenizer"] = {"problem": str(error)}
    return found


def _archive(path: Path) -> dict[str, Any]:
    from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_config, stored_weights

    return _trained(load_nemo_config(path), stored_weights(path))


def _checkpoint(path: Path) -> dict[str, Any]:
    from nemo_style_aligner.guard.file_source import open_source
    from nemo_style_aligner.guard.parsing import read_json
    from nemo_style_aligner.trainer.checkpoints.directory import STATE, TRAINER_STATE
    from nemo_style_aligner.trainer.checkpoints.manifest import Manifest
    from nemo_style_aligner.trainer.checkpoints.sharded_tensors import stored_index
    from nemo_style_aligner.trainer.models.conversion import job_of
    from nemo_style_aligner.trainer.models.restore import portable_config

    manifest, state, job = Manifest.read(path), read_json(path / TRAINER_STATE), job_of(path)
    with open_source(path) as source:
        index = stored_index(source, STATE)
    return {
        "step": manifest.step,
        "consumed_samples": state["trainer"].get("consumed_samples"),
        "metrics": state["trainer"].get("metrics", {}),
        "layout": state["layout"],
        **_trained(portable_config(job.model, job.architecture, job.trainer, job.base), index),
    }


def _adapter(path: Path) -> dict[str, Any]:
    from nemo_style_aligner.trainer.models.adapter_files import adapter_kind
    from nemo_style_aligner.trainer.models.restore import HISTORY

    kind = adapter_kind(path)
    return {
        "purpose": f"LoRA adapter, rank {kind.rank}, alpha {kind.alpha:g}",
        "history": (kind.model or {}).get(HISTORY),
    }


def _trained(config: Mapping[str, Any], stored: Index) -> dict[str, Any]:
    """A model in NeMo's format: its ``model_config.yaml``, and its tensors (an optimizer's may be beside them)."""
    from nemo_style_aligner.engine.architecture import ModelArchitecture
    from nemo_style_aligner.trainer.checkpoints.nemo_archive import IS_CRITIC, has_reward_head
    from nemo_style_aligner.trainer.checkpoints.sharded_tensors import MODEL_PREFIX
    from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
    from nemo_style_aligner.trainer.models.restore import HISTORY

    own = {key: tensor for key, tensor in stored.items() if key.startswith(MODEL_PREFIX)}
    attributes = RewardHeadConfig.from_model_config(config).num_attributes if has_reward_head(own) else 0
    dtypes = (str(tensor.dtype).removeprefix("torch.") for tensor in own.values())
    described = _model(ModelArchitecture.from_nemo_config(config), dtypes, attributes)
    return described | ({"purpose": "critic"} if config.get(IS_CRITIC) else {}) | {"history": config.get(HISTORY, [])}


def _foreign(path: Path) -> dict[str, Any]:
    from nemo_style_aligner.trainer.models.foreign_models import source_of

    weights = source_of(path)
    return _model(weights.architecture, weights.dtypes(), weights.num_attributes)


def _model(architecture: ModelArchitecture, dtypes: Iterable[str], attributes: int) -> dict[str, Any]:
    """What is said of all models. Of the architecture, what is as in most models is left out."""
    import dataclasses

    plain = {field.name: field.default for field in dataclasses.fields(architecture)}
    shape = {key: value for key, value in dataclasses.asdict(architecture).items() if value != plain[key]}
    return {
        "purpose": f"reward model, {attributes} attribute{'s' * (attributes > 1)}" if attributes else "language model",
        "parameters": architecture.num_parameters,
        "tensors": dict(Counter(dtypes)),
        "architecture": {"family": architecture.family} | shape,
    }


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    def spelt(token: int | None) -> str | None:
        return None if token is None else tokenizer.ids_to_text([token], keep_special=True)

    return {
        "vocab_size": tokenizer.vocab_size,
        "bos": spelt(tokenizer.bos_id),
        "begins_texts_with_bos": tokenizer.begins_with_bos(None, "add_bos"),
        "ends_responses": list(dict.fromkeys([*map(spelt, tokenizer.stop_ids), *tokenizer.end_strings(())])),
        "chat_template": tokenizer.chat_template is not None,
        "text_format": tokenizer.format.to_config(),
    }
