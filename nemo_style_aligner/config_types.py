"""Types of config values: a value has the type of its default, or one that `TYPES` names.

`TYPES` is for keys whose default is null, which says nothing about the type, and for keys that take several types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.rope import RopeScaling

Types = tuple[type, ...]

_NAMES: dict[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a section",
}

TYPES: tuple[tuple[str, Types], ...] = (
    ("trainer.precision", (str, int)),
    ("*.inference_micro_batch_size", (int, list)),
    ("trainer.ppo.val_check_interval", (int,)),
    ("trainer.ppo.save_interval", (int,)),
    ("trainer.*.val_check_interval", (int, float)),
    ("trainer.*.save_interval", (int, float)),
    ("trainer.*.limit_val_batches", (int, float)),
    ("*_minutes", (float,)),
    ("*_seconds", (float,)),
    ("model.regression.loss_mask_val", (float,)),
    ("trainer.ppo.loss_constant_length", (int,)),
    ("trainer.ppo.dual_clip", (float,)),
    ("trainer.ppo.rewards", (list,)),
    ("trainer.ppo.reward_functions.seconds", (float,)),
    ("trainer.ppo.reward_functions.threads", (int,)),
    ("trainer.ppo.normalize_advantages", (bool,)),
    ("trainer.ppo.kl_estimator", (str,)),
    ("trainer.ppo.kl_clamp", (float,)),
    ("*max_tokens_per_micro_batch", (int,)),
    ("trainer.ppo.importance_weight_cap", (float,)),
    ("trainer.ppo.importance_sequence_bounds", (list,)),
    ("trainer.ppo.generation.num_slots", (int,)),
    ("trainer.ppo.generation.tensor_parallel_size", (int,)),
    ("trainer.ppo.generation.kv_cache_tokens", (int,)),
    ("trainer.ppo.generation.prefill_chunk_tokens", (int,)),
    ("trainer.ppo.trt_llm.sidecar_python", (str,)),
    ("*.strip_sequence_length_to_multiple", (int,)),
    ("remote_critic_rm.pad_to_length", (int,)),
    ("*.host", (str,)),
    ("*.restore_from_path", (str,)),
    ("rm_model_file", (str,)),
    ("exp_manager.explicit_log_dir", (str,)),
    ("exp_manager.exp_dir", (str,)),
    ("exp_manager.resume_from_checkpoint", (str,)),
    ("model.activations_checkpoint_granularity", (str,)),
    ("model.activations_checkpoint_method", (str,)),
    ("model.activations_checkpoint_num_layers", (int,)),
    ("model.use_avg_pool", (bool,)),
    ("model.force_head_dtype", (str, int)),
    ("model.optim.sched.max_steps", (int,)),
    ("model.add_qkv_bias", (bool,)),
    ("model.rope_scaling", (dict, bool)),
    ("model.rope_scaling_factor", (float,)),
    ("model.make_vocab_size_divisible_by", (int,)),
    ("model.reward_model_type", (str,)),
    ("model.regression.num_attributes", (int,)),
    ("model.regression.attribute_weights", (list,)),
    ("model.reward_standardization.mean", (float,)),
    ("model.reward_standardization.std", (float,)),
    ("model.data*.add_bos", (bool,)),
    ("model.ppo.ratio_eps_high", (float,)),
    ("model.ppo.sampling_params.add_BOS", (bool,)),
    ("model.data.data_prefix", (dict, list, str)),
    ("model.data.data_prefix.*", (list, str, dict)),
    ("model.data.*.file_path", (str, list, dict)),
    ("exp_manager.wandb_logger_kwargs.*", (bool, int, float, str, list, dict)),
)

_NUMBERS = (
    "model.optim.betas",
    "model.regression.attribute_weights",
    "trainer.ppo.importance_sequence_bounds",
)  # lists of which every element is one

_LARGEST = 2**63 - 1
_LENGTH = "model.encoder_seq_length"

NULLABLE: tuple[str, ...] = (
    "exp_manager.explicit_log_dir",
    "exp_manager.watchdog_minutes",
    "exp_manager.wandb_logger_kwargs.*",
    "exp_manager.checkpoint_callback_params.monitor",
    "trainer.*.save_interval",
    "trainer.*.val_check_interval",
    "trainer.*.gradient_clip_val",
    "trainer.ppo.generation.num_slots",
    "model.optim.sched",
    "model.optim.sched.*",
    "model.data.*.truncation_field",
    "model.ppo.sampling_params.end_strings",
)
"""Keys whose default is not null, but that may be null. So may the keys directly below ``model``, where null means the
checkpoint's value, but for `OF_THE_JOB`."""

OF_THE_JOB: tuple[str, ...] = (
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.seed",
    "model.answer_only_loss",
    "model.rm_placement",
    "model.keep_activations",
)
"""Keys directly below ``model`` for which a checkpoint's value has no meaning."""

