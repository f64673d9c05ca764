"""Configs: where they are, which keys they know, and what becomes of keys that only NeMo needs.

Defaults live in ``conf/<job>.yaml``, each key with its comment. A user's key must be known: it is in the `schema`, or
one of NeMo's that `foreign_keys` lists. Everything else is an error.
"""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_style_aligner.guard.masking import masked
from nemo_style_aligner.places import CONFIGS
from nemo_style_aligner.trainer.config.fields import find_field, value_problems
from nemo_style_aligner.trainer.config.foreign_keys import ConfigError, find_foreign, take_foreign
from nemo_style_aligner.trainer.config.job_config import plain_config
from nemo_style_aligner.trainer.config.schema import ExpManager, fields_of_job
from nemo_style_aligner.trainer.config.section_names import given, names_of

WITHOUT_EXP_MANAGER = {"create_checkpoint_callback": False, "create_wandb_logger": False}
"""What NeMo's ``exp_manager=null`` means here: keys of that section."""


def register_resolvers() -> None:
    """Make NeMo-Aligner's resolvers available: ``${multiply:a,b}``, ``${int_div:a,b}``, ``${subtract:a,b}``.

    And ``${by_index:i,[a,b]}``, element i, or the last one if there are fewer; the first one if i is no number from 0
    on, which is reported separately.
    """
    OmegaConf.register_new_resolver("multiply", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("int_div", lambda a, b: a // b, replace=True)
    OmegaConf.register_new_resolver("subtract", lambda a, b: a - b, replace=True)
    OmegaConf.register_new_resolver("by_index", _by_index, replace=True)


def _by_index(index: Any, values: Sequence[Any]) -> Any:
    is_index = isinstance(index, int) and index >= 0
    return values[min(index, len(values) - 1)] if is_index else values[0]


def config_file(job: str) -> Path:
    """The YAML file of a job.

    Raises:
        ConfigError: there is no such file.
    """
    path = CONFIGS / f"{job}.yaml"
    if not path.exists():
        raise ConfigError(f"{path} does not exist: the installation is incomplete, install the package again")
    return path


def load_defaults(job: str) -> DictConfig:
    """The contents of the YAML file of a job, with interpolations left in place, and the package's section names.

    Raises:
        ConfigError: there is no such file.
    """
    register_resolvers()
    return copy.deepcopy(_defaults(job))


@functools.cache  # reading YAML takes five times as long as a copy, and every check wants the defaults
def _defaults(job: str) -> DictConfig:
    config = OmegaConf.load(config_file(job))
    assert isinstance(config, DictConfig)
    return names_of(job).read(config)


def required_keys(job: str) -> list[str]:
    """The dotted keys of a job that a user has to give."""
    return [key for key, field in fields_of_job(job).items() if field.must_be_given]


_ARCHIVES = ("pretrained_checkpoint.restore_from_path", "model.restore_from_path", "rm_model_file")
_DATA = ("model.data.data_prefix", "model.data.train_ds.file_path", "data.data.file_path")


def archive_key(job: str) -> str:
    """The key that names the model that a job starts from, or serves."""
    return next(key for key in _ARCHIVES if key in fields_of_job(job))


def data_key(job: str) -> str | None:
    """The key that names a job's data; None if it reads none."""
    return next((key for key in _DATA if key in fields_of_job(job)), None)


def complete_config(cfg: DictConfig, job: str) -> DictConfig:
    """Lay ``cfg`` over the job's defaults: a config file of the user's own may leave keys out.

    From here on the sections have the package's names (`section_names`).

    Raises:
        ConfigError: a section has another job's name.
    """
    names = names_of(job)
    for name, own in names.own.items():
        if foreign := [key for key in _leaves(cfg) if f"{key}.".startswith(f"{name}.")]:
            raise ConfigError(f"{', '.join(foreign)}: this section of conf/{job}.yaml is {own}, so write {own}.KEY")
    OmegaConf.set_struct(cfg, False)
    if cfg.get("exp_manager", "") is None:  # in a file, what it means on the command line
        cfg.exp_manager = dict(WITHOUT_EXP_MANAGER)
    complete = OmegaConf.merge(load_defaults(job), names.read(cfg))
    assert isinstance(complete, DictConfig)
    return complete


def check_config(cfg: DictConfig, job: str) -> list[str]:
    """Check every key that a user has given, and move those that have another name here.

    Args:
        cfg: the composed config; changed in place.
        job: name of the YAML file, without its ending.

    Returns:
        One line for each key that has no effect or another name here, to be logged.

    Raises:
        ConfigError: unknown keys (each with its nearest known ones), values that are not supported, of another type
            or out of range, values that are missing: all in one message.
    """
    defaults, fields = load_defaults(job), fields_of_job(job)
    notes: list[str] = []
    unknown: list[str] = []
    problems: list[str] = []
    for key in list(_leaves(cfg)):
        if find_field(fields, key) is not None:
            continue
        if (foreign := find_foreign(key)) is None:
            unknown.append(key)
            continue
        try:
            notes.append(take_foreign(cfg, defaults, key, foreign))
        except ConfigError as error:
            problems.append(str(error))
    if unknown:
        known = [key for key, field in fields.items() if field.kinds != (dict,)]
        problems.append(_describe_unknown(unknown, known, job))
    sections = {key: OmegaConf.select(cfg, key.rpartition(".")[0]) if "." in key else cfg for key in _leaves(cfg)}
    missing = [key for key, section in sections.items() if OmegaConf.is_missing(section, key.rpartition(".")[2])]
    if missing:
        options = {archive_key(job): "--model", data_key(job): "--data"}
        named = [f"{key} (or {options[key]} PATH)" if key in options else key for key in missing]
        problems.append("these keys need a value: " + ", ".join(named))
    problems += value_problems(cfg, fields, defaults)
    try:
        notes.append(_note_on_directories(cfg, defaults))
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return [note for note in notes if note]


def log_directory(exp_manager: ExpManager) -> Path:
    """Where a job writes: ``explicit_log_dir``, else ``<exp_dir>/<name>``, else ``nemo_experiments/<name>``."""
    if exp_manager.explicit_log_dir:
        return Path(exp_manager.explicit_log_dir).expanduser()
    return Path(exp_manager.exp_dir or "nemo_experiments").expanduser() / exp_manager.name


_PATHS = (
    *("pretrained_checkpoint.restore_from_path", "model.restore_from_path", "rm_model_file", "output_path"),
    *("critic.pretrained_checkpoint.restore_from_path", "trainer.ppo.teacher.restore_from_path"),
    *("model.peft.restore_from_path", "critic.model.peft.restore_from_path", "exp_manager.resume_from_checkpoint"),
    *("model.dpo.reference_logprobs_dir", "model.kto.reference_logprobs_dir"),
    *("exp_manager.mlflow_logger_kwargs.save_dir", "exp_manager.explicit_log_dir", "exp_manager.exp_dir"),
    *("model.data.data_prefix", "model.data.train_ds.file_path", "model.data.validation_ds.file_path"),
    "data.data.file_path",
)
_FUNCTIONS = ("trainer.ppo.estimator", "trainer.ppo.policy_loss")


def make_paths_absolute(cfg: DictConfig) -> None:
    """Make a config's paths absolute, in place: code of the user's may change the working directory later."""
    if not cfg.exp_manager.explicit_log_dir:
        cfg.exp_manager.exp_dir = str(cfg.exp_manager.exp_dir or "nemo_experiments")
    for key in _PATHS:
        if found := OmegaConf.select(cfg, key, throw_on_missing=False):
            OmegaConf.update(cfg, key, _absolute(found), merge=False)
    for key in _FUNCTIONS:
        if ".py:" in str(named := OmegaConf.select(cfg, key)):
            OmegaConf.update(cfg, key, _absolute(named))
    for reward in OmegaConf.select(cfg, "trainer.ppo.rewards") or ():
        if isinstance(reward, DictConfig) and re.fullmatch(r".+\.py:\w+|.*\.nemo/?", str(reward.get("source"))):
            reward.source = _absolute(reward.source)


def _absolute(found: Any) -> Any:
    """A path, or lists and mappings of them as data files have, with the weights of blends."""
    if isinstance(found, DictConfig):
        return {key: _absolute(value) for key, value in found.items()}
    if isinstance(found, ListConfig):
        return [_absolute(value) for value in found]
    is_path = isinstance(found, str) and found and not re.fullmatch(r"[\d.eE+-]+", found)
    return str(Path(found).expanduser().absolute()) if is_path else found


def _note_on_directories(cfg: DictConfig, defaults: DictConfig) -> str:
    """A note that ``explicit_log_dir`` wins over ``exp_dir``, as in NeMo; an error if it only does so by default."""
    key, winner = "exp_manager.exp_dir", "exp_manager.explicit_log_dir"
    try:
        given, log_dir = OmegaConf.select(cfg, key), OmegaConf.select(cfg, winner)
    except OmegaConfBaseException:  # reported with the values it refers to
        return ""
    if not given or not log_dir:
        return ""
    if log_dir == OmegaConf.select(defaults, winner):
        raise ConfigError(f"{key}={given}: {winner}={log_dir}, the default, would win; set {winner}=null to use {key}")
    return f"{key}={given} has no effect: {winner}={log_dir} wins"


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


def leaves_of(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of all plain values; empty sections count as values."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{key}.")
        else:
            yield key, value


def for_log(cfg: DictConfig) -> tuple[dict[str, Any], str]:
    """A job's whole config for its user, plain and as YAML: interpolations resolved, secrets masked."""
    content: Any = OmegaConf.to_container(given(cfg), resolve=True)
    plain = masked(content)
    return plain, OmegaConf.to_yaml(plain_config(plain))


# What TRL, verl and OpenRLHF call settings of ours, by the last part of their names.
_ELSEWHERE = {
    **dict.fromkeys(("num_generations", "n", "n_samples_per_prompt"), "num_rollouts_per_prompt"),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef"), "initial_policy_kl_penalty"),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "generate_max_len"), "max_length"),
    **dict.fromkeys(("learning_rate", "actor_lr", "actor_learning_rate"), "lr"),
    **dict.fromkeys(("epsilon", "clip_ratio", "eps_clip", "cliprange"), "ratio_eps"),
    **dict.fromkeys(("adv_estimator", "advantage_estimator"), "estimator"),
    **dict.fromkeys(("reward_funcs", "reward_func"), "rewards"),
}


def _describe_unknown(unknown: Sequence[str], known: Sequence[str], job: str) -> str:
    lines = [f"conf/{job}.yaml has no such key{'s' if len(unknown) > 1 else ''}:"]
    for key in unknown:
        name = key.rsplit(".", 1)[-1]
        name = _ELSEWHERE.get(name, name)
        same_name = [other for other in known if other.rsplit(".", 1)[-1] == name]
        alike = [] if same_name else difflib.get_close_matches(key, known, n=2, cutoff=0.75)
        nearest = list(dict.fromkeys([*alike, *same_name]))[:3]
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        lines.append(f"  {key}{hint}")
    lines.append(f"The keys this job knows are in {CONFIGS / (job + '.yaml')}, each with a comment.")
    return "\n".join(lines)
