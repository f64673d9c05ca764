"""From a checkpoint's path and a job's config to a model on this rank."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.native.compilation import ahead
from nemo_style_aligner.engine.parallel.groups import device
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.guard.file_source import ArchiveError
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.checkpoints.nemo_archive import (
    IS_CRITIC,
    archive_identity,
    load_nemo_config,
    load_nemo_tokenizer,
    load_nemo_weights,
    require_reward_head,
    require_weights,
)
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import CheckpointMismatchError
from nemo_style_aligner.trainer.config.fields import Section
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.config.section_names import translated
from nemo_style_aligner.trainer.models.adapter_files import adapter_identity, adapter_kind, load_adapter
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model, parse_precision
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.layer_kernels import best_kernels
from nemo_style_aligner.trainer.models.lora import LoraSettings
from nemo_style_aligner.wording import download_hint

logger = logging.getLogger(__name__)

Config = TypeVar("Config", bound=JobConfig)


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """What a .nemo checkpoint and a job's overrides say about a model, before any weight is read.

    Attributes:
        path: the archive or directory.
        architecture: the model's shape.
        config: the archive's ``model_config.yaml`` with the job's ``model`` section on top.
        dtype: from ``trainer.precision``.
        tokenizer: the archive's tokenizer.
    """

    path: Path
    architecture: ModelArchitecture
    config: Mapping[str, Any]
    dtype: torch.dtype
    tokenizer: Tokenizer

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest sequence that the model is for."""
        return int(self.config.get(_LENGTH) or self.architecture.max_position_embeddings)

    def identity(self) -> str:
        """A fingerprint of the weights that a run begins with: of the archive and of adapters. Not collective."""
        adapter = (self.config.get("peft") or {}).get("restore_from_path")
        own = archive_identity(self.path)[:16]
        return f"{own}+{adapter_identity(Path(str(adapter)))[:16]}" if adapter else own

    def require_rewards(self) -> None:
        """Raise CheckpointMismatchError if this is a language model or a critic, whose heads give no rewards."""
        require_reward_head(self.path)

    def build(self, *, head: RewardHeadConfig | None = None, trainable: bool = True) -> MegatronModel:
        """An uninitialised model of this shape (see `build_model`)."""
        return build_model(self.architecture, self.config, self.dtype, head=head, trainable=trainable)

    def load(
        self, *, head: RewardHeadConfig | None = None, trainable: bool = True, needs_head: bool = False
    ) -> MegatronModel:
        """The model with the checkpoint's weights. A head the checkpoint lacks keeps its initial values.

        ``needs_head``: it must have one, since its rewards are used. For the errors see `load_nemo_weights`, and
        `load_adapter` where ``model.peft`` names adapters to begin with.
        """
        require_weights(self.path, self.architecture)
        model = self.build(head=head, trainable=trainable)
        load_nemo_weights(self.path, model, needs_head=needs_head)
        if model.adapters and (adapter := self.config["peft"]["restore_from_path"]):
            kind = adapter_kind(Path(str(adapter)))
            kind.warn_of_other_base(self.path)
            load_adapter(kind, model)
        return model


def read_base_config(path: str | None, key: str) -> tuple[Path, dict[str, Any]]:
    """The path of the checkpoint that a job names, and the checkpoint's own config (see `load_nemo_config`).

    Args:
        path: a .nemo archive or directory.
        key: the config key ``path`` came from, for the error message.

    Raises:
        ValueError: no path was given, or it is not a checkpoint, or holds adapters alone.
        FileNotFoundError: there is nothing at ``path``.
    """
    if not path:
        raise ValueError(f"{key} is not set: pass {key}=/path/to/model.nemo")
    location = Path(str(path)).expanduser()  # YAML reads some names as numbers
    if not location.exists():
        raise FileNotFoundError(f"{key}={path} does not exist{download_hint(str(path))}")
    config = load_nemo_config(location)
    require_whole_model(location, config)
    return location, config


def require_whole_model(path: Path, config: Mapping[str, Any]) -> None:
    """Raise ArchiveError if the archive with this config holds adapters alone."""
    if LoraSettings.from_config(config) is not None:
        raise ArchiveError(
            f"{path} holds adapters, no model: give it as model.peft.restore_from_path beside its base model, or merge "
            "the two with convert_adapter.py"
        )


ARCHIVE = "pretrained_checkpoint.restore_from_path"
"""The key of the archive that most jobs start from."""


def open_base_model(path: str | None, config: Config, *, key: str = ARCHIVE) -> tuple[BaseModel, Config]:
    """Read the checkpoint at ``path`` and lay the job's ``model`` section over its config.

    For ``path``, ``key`` and the errors see `read_base_config`.

    Returns:
        The model, and the job's config with the merged section, so that what the job logs is what it runs with.
    """
    base = read_base_model(path, config.model_given(), config.trainer.precision, key=key)
    if device().type == "cpu":
        ahead(best_kernels)
    return base, config.changed({"model": base.config})