_EVERY_SCALING: dict[str, Any] = {"seq_len_interpolation_factor": 2.0, "rope_scaling": {}}
ARCHITECTURE_KEYS: Mapping[str, Any] = (
    _EVERY_SCALING
    | ModelArchitecture(
        num_layers=1,
        hidden_size=2,
        ffn_hidden_size=1,
        num_attention_heads=1,
        num_query_groups=1,
        vocab_size=1,
        rope_scaling=RopeScaling("llama3", 2.0, 2, 0.5, 2.0),
        no_rope_layers=(0,),
        softmax_scale=2.0,
        embedding_multiplier=2.0,
        residual_multiplier=2.0,
        logits_scaling=2.0,
    ).to_nemo_config()
)
"""The keys of ``model`` that describe an architecture, each with an example value: the YAML files have no defaults."""


def wrong_types(cfg: DictConfig, defaults: DictConfig) -> list[str]:
    """One line for each value whose type is not its key's, or that cannot be computed.

    Null is accepted for keys whose default is null and for those in `NULLABLE`. A whole number is accepted as a float.
    A float that is a whole number (``1e3``), given for a whole number, becomes one in ``cfg``; a number that is given
    for text becomes text.
    """
    problems = []
    for key, value in list(values(cfg)):
        if isinstance(value, OmegaConfBaseException):
            if not isinstance(value, InterpolationToMissingValueError):  # else the value it refers to is reported
                problems.append(not_computed(key, value))
            continue
        if value is None:
            default = _default(key, defaults)
            if default is not None and not _is_nullable(key, default, defaults):
                problems.append(f"{key}=null: this key needs a value; its default is {default}")
            continue
        wanted = _types(key, defaults)
        if int in wanted and isinstance(value, int | float) and abs(value) > _LARGEST:
            problems.append(f"{key}={value}: too large; numbers here are below 2^63")
            continue
        if isinstance(value, float) and int in wanted and float not in wanted and value.is_integer():
            OmegaConf.update(cfg, key, int(value))
            continue
        if wanted == (str,) and isinstance(value, int | float) and not isinstance(value, bool):
            OmegaConf.update(cfg, key, str(value))
            continue
        if key in _NUMBERS and isinstance(value, list) and not all(_fits(element, float) for element in value):
            problems.append(f"{key}={value}: must be a list of numbers")
            continue
        if not wanted or any(_fits(value, kind) for kind in wanted):
            continue
        names = " or ".join(_NAMES[kind] for kind in wanted)
        problem = f"{key}={value!r}: must be {names}, this is {_NAMES.get(type(value), type(value).__name__)}"
        section, _, name = key.rpartition(".")
        if isinstance(value, str) and OmegaConf.is_interpolation(OmegaConf.select(cfg, section), name):
            problem += "; of a variable of the environment write $NAME, in a file ${oc.decode:${oc.env:NAME}}"
        problems.append(problem)
    return problems


def not_computed(key: str, error: OmegaConfBaseException) -> str:
    """The line for a value that `values` could not resolve."""
    return f"{key}: cannot be computed from the values it refers to: {str(error).splitlines()[0]}"


def _types(key: str, defaults: DictConfig) -> Types:
    for pattern, types in TYPES:
        if fnmatchcase(key, pattern):
            return types
    default = _default(key, defaults)
    section, _, name = key.partition(".")
    if default is None and section == "model":
        default = ARCHITECTURE_KEYS.get(name)
    if isinstance(default, DictConfig):
        return (dict,)
    if isinstance(default, ListConfig):
        return (list,)
    return () if default is None else (type(default),)


def _default(key: str, defaults: DictConfig) -> Any:
    try:
        return OmegaConf.select(defaults, key, throw_on_missing=False)
    except OmegaConfBaseException:  # it refers to a key without a value
        return None


def _is_nullable(key: str, default: Any, defaults: DictConfig) -> bool:
    if key == _LENGTH and f"${{{_LENGTH}}}" in OmegaConf.to_yaml(defaults):
        return False  # other lengths are computed from it
    if key in OF_THE_JOB:
        return False
    section, _, name = key.partition(".")
    is_models_own = section == "model" and "." not in name and not isinstance(default, DictConfig)
    return is_models_own or any(fnmatchcase(key, pattern) for pattern in NULLABLE)


def _fits(value: Any, kind: type) -> bool:
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float)
    if kind is str:
        return isinstance(value, str | int | float)
    return isinstance(value, kind)


def values(cfg: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is not missing, with its dotted key; lists and empty sections are values, other sections not.

    In place of a value that cannot be resolved stands the `OmegaConfBaseException` that says why.
    """
    for name in map(str, cfg):
        if OmegaConf.is_missing(cfg, name):
            continue
        key = f"{prefix}{name}"
        try:
            value = cfg[name]
            if isinstance(value, ListConfig) or (isinstance(value, DictConfig) and not len(value)):
                value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            yield key, error
            continue
        if isinstance(value, DictConfig):
            yield from values(value, f"{key}.")
        else:
            yield key, value
