"""Configs: where they are, which keys they know, and what becomes of keys that only NeMo needs.

Defaults live in ``conf/<job>.yaml``, each key with its comment. A user's key must be known: it is in that
file, it describes a model's architecture, or it is in `LEGACY_KEYS`. Everything else is an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.config_types import wrong_types

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
"""The repository's ``conf/``: one YAML file per job."""


SECRET_KEYS = ("token",)
"""Last parts of the keys whose values are nobody else's business."""


class ConfigError(ValueError):
    """A mistake in a job's config; the message names the key and what to do."""


@dataclasses.dataclass(frozen=True)
class LegacyKey:
    """A key of NeMo or NeMo-Aligner that a job accepts, though it is not in its YAML.

    Attributes:
        pattern: dotted key, with ``*`` for any text.
        note: what it means here, in one line.
        moved_to: the key that takes its value; ``None`` when it has no effect.
        allowed: values under which the note is true; any other value is an error. Empty: all.
    """

    pattern: str
    note: str
    moved_to: str | None = None
    allowed: tuple[Any, ...] = ()


_NONE = (None, "none", "null")

LEGACY_KEYS: tuple[LegacyKey, ...] = (
    # Moved
    LegacyKey("trainer.trt_llm.*", "is trainer.ppo.trt_llm.*", moved_to="trainer.ppo.trt_llm.*"),
    LegacyKey("model.ppo.trt_llm.*", "is trainer.ppo.trt_llm.*", moved_to="trainer.ppo.trt_llm.*"),
    LegacyKey("model.ppo.trt_llm", "is trainer.ppo.trt_llm"),
    LegacyKey("trainer.flask_server.enable", "is batch_iterator.use_flask", "trainer.ppo.batch_iterator.use_flask"),
    LegacyKey("trainer.flask_server.port", "is batch_iterator.port", "trainer.ppo.batch_iterator.port"),
    LegacyKey("trainer.ppo.flask_server.enable", "is batch_iterator.use_flask", "trainer.ppo.batch_iterator.use_flask"),
    LegacyKey("trainer.ppo.flask_server.port", "is batch_iterator.port", "trainer.ppo.batch_iterator.port"),
    LegacyKey(
        "model.ppo.combine_rm_and_critic_server",
        "is remote_critic_rm.combine_rm_and_critic_server",
        moved_to="remote_critic_rm.combine_rm_and_critic_server",
    ),
    LegacyKey("trainer.max_time", "is exp_manager.max_time_per_run", moved_to="exp_manager.max_time_per_run"),
    LegacyKey("trainer.max_steps", "is max_steps of the job's own section", moved_to="trainer.{section}.max_steps"),
    LegacyKey("trainer.max_epochs", "is max_epochs of the job's own section", moved_to="trainer.{section}.max_epochs"),
    LegacyKey(
        "model.resume_from_checkpoint", "is exp_manager.resume_from_checkpoint", "exp_manager.resume_from_checkpoint"
    ),
    LegacyKey(
        "model.save_nemo_on_validation_end",
        "is exp_manager.checkpoint_callback_params.always_save_nemo",
        moved_to="exp_manager.checkpoint_callback_params.always_save_nemo",
    ),
    # Lightning
    LegacyKey("trainer.accelerator", "has no effect: GPUs are used where there are any, otherwise CPUs"),
    LegacyKey("trainer.logger", "has no effect: exp_manager decides what is logged"),
    LegacyKey("trainer.enable_checkpointing", "has no effect: save_interval of the job's own section decides"),
    LegacyKey(
        "exp_manager.create_checkpoint_callback",
        "set save_interval=0 in the job's own section to save no checkpoints",
        allowed=(True,),
    ),
    LegacyKey("trainer.use_distributed_sampler", "has no effect: samplers know of all ranks"),
    LegacyKey("trainer.ppo.model_?bs", "has no effect: model.micro_batch_size and model.global_batch_size are read"),
    LegacyKey("trainer.ppo.trt_model_dir", "has no effect: engines are built in memory"),
    LegacyKey(
        "exp_manager.checkpoint_callback_params.model_parallel_size", "has no effect: read from the model section"
    ),
    LegacyKey("exp_manager.create_tensorboard_logger", "has no effect: TensorBoard files are always written"),
    # The loops
    LegacyKey("trainer.*.limit_train_batches", "not supported, see max_steps", allowed=(1.0, *_NONE)),
    LegacyKey("trainer.ppo.rollout_batch_seq_length", "has no effect: batches are padded to their longest sequence"),
    LegacyKey("model.ppo.val_rollout_micro_batch_size", "has no effect: see trainer.ppo.generation.num_slots"),
    LegacyKey("model.offload_adam_states", "has no effect: the optimizer's states stay on their device"),
    LegacyKey("model.ppo.offload_adam_states", "has no effect: the optimizer's states stay on their device"),
    # The model's build
    LegacyKey("model.mcore_gpt", "has no effect: every model is Megatron-Core's"),
    LegacyKey("model.megatron_amp_O2", "has no effect: bf16 training always keeps fp32 main weights in the optimizer"),
    LegacyKey("model.transformer_engine", "has no effect: Transformer Engine is used where it is installed"),
    LegacyKey("model.use_flash_attention", "has no effect: the fastest attention there is gets used"),
    LegacyKey("model.gradient_as_bucket_view", "has no effect: gradients are always views of Megatron-Core's buckets"),
    LegacyKey("model.sync_batch_comm", "has no effect: pipeline stages need no synchronisation after sends"),
    LegacyKey("model.batch_p2p_comm", "has no effect"),
    LegacyKey("model.*_fusion", "has no effect: fused kernels are used where they are available"),
    LegacyKey("model.ub_tp_comm_overlap*", "has no effect: communication of tensor parallelism is not overlapped"),
    LegacyKey("model.use_tp_pp_dp_mapping", "ranks are ordered TP, DP, PP", allowed=(False,)),
    LegacyKey("model.virtual_pipeline_model_parallel_size", "not supported", allowed=(*_NONE, 1)),
    LegacyKey("model.context_parallel_size", "not supported", allowed=(*_NONE, 1)),
    LegacyKey("model.expert_model_parallel_size", "not supported", allowed=(*_NONE, 1)),
    LegacyKey("model.fp8*", "not supported", allowed=(*_NONE, False)),
    LegacyKey("model.seq_len_interpolation_factor", "not supported", allowed=_NONE),
    LegacyKey("model.activations_checkpoint_layers_per_pipeline", "not supported", allowed=_NONE),
    LegacyKey("model.ffn_dropout", "not supported", allowed=(*_NONE, 0)),
    LegacyKey("model.dist_ckpt_format", "has no effect: checkpoints are Megatron-Core's torch_dist"),
    LegacyKey("model.dist_ckpt_*", "has no effect: checkpoints are Megatron-Core's torch_dist"),
    LegacyKey("model.output_sequence", "has no effect: a critic gives a value per token, a reward model one reward"),
    LegacyKey("model.steerlm2.*", "has no effect: SteerLM 2 is not part of this project"),
    LegacyKey("model.regression.loss_func", "only the mean squared error is supported", allowed=("regression",)),
    LegacyKey("model.regression.load_rm_head_weights", "has no effect: a head in the checkpoint is always loaded"),
    LegacyKey("model.peft.peft_scheme", "only full fine-tuning is supported", allowed=_NONE),
    LegacyKey("model.peft.*", "has no effect without a peft_scheme"),
    LegacyKey("model.overwrite_base_config.*", "has no effect: the data section of a checkpoint is never read"),
    LegacyKey(
        "model.ppo.sampling_params.all_probs", "has no effect: log-probs of the chosen tokens are always returned"
    ),
    LegacyKey("model.ppo.sampling_params.compute_logprob", "has no effect: log-probs are always returned"),
    # In a job that only serves a model
    LegacyKey("model.activations_checkpoint_*", "has no effect: nothing is trained in this job"),
    LegacyKey("model.global_batch_size", "has no effect: nothing is trained in this job"),
    LegacyKey("model.micro_batch_size", "has no effect: see forward_micro_batch_size"),
    # The optimizer
    LegacyKey("model.optim.bucket_cap_mb", "has no effect: Megatron-Core sizes the buckets"),
    LegacyKey("model.optim.contiguous_*", "has no effect: gradient buffers are always contiguous"),
    LegacyKey("model.optim.grad_sync_dtype", "has no effect: gradients are reduced in fp32"),
    LegacyKey("model.optim.overlap_param_sync", "not supported", allowed=(*_NONE, False)),
    # Data
    LegacyKey("model.data.data_impl", "only JSONL files are read", allowed=("jsonl", "json")),
    LegacyKey("model.data.splits_string", "data_prefix names the files of each split", allowed=_NONE),
    LegacyKey(
        "model.data.*drop_last", "has no effect: training leaves out a last incomplete batch, validation does not"
    ),
    LegacyKey("model.data.*num_workers", "has no effect: data are read by the job's own processes"),
    LegacyKey("model.data.skip_warmup", "has no effect"),
    LegacyKey("model.data.reset_position_ids", "not supported", allowed=(False,)),
    LegacyKey("model.data.reset_attention_mask", "not supported", allowed=(False,)),
    LegacyKey("model.data.eod_mask_loss", "not supported", allowed=(False,)),
    LegacyKey("model.data.*index_mapping_dir", "has no effect: no index files are written"),
    LegacyKey("model.data.*memmap_workers", "has no effect: no index files are written"),
    LegacyKey("model.data.*hf_dataset", "has no effect: JSONL files are read in either case"),
    LegacyKey("model.data.sample", "has no effect: data are repeated as often as max_steps needs"),
    LegacyKey("model.data.*output_original_text", "has no effect"),
    LegacyKey("model.data.*concat_sampling_probabilities", "not supported: put the files together", allowed=_NONE),
)

