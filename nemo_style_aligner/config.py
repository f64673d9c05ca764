"""Configs: where they are, which keys they know, and what becomes of keys that only NeMo needs.

Defaults live in ``conf/<job>.yaml``, each key with its comment. A user's key must be known: it is in that
file, it describes a model's architecture, or it is in `LEGACY_KEYS`. Everything else is an error.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_style_aligner.config_types import ARCHITECTURE_KEYS, wrong_types
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.legacy_keys import COMMON_NAMES, LEGACY_KEYS, LegacyKey
from nemo_style_aligner.section_names import names_of

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"
"""The repository's ``conf/``: one YAML file per job."""


SECRET_KEYS = ("token",)
"""Last parts of the keys whose values are secrets."""


WITHOUT_EXP_MANAGER = {"create_checkpoint_callback": False, "create_wandb_logger": False}
"""What NeMo's ``exp_manager=null`` means here: keys of that section."""


class ConfigError(UserError, ValueError):
    """A mistake in a job's config; the message names the key and what to do."""


# Keys of `model` that come with a checkpoint's own config, so that the YAML files leave them out.
_MODEL_KEYS = frozenset(ARCHITECTURE_KEYS) | {
    "add_qkv_bias",
    "rope_scaling_factor",
    "encoder_seq_length",
    "make_vocab_size_divisible_by",
}

# Sections in which the user chooses the keys, in the jobs that have them.
_OPEN_SECTIONS = ("exp_manager.wandb_logger_kwargs", "model.data.data_prefix", "model.rope_scaling")


# Keys that must be given, though the YAML files have null for them, as NeMo-Aligner's do; other such keys are ``???``.
_REQUIRED = ("pretrained_checkpoint.restore_from_path", "rm_model_file", "model.data.data_prefix")

# Last parts of the keys whose values are templates, with fields in braces.
_TEMPLATES = ("prompt_template", "filename")

_QUIET_HYDRA = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none")
_FLAGS_WITH_PATH = ("--config-path", "-cp")
_FLAGS_WITH_VALUE = (
    *_FLAGS_WITH_PATH,
    *("--config-name", "-cn", "--config-dir", "-cd"),
    *("--package", "-p", "--cfg", "-c", "--info", "-i"),
)


# ---- before hydra -------------------------------------------------------------------------------


