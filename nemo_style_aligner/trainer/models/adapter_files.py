"""Adapters in files: PEFT's directories, archives of adapters, training checkpoints of jobs with adapters."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nemo_style_aligner.guard.file_source import open_source
from nemo_style_aligner.guard.parsing import parse_yaml, read_json
from nemo_style_aligner.log_fields import warn_for_all_ranks
from nemo_style_aligner.trainer.checkpoints.directory import STATE, is_training_checkpoint, present_name
from nemo_style_aligner.trainer.checkpoints.manifest import MANIFEST, describe_file, find_damage
from nemo_style_aligner.trainer.checkpoints.nemo_archive import (
    WEIGHTS,
    archive_identity,
    load_nemo_config,
    require_undamaged,
)
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import (
    ADAPTER_PREFIX,
    HEAD_PREFIX,
    CheckpointMismatchError,
    Part,
    load_sharded_tensors,
    stored_shapes,
)
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.lora import A_WEIGHT, B_WEIGHT, LoraSettings, fill
from nemo_style_aligner.trainer.telemetry.metrics import HYPERPARAMETERS_FILE
from nemo_style_aligner.wording import some_of

logger = logging.getLogger(__name__)

PEFT_CONFIG, _PEFT_WEIGHTS, _PEFT_PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
BASE_FINGERPRINT = "base_fingerprint"
"""Key of ``model.peft`` in the files of a job with adapters: the `archive_identity` of their base, its first digits."""

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_SCORE = "score."  # what PEFT's files have of a classifier's head
# Of PEFT's settings, those under which an adapter is not W x + alpha / rank * B A x with one alpha and rank.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    **dict.fromkeys(("layer_replication", "alora_invocation_tokens", "arrow_config", "kasa_config"), (None,)),
    "monteclora_config": (None,),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),  # others are beside a changed W
}
# Those that change nothing in what the tensors mean, whatever their value; tensors of other kinds are refused by name.
_UNREAD = (
    "r lora_alpha lora_dropout target_modules exclude_modules target_parameters layers_to_transform layers_pattern "
    "modules_to_save trainable_token_indices task_type inference_mode auto_mapping peft_version revision "
    "base_model_name_or_path megatron_config megatron_core loftq_config eva_config corda_config lora_ga_config "
    "velora_config runtime_config ensure_weight_tying qalora_group_size"
)


@dataclasses.dataclass(frozen=True)
class AdapterKind:
    """What files say of their adapters before any is read.

    Attributes:
        path: a PEFT directory, an archive, or a training checkpoint.
        rank, alpha: what is added to W x is alpha / rank * B A x.
        model: the ``model`` section of the job that wrote it; empty for PEFT's.
    """

    path: Path
    rank: int
    alpha: float
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def head(self) -> dict[str, Any]:
        """What an archive's config needs to say of the reward head that the files have."""
        names = ("reward_model_type", "regression", "use_avg_pool", "force_head_dtype", "reward_standardization")
        return {name: self.model[name] for name in names if self.model.get(name) is not None}

    def warn_of_other_base(self, base: Path) -> None:
        """Warn if the files say that the adapters were trained beside another archive than ``base``."""
        then = (self.model.get("peft") or {}).get(BASE_FINGERPRINT)
        if then is not None and then != (now := archive_identity(base)[:16]):
            warn_for_all_ranks(
                logger,
                "the adapters of %s were trained beside an archive with the fingerprint %s; that of %s is %s: is it "
                "the same model?",
                self.path,
                then,
                base,
                now,
            )

    def problem(self, lora: LoraSettings) -> str | None:
        """Why a job's adapters cannot begin with these; None: they can."""
        if (self.rank, self.alpha) == (lora.rank, lora.alpha):
            return None
        tuning = "model.peft.lora_tuning"
        return (
            f"{tuning}.adapter_dim={lora.rank}, alpha={lora.alpha:g}: {self.path} has adapters of rank {self.rank} and "
            f"alpha {self.alpha:g}; set {tuning}.adapter_dim={self.rank} and {tuning}.alpha={self.alpha:g}"
        )