def read_base_model(path: str | None, job: Mapping[str, Any], precision: str | int, *, key: str = ARCHIVE) -> BaseModel:
    """The checkpoint at ``path`` with a job's ``model`` section laid over its config; see `open_base_model`."""
    location, base = read_base_config(path, key)
    merged = lay_over(base, job)
    architecture = ModelArchitecture.from_nemo_config(merged)
    if dist.get_rank() == 0 and (base.get(_POSITIONS) or math.inf) < architecture.max_position_embeddings:
        logger.warning(
            "%s was made for %d positions; this job allows %d (model.encoder_seq_length, "
            "model.max_position_embeddings). If your data are shorter, set model.encoder_seq_length=%d",
            location,
            base[_POSITIONS],
            architecture.max_position_embeddings,
            base[_POSITIONS],
        )
    tokenizer = load_nemo_tokenizer(location)
    tokenizer.format = tokenizer.format.with_special_tokens(merged.get("special_tokens_as_text"))
    return BaseModel(
        path=location,
        architecture=architecture,
        config=merged,
        dtype=parse_precision(precision),
        tokenizer=tokenizer,
    )


def require_same_tokenizer(policy: BaseModel, model: BaseModel, what: str = "a reward model") -> None:
    """Raise CheckpointMismatchError if another model's tokenizer is not the policy's; warn if only one had BOS."""
    with_bos = {one.tokenizer.format.add_bos for one in (policy, model)}
    if None not in with_bos and len(with_bos) > 1:
        warn_for_all_ranks(logger, "of %s and %s, only one was trained on texts with BOS", policy.path, model.path)
    if policy.tokenizer.fingerprint() != model.tokenizer.fingerprint():
        raise CheckpointMismatchError(
            f"{model.path} has a different tokenizer from {policy.path}: it would misread the responses. "
            f"Give {what} that was trained from the policy's base model"
        )


JOB_SETTINGS = (
    "activations_checkpoint_granularity",
    "activations_checkpoint_method",
    "activations_checkpoint_num_layers",
    "data",
    "forward_max_tokens_per_micro_batch",
    IS_CRITIC,
    "max_tokens_per_micro_batch",
    "moe_aux_loss_coeff",
    "moe_router_bias_update_rate",
    "optim",
    "peft",
    "ppo",
    "restore_from_path",
    "resume_from_checkpoint",
    "share_prompts",
    "special_tokens_as_text",
    "trt_llm",
)
"""Keys of ``model`` that say how a job works, not what its model is: archives do not pass them on from job to job."""


HISTORY = "history"
"""Key of ``model_config.yaml``: what became of the model, from the first archive on, a line for each."""


def portable_config(
    config: Mapping[str, Any], architecture: ModelArchitecture, trainer: Mapping[str, Any], base: Path
) -> dict[str, Any]:
    """``model_config.yaml`` for archives made by a job: its ``model`` section without `JOB_SETTINGS`.

    Args:
        config: the job's ``model`` section, laid over its base's (`BaseModel.config`), interpolations resolved.
        trainer: what is in the job's ``trainer`` section: sections of the schema, or as a file has them.
        base: the archive that the job started from.
    """
    history = [*config.get(HISTORY, ()), f"{_method(trainer)} from {base.absolute()}"]
    mark = {IS_CRITIC: True} if "ppo" in trainer and "ppo" not in config else {}  # an actor's model has one as well
    kept = {key: value for key, value in config.items() if key not in JOB_SETTINGS}
    return kept | architecture.to_nemo_config() | mark | {HISTORY: history}


def _method(trainer: Mapping[str, Any]) -> str:
    """What a job did to its model, as its own YAML names it: the section of ``trainer`` that says how to train."""
    keys = {name: vars(of) if isinstance(of, Section) else of for name, of in trainer.items()}
    sections = (name for name, of in keys.items() if isinstance(of, Mapping) and "gradient_clip_val" in of)
    return translated(f"trainer.{next(sections, 'trained')}").removeprefix("trainer.")


_POSITIONS, _LENGTH = "max_position_embeddings", "encoder_seq_length"


def lay_over(base: dict[str, Any], job: Any) -> dict[str, Any]:
    """Lay a job's ``model`` section over a checkpoint's.

    A null in the job's section leaves the checkpoint's value, except for `JOB_SETTINGS`, which are the job's alone. If
    the job does not set ``max_position_embeddings``, it is the checkpoint's or the job's ``encoder_seq_length``,
    whichever is larger, so that a job with short sequences does not write a model with fewer positions.
    """
    merged = _lay_over({name: value for name, value in base.items() if name not in JOB_SETTINGS}, job)
    if job.get(_POSITIONS) is None and job.get(_LENGTH):
        merged[_POSITIONS] = max(int(job[_LENGTH]), int(base.get(_POSITIONS) or base.get(_LENGTH) or 0))
    if job.get("add_qkv_bias") is not None and job.get("qkv_bias") is None:
        merged["qkv_bias"] = job["add_qkv_bias"]  # its other name, which archives have
    return merged


def _lay_over(base: dict[str, Any], job: Any) -> dict[str, Any]:
    merged = dict(base)
    for name, value in job.items():
        if isinstance(value, dict) and isinstance(base.get(name), dict):
            merged[name] = _lay_over(base[name], value)
        elif value is not None or name not in base:
            merged[name] = value
    return merged