def register_resolvers() -> None:
    """Make NeMo-Aligner's resolvers available: ``${multiply:a,b}``, ``${int_div:a,b}``, ``${subtract:a,b}``.

    And ``${by_index:i,[a,b]}``, element i; the first one if i is no index of the list, which is reported separately.
    """
    OmegaConf.register_new_resolver("multiply", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("int_div", lambda a, b: a // b, replace=True)
    OmegaConf.register_new_resolver("subtract", lambda a, b: a - b, replace=True)
    OmegaConf.register_new_resolver("by_index", _by_index, replace=True)


def _by_index(index: Any, values: Sequence[Any]) -> Any:
    return values[int(index)] if index in range(len(values)) else values[0]


def prepare_overrides(arguments: Sequence[str]) -> list[str]:
    """The command line as hydra should see it.

    ``key=value`` becomes ``++key=value``, so that hydra accepts keys that are not in the YAML file:
    `check_config` knows more about them. Hydra is also told to write no files and leave logging alone.
    """
    prepared: list[str] = []
    first_override: int | None = None
    flag = ""  # the argument before, if it was one like --config-name, whose value follows it
    for argument in arguments:
        name, sign, path = argument.partition("=")
        if flag in _FLAGS_WITH_PATH:
            argument = _from_here(argument)
        elif sign and name in _FLAGS_WITH_PATH:
            argument = f"{name}={_from_here(path)}"
        is_override = not flag and not argument.startswith("-")
        if is_override and first_override is None:
            first_override = len(prepared)
        is_plain = is_override and "=" in argument and re.match(r"(?!hydra[./])[A-Za-z_]", argument)
        prepared.append(f"++{_with_quotes(argument)}" if is_plain else argument)
        flag = argument if argument in _FLAGS_WITH_VALUE else ""
    # Hydra's parser wants all overrides in one place.
    at = first_override or 0  # not after all flags: the last may be --info, which would take one for its value
    return [*prepared[:at], *_QUIET_HYDRA, *prepared[at:]]


def _from_here(path: str) -> str:
    """A path as it is meant in the folder in which the job is started: hydra would look beside a module of ours."""
    return path if "://" in path else os.path.abspath(path)


def _with_quotes(override: str) -> str:
    """``key=value``, the value in quotes if it is text that hydra's grammar would not accept.

    Such are paths (with a name that has ``step=30`` in it, say) and templates (``{input} {output}``).
    NeMo-Aligner's guides have interpolations with a backslash that a shell leaves there, ``"\\${multiply:1e-6,2}"``:
    its jobs compute them all the same.
    """
    key, _, value = override.partition("=")
    if escaped := re.fullmatch(r'"\\(\$\{.*\})"', value):
        return f"{key}={escaped[1]}"
    quote = '"' if "'" in value else "'"
    if quote in value or value.endswith("\\"):
        return override
    is_template = key.rsplit(".", 1)[-1] in _TEMPLATES and "{" in value and value[0] not in "'\""
    is_path = re.match(r"\.{0,2}/|~", value) and "${" not in value and "\\" not in value
    if is_template or (is_path and not re.fullmatch(r"[A-Za-z0-9_/.@%+ -]*", value)):
        return f"{key}={quote}{value}{quote}"
    return override


def config_file(job: str) -> Path:
    """The YAML file of a job.

    Raises:
        ConfigError: there is no such file.
    """
    path = CONF_DIR / f"{job}.yaml"
    if not path.exists():
        raise ConfigError(f"{path} does not exist: run from a checkout of the repository (pip install -e .)")
    return path


def load_defaults(job: str) -> DictConfig:
    """The contents of the YAML file of a job, with interpolations left in place, and the package's section names.

    Raises:
        ConfigError: there is no such file.
    """
    register_resolvers()
    config = OmegaConf.load(config_file(job))
    assert isinstance(config, DictConfig)
    return names_of(job).read(config)


def required_keys(job: str) -> list[str]:
    """The dotted keys of a job that a user has to give, in the order of its YAML file."""
    defaults = load_defaults(job)
    missing = set(_missing(defaults))
    return [key for key in _leaves(defaults) if key in missing or key in _REQUIRED]


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


# ---- checking -----------------------------------------------------------------------------------


def check_config(cfg: DictConfig, job: str) -> list[str]:
    """Check every key that a user has given, and move those that have another name here.

    Args:
        cfg: the composed config; changed in place.
        job: name of the YAML file, without its ending.

    Returns:
        One line for each key that has no effect or another name here, to be logged.

    Raises:
        ConfigError: unknown keys (each with its nearest known ones), values that are not supported or of
            another type, values that are missing: all in one message.
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
    try:
        notes.append(_note_on_directories(cfg, defaults))
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(problems))
    return [note for note in notes if note]


def log_directory(exp_manager: DictConfig) -> Path:
    """Where a job writes: ``explicit_log_dir``, else ``<exp_dir>/<name>``, else ``nemo_experiments/<name>``."""
    if exp_manager.explicit_log_dir:
        return Path(str(exp_manager.explicit_log_dir)).expanduser()
    return Path(str(exp_manager.exp_dir or "nemo_experiments")).expanduser() / str(exp_manager.name)


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


def _missing(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys that still have to be given (``???``); unlike OmegaConf's own function it resolves nothing."""
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
    section, _, name = key.partition(".")
    if key in known or (section == "model" and name in _MODEL_KEYS):
        return True
    if any(other.startswith(f"{key}.") for other in known):  # `section={}` or `section=null`
        return True
    return any(key.startswith(f"{section}.") and _is_known(section, known) for section in _OPEN_SECTIONS)


def _find_legacy(key: str) -> LegacyKey | None:
    return next((legacy for legacy in LEGACY_KEYS if fnmatchcase(key, legacy.pattern)), None)


def _apply_legacy(cfg: DictConfig, defaults: DictConfig, key: str, legacy: LegacyKey) -> str:
    try:
        value = OmegaConf.select(cfg, key)
    except OmegaConfBaseException:  # `wrong_types` reports it
        return ""
    if legacy.allowed and not legacy.allows(value):
        raise ConfigError(f"{key}={value}: {legacy.note}; leave the key out")
    if legacy.allowed:
        return ""  # the value is what the job does anyway
    if legacy.moved_to is None:
        return f"{key}={value}: {legacy.note}"
    target = legacy.moved_to.replace("*", key.rsplit(".", 1)[-1])
    target = target.replace("{section}", _job_section(defaults))
    default = OmegaConf.select(defaults, target, default=_ABSENT)
    given, value = value, dict(legacy.means).get(value) if legacy.means else value
    if value is None:
        return ""
    if default is _ABSENT and legacy.means:
        return f"{key}={given} has no effect: this job does not have {target}"
    if default is _ABSENT:
        raise ConfigError(f"{key} is {target} here, which this job does not have: leave the key out")
    present = OmegaConf.select(cfg, target)
    if value != present:
        section, _, name = target.rpartition(".")
        if present != default and not OmegaConf.is_interpolation(OmegaConf.select(cfg, section), name):
            raise ConfigError(f"{key}={given} and {target}={present} name the same setting: give one of them")
        OmegaConf.update(cfg, target, value)
    note = f"; {legacy.note}" if legacy.note else ""
    return f"{key}={given} is taken as {target}={value}{note}"


_ABSENT = object()


def keys_without_effect(cfg: DictConfig, job: str) -> set[str]:
    """The keys that `check_config` accepts, but that have no effect on the job whatever their values."""
    known = set(_leaves(load_defaults(job)))
    unread = set()
    for key in _leaves(cfg):
        legacy = None if _is_known(key, known) else _find_legacy(key)
        if legacy is not None and legacy.moved_to is None and not legacy.allowed:
            unread.add(key)
    return unread


def _job_section(defaults: DictConfig) -> str:
    """The name of the job's own section in ``trainer`` (sft, rm or ppo)."""
    return next((name for name in ("sft", "rm", "ppo") if name in defaults.trainer), "ppo")


def plain_config(content: Mapping[str, Any]) -> DictConfig:
    """A config of plain values, in which nothing is computed: ``${...}`` in a text is text."""
    return OmegaConf.create(_escaped(content))


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    # In OmegaConf's grammar a backslash takes the meaning from ``${``, and from backslashes before it.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def without_secrets(cfg: DictConfig) -> DictConfig:
    """A copy for logs: interpolations resolved, secrets masked."""
    content: Any = OmegaConf.to_container(cfg, resolve=True)
    copy = plain_config(content)
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
    """Up to three known keys: those spelt alike, then those with the same last part, or with what it is called here."""
    last = key.rsplit(".", 1)[-1]
    names = [last, *(name for name, others in COMMON_NAMES.items() if last.lower() in others)]
    same_name = [c for name in names for c in candidates if c.rsplit(".", 1)[-1] == name]
    alike = [] if len(names) > 1 else difflib.get_close_matches(key, candidates, n=2, cutoff=0.75)
    return list(dict.fromkeys([*alike, *same_name]))[:3]