# Keys of `model` that come with a checkpoint's own config, so that the YAML files leave them out.
_MODEL_KEYS = frozenset(
    ModelArchitecture(
        num_layers=1,
        hidden_size=1,
        ffn_hidden_size=1,
        num_attention_heads=1,
        num_query_groups=1,
        vocab_size=1,
        rope_scaling_factor=1.0,
    ).to_nemo_config()
) | {"encoder_seq_length", "max_position_embeddings", "make_vocab_size_divisible_by", "precision"}

# Sections in which the user chooses the keys.
_OPEN_SECTIONS = ("exp_manager.wandb_logger_kwargs", "model.data.data_prefix", "model.data.chat_prompt_tokens")


_QUIET_HYDRA = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")
_FLAGS_WITH_VALUE = (
    *("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd"),
    *("--package", "-p", "--cfg", "-c", "--info", "-i"),
)


# ---- before hydra -------------------------------------------------------------------------------


def register_resolvers() -> None:
    """Make NeMo-Aligner's resolvers available: ``${multiply:a,b}``, ``${int_div:a,b}``, ``${subtract:a,b}``."""
    OmegaConf.register_new_resolver("multiply", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("int_div", lambda a, b: a // b, replace=True)
    OmegaConf.register_new_resolver("subtract", lambda a, b: a - b, replace=True)


def prepare_overrides(arguments: Sequence[str]) -> list[str]:
    """The command line as hydra shall see it.

    ``key=value`` becomes ``++key=value``, so that hydra takes keys that are not in the YAML file:
    `check_config` knows more about them. And hydra is told to write no files and leave the logging alone.
    """
    prepared: list[str] = []
    first_override: int | None = None
    takes_value = False  # the argument before was a flag like --config-name, which is followed by its value
    for argument in arguments:
        is_override = not takes_value and not argument.startswith("-")
        if is_override and first_override is None:
            first_override = len(prepared)
        is_plain = is_override and "=" in argument and re.match(r"(?!hydra[./])[A-Za-z_]", argument)
        prepared.append(f"++{argument}" if is_plain else argument)
        takes_value = argument in _FLAGS_WITH_VALUE
    # Overrides must stand together, hydra's parser says.
    at = len(prepared) if first_override is None else first_override
    return [*prepared[:at], *_QUIET_HYDRA, *prepared[at:]]


def load_defaults(job: str) -> DictConfig:
    """The YAML file of a job, with interpolations left in place.

    Raises:
        ConfigError: there is no such file.
    """
    register_resolvers()
    path = CONF_DIR / f"{job}.yaml"
    if not path.exists():
        raise ConfigError(f"{path} does not exist: run from a checkout of the repository (pip install -e .)")
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    return config


def complete_config(cfg: DictConfig, job: str) -> DictConfig:
    """Lay ``cfg`` over the job's defaults: a config file of the user's own may leave keys out."""
    OmegaConf.set_struct(cfg, False)
    complete = OmegaConf.merge(load_defaults(job), cfg)
    assert isinstance(complete, DictConfig)
    return complete


# ---- checking -----------------------------------------------------------------------------------


def check_config(cfg: DictConfig, job: str) -> list[str]:
    """Check every key a user has added to the job's YAML, and move those that have another name here.

    Args:
        cfg: the composed config; changed in place.
        job: name of the YAML file, without its ending.

    Returns:
        One line for each key that has no effect or another name here, to be logged.

    Raises:
        ConfigError: unknown keys (each with its nearest known ones), values that are not supported or of
            another type, values that are missing; all of them.
    """
    defaults = load_defaults(job)
    known = set(_leaves(defaults))
    notes: list[str] = []
    unknown: list[str] = []
    problems: list[str] = []
    for key in list(_leaves(cfg)):
        if _is_known(key, known):
            continue
        legacy = _find_legacy(key)
        if legacy is None:
            unknown.append(key)
            continue
        try:
            notes.append(_apply_legacy(cfg, defaults, key, legacy))
        except ConfigError as error:
            problems.append(str(error))
    if unknown:
        problems.append(_describe_unknown(unknown, known, job))
    missing = sorted(_missing(cfg))
    if missing:
        problems.append("these keys need a value: " + ", ".join(missing))
    problems += wrong_types(cfg, defaults)
    if problems:
        raise ConfigError("\n".join(problems))
    return [note for note in notes if note]


def log_directory(exp_manager: DictConfig) -> Path:
    """Where a job writes: ``explicit_log_dir``, else ``<exp_dir>/<name>``, else ``nemo_experiments/<name>``."""
    if exp_manager.explicit_log_dir:
        return Path(exp_manager.explicit_log_dir)
    return Path(exp_manager.exp_dir or "nemo_experiments") / exp_manager.name


def _missing(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys that still have to be given (``???``); unlike omegaconf's own it computes no values."""
    for name in map(str, config):
        if OmegaConf.is_missing(config, name):
            yield f"{prefix}{name}"
        elif not OmegaConf.is_interpolation(config, name) and isinstance(config[name], DictConfig):
            yield from _missing(config[name], f"{prefix}{name}.")


def _leaves(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys of all values. Interpolations to sections, empty and missing sections count as values."""
    for name in map(str, config):
        key = f"{prefix}{name}"
        if OmegaConf.is_missing(config, name) or OmegaConf.is_interpolation(config, name):
            yield key
            continue
        value = config[name]
        if isinstance(value, DictConfig) and len(value):
            yield from _leaves(value, f"{key}.")
        else:
            yield key


def _is_known(key: str, known: set[str]) -> bool:
    if key in known or any(key.startswith(f"{section}.") for section in _OPEN_SECTIONS):
        return True
    section, _, name = key.partition(".")
    if section == "model" and name in _MODEL_KEYS:
        return True
    return any(other.startswith(f"{key}.") for other in known)  # `section={}` or `section=null`


def _find_legacy(key: str) -> LegacyKey | None:
    return next((legacy for legacy in LEGACY_KEYS if fnmatchcase(key, legacy.pattern)), None)


def _apply_legacy(cfg: DictConfig, defaults: DictConfig, key: str, legacy: LegacyKey) -> str:
    value = OmegaConf.select(cfg, key)
    if legacy.allowed and value not in legacy.allowed:
        raise ConfigError(f"{key}={value}: {legacy.note}; leave the key out")
    if legacy.allowed:
        return ""  # the key says what is so in any case
    if legacy.moved_to is None:
        return f"{key}={value}: {legacy.note}"
    target = legacy.moved_to.replace("*", key.rsplit(".", 1)[-1])
    target = target.replace("{section}", _job_section(defaults))
    default = OmegaConf.select(defaults, target, default=_ABSENT)
    if value is None:
        return ""
    if default is _ABSENT:
        raise ConfigError(f"{key} is {target} here, which this job does not have: leave the key out")
    present = OmegaConf.select(cfg, target)
    if value != present:
        if present != default:
            raise ConfigError(f"{key}={value} and {target}={present} name the same setting: give one of them")
        OmegaConf.update(cfg, target, value)
    return f"{key}={value} is taken as {target}={value}"


_ABSENT = object()


def _job_section(defaults: DictConfig) -> str:
    """The name of the job's own section in ``trainer`` (sft, rm or ppo)."""
    return next((name for name in ("sft", "rm", "ppo") if name in defaults.trainer), "ppo")


def without_secrets(cfg: DictConfig) -> DictConfig:
    """A copy, interpolations resolved, in which no secret can be read: for logs."""
    copy = cfg.copy()
    OmegaConf.resolve(copy)
    OmegaConf.set_struct(copy, False)
    for key in _leaves(copy):
        if key.rsplit(".", 1)[-1] in SECRET_KEYS and str(OmegaConf.select(copy, key)).lower() not in ("auto", "none"):
            OmegaConf.update(copy, key, "(secret)")
    return copy


def _describe_unknown(unknown: Sequence[str], known: set[str], job: str) -> str:
    lines = [f"conf/{job}.yaml has no such key{'s' if len(unknown) > 1 else ''}:"]
    candidates = sorted(known | {f"model.{name}" for name in _MODEL_KEYS})
    for key in unknown:
        nearest = _nearest(key, candidates)
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        lines.append(f"  {key}{hint}")
    lines.append(f"The keys this job knows are in {CONF_DIR / (job + '.yaml')}, each with a comment.")
    return "\n".join(lines)


def _nearest(key: str, candidates: Sequence[str]) -> list[str]:
    """Known keys of the same last name elsewhere, then those spelt alike."""
    last = key.rsplit(".", 1)[-1]
    same_name = [candidate for candidate in candidates if candidate.rsplit(".", 1)[-1] == last]
    alike = difflib.get_close_matches(key, candidates, n=2, cutoff=0.75)
    return list(dict.fromkeys([*alike, *same_name]))[:3]