def adapter_kind(path: Path) -> AdapterKind:
    """Read what kind of adapters there are at ``path``. Not collective.

    Raises:
        FileNotFoundError: there is nothing, or not all that belongs to it.
        ValueError: these are no adapters, or none that are supported.
    """
    path = present_name(path.expanduser())
    if (path / PEFT_CONFIG).is_file():
        return _peft_kind(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no adapter at {path}")
    if is_training_checkpoint(path):
        file = path.resolve().parents[1] / HYPERPARAMETERS_FILE
        if not file.is_file():
            raise FileNotFoundError(f"{file}, which describes the adapters of {path}, does not exist")
        model: Any = parse_yaml(file.read_text(encoding="utf-8"))["model"]
    else:
        model = load_nemo_config(path)
    lora = LoraSettings.from_config(model)
    if lora is None:
        raise ValueError(f"{path} holds a whole model, no adapters: it can be a base (restore_from_path)")
    return AdapterKind(path, lora.rank, lora.alpha, model)


def adapter_identity(path: Path) -> str:
    """SHA-256, in hex, of the contents of adapters in files. Not collective. For the errors see `adapter_kind`."""
    path = adapter_kind(path).path
    for content in (path / _PEFT_WEIGHTS, path / MANIFEST):
        if content.is_file():
            return str(describe_file(content)["sha256"])
    return archive_identity(path)


def _peft_kind(path: Path) -> AdapterKind:
    config = _peft_config(path)
    if odd := {key: config[key] for key, plain in _PLAIN.items() if key in config and config[key] not in plain}:
        shown = ", ".join(f"{key}={value!s:.40}" for key, value in odd.items())
        raise ValueError(f"{path}/{PEFT_CONFIG}: {shown} is not supported: merge it into its model with PEFT instead")
    if unknown := [key for key, value in config.items() if value and key not in (*_UNREAD.split(), *_PLAIN)]:
        warn_for_all_ranks(
            logger, "%s/%s: %s is not known here, and not heeded", path, PEFT_CONFIG, some_of(sorted(unknown))
        )
    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise ValueError(f"{path}/{PEFT_CONFIG}: r={rank!s:.40}: the rank should be a whole number above 0")
    if type(alpha) not in (int, float) or not 0 < alpha <= sys.float_info.max:
        raise ValueError(f"{path}/{PEFT_CONFIG}: lora_alpha={alpha!s:.40}: it should be a number above 0")
    return AdapterKind(path, rank, float(alpha))


def _peft_config(path: Path) -> dict[str, Any]:
    try:
        config = read_json(path / PEFT_CONFIG)
    except ValueError as error:
        raise ValueError(f"{path}/{PEFT_CONFIG} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}/{PEFT_CONFIG} is not PEFT's config of LoRA: it should be an object")
    return config


def read_adapter(kind: AdapterKind) -> dict[str, torch.Tensor]:
    """All tensors of the adapters, and of a reward head beside them, by their keys in checkpoints. Collective.

    Raises:
        DamagedCheckpointError: the files are not what was written.
        ValueError: of PEFT's: not a whole file, or what no adapter consists of.
    """
    if not kind.model:
        return _read_peft(kind)
    folder = WEIGHTS
    if is_training_checkpoint(kind.path):
        folder = STATE
        if problems := find_damage(kind.path):
            raise CheckpointMismatchError(f"{kind.path} is damaged: {'; '.join(problems)}")
    with open_source(kind.path) as source:
        if folder == WEIGHTS:
            require_undamaged(kind.path, source)
        shapes = stored_shapes(source, folder)
        tensors = {key: torch.empty(shapes[key]) for key in shapes if key.startswith((ADAPTER_PREFIX, HEAD_PREFIX))}
        if not any(key.startswith(ADAPTER_PREFIX) for key in tensors):
            raise CheckpointMismatchError(f"{kind.path} holds no adapters")
        parts = [Part(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor) for key, tensor in tensors.items()]
        load_sharded_tensors(parts, source, folder, ignored=("",))
    return tensors


def _read_peft(kind: AdapterKind) -> dict[str, torch.Tensor]:
    path = kind.path
    if (path / _PEFT_WEIGHTS).exists() and not (path / _PEFT_WEIGHTS).is_file():
        raise ValueError(f"{path / _PEFT_WEIGHTS} is no regular file")
    try:
        stored = load_file(path / _PEFT_WEIGHTS)
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} lacks {_PEFT_WEIGHTS}") from None
    except SafetensorError as error:
        raise ValueError(f"{path / _PEFT_WEIGHTS} is not a whole safetensors file: {error}; copy it again") from error
    tensors = {}
    for stored_name, tensor in stored.items():
        name = stored_name.removeprefix(_PEFT_PREFIX)
        if name.startswith(_SCORE):
            tensors[HEAD_PREFIX + name.removeprefix(_SCORE)] = tensor
        elif name.endswith((A_WEIGHT, B_WEIGHT)):
            tensors[ADAPTER_PREFIX + name] = tensor
        else:
            raise ValueError(
                f"{path / _PEFT_WEIGHTS} has {stored_name}, which is no adapter of a linear layer: merge it into its "
                "model with PEFT instead"
            )
    _require_whole(kind, tensors)
    return tensors


def _require_whole(kind: AdapterKind, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse what would load and add something else than was trained: halves of adapters, NaN, targets left out."""
    adapters = {key.removeprefix(ADAPTER_PREFIX): t for key, t in tensors.items() if key.startswith(ADAPTER_PREFIX)}
    layers = sorted({name.removesuffix(A_WEIGHT).removesuffix(B_WEIGHT) for name in adapters})
    config = _peft_config(kind.path)
    targets = config.get("target_modules")
    listed = targets if isinstance(targets, list) and not config.get("exclude_modules") else []  # else a pattern
    absent = [str(target) for target in listed if not any(f".{layer}".endswith(f".{target}") for layer in layers)]
    problems = {
        "lacks": [la + end for la in layers for end in (A_WEIGHT, B_WEIGHT) if la + end not in adapters] + absent,
        "has NaN, Inf or integers in": [
            name for name, t in adapters.items() if not (t.is_floating_point() and t.float().isfinite().all())
        ],
        f"has another rank than r={kind.rank} in": [
            name for name, t in adapters.items() if kind.rank not in t.shape[1 if name.endswith(B_WEIGHT) else 0 :][:1]
        ],
    }
    for problem, names in problems.items():
        if names:
            raise ValueError(f"{kind.path / _PEFT_WEIGHTS} {problem} {some_of(names)}: write or copy it again")
    if not layers:
        raise ValueError(f"{kind.path / _PEFT_WEIGHTS} holds no adapters")


def _require_all_layers(kind: AdapterKind, tensors: Mapping[str, torch.Tensor], num_layers: int) -> None:
    """Refuse PEFT's files that have lost layers: what has an adapter in one has it in each that the config names."""
    config = _peft_config(kind.path)
    chosen, targets = config.get("layers_to_transform"), config.get("target_modules")
    layers = range(num_layers) if chosen in (None, []) else chosen if isinstance(chosen, list) else [chosen]
    present = {key.removeprefix(ADAPTER_PREFIX) for key in tensors if key.startswith(ADAPTER_PREFIX)}
    expected = {_LAYER.sub(f".layers.{layer}.", name) for name in present for layer in layers}
    if isinstance(targets, list) and not config.get("exclude_modules"):  # may name modules of one layer
        ends = tuple(f".{target}{end}" for target in targets for end in (A_WEIGHT, B_WEIGHT))
        expected = {name for name in expected if f".{name}".endswith(ends)}
    if lost := sorted(expected - present):
        raise ValueError(
            f"{kind.path / _PEFT_WEIGHTS} lacks {some_of(lost)}: write or copy it again. If these layers never had "
            f"adapters, {PEFT_CONFIG} should say so: layers_to_transform, and target_modules as a list"
        )


def load_adapter(kind: AdapterKind, model: MegatronModel) -> None:
    """Fill a model's adapters, and its reward head if the files have one. Collective.

    A matrix whose adapter is not in PEFT's files has one that adds nothing.

    Raises:
        CheckpointMismatchError: there are adapters for which the model has no place, or of other shapes.

    For other errors see `read_adapter`.
    """
    tensors = read_adapter(kind)
    parts = [part for _, parts in model.trained_parts() for part in parts]
    shapes = _everywhere({part.key: part.shape for part in parts})
    if not model.has_reward_head and any(key.startswith(HEAD_PREFIX) for key in tensors):
        raise CheckpointMismatchError(f"{kind.path} has a reward head, for which a language model has no place")
    if unknown := sorted(key for key in tensors if key.startswith(ADAPTER_PREFIX) and key not in shapes):
        names = some_of([name.removeprefix(ADAPTER_PREFIX) for name in unknown])
        raise CheckpointMismatchError(
            f"{kind.path} has {names}, for which this job has no adapter: add what they belong to to "
            "model.peft.lora_tuning.target_modules (docs/lora.md), or choose the right base model"
        )
    if not kind.model:
        _require_all_layers(kind, tensors, model.architecture.num_layers)
    for key, tensor in tensors.items():
        if key in shapes and tuple(tensor.shape) != shapes[key]:
            raise CheckpointMismatchError(
                f"{kind.path}: {key.removeprefix(ADAPTER_PREFIX)} has shape {list(tensor.shape)}, the model needs "
                f"{list(shapes[key])}: it is another model's"
            )
    with torch.no_grad():
        fill([part for part in parts if part.key in tensors], lambda part: tensors[part.key])
        for part in parts:
            if part.key.startswith(ADAPTER_PREFIX) and part.key.endswith(B_WEIGHT) and part.key not in tensors:
                part.data.zero_()


def _everywhere(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The entries of all ranks."""
    gathered: list[dict[str, tuple[int, ...]]] = [{} for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, shapes)
    return dict(itertools.chain.from_iterable(one.items() for one in gathered))


def write_peft(
    directory: Path, kind: AdapterKind, tensors: Mapping[str, torch.Tensor], base_name: str | None = None
) -> None:
    """Write adapters as a directory that ``peft.PeftModel.from_pretrained`` loads. Not collective.

    Args:
        directory: is made; must not exist, or be empty.
        kind: of the adapters.
        tensors: as `read_adapter` gives them.
        base_name: where PEFT finds the base model; None: it is not said.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in _peft_names(tensors)}, directory / _PEFT_WEIGHTS)
    has_head = any(key.startswith(HEAD_PREFIX) for key in tensors)
    keys = [key for key in tensors if key.startswith(ADAPTER_PREFIX)]
    config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_head else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": kind.rank,
        "lora_alpha": kind.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({key.rsplit(".", 3)[-3] for key in keys}),
        "layers_to_transform": _layers(keys),
        "modules_to_save": ["score"] if has_head else None,
    }
    (directory / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _peft_names(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, tensor in tensors.items():
        if key.startswith(ADAPTER_PREFIX):
            yield _PEFT_PREFIX + key.removeprefix(ADAPTER_PREFIX), tensor
        elif key == HEAD_PREFIX + "weight":  # Hugging Face's classifiers have no bias
            yield f"{_PEFT_PREFIX}{_SCORE}weight", tensor


def _layers(keys: Sequence[str]) -> list[int]:
    """The numbers of the layers, from 0 on, that have adapters."""
    return sorted({int(found[1]) for key in keys if (found := _LAYER.search(key))})
