"""The config that the command line of an entry script makes: hydra's grammar of overrides, and its usual flags."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hydra
import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.places import CONFIGS
from nemo_style_aligner.trainer.config.loading import (
    WITHOUT_EXP_MANAGER,
    ConfigError,
    archive_key,
    complete_config,
    config_file,
    data_key,
    leaves_of,
    register_resolvers,
    required_keys,
)
from nemo_style_aligner.trainer.config.section_names import names_of

_HELP = """{description}

Any key of the config can be set on the command line (trainer.devices=2). These must be:

{required}

{short}

"--cfg job" shows the config that a command line makes. "--config-path FOLDER --config-name NAME" take a config file of
yours, which may leave keys out. The keys, what they mean and their defaults, from
{path}:

{content}"""
"""What ``--help`` says."""

_TEMPLATES = ("prompt_template", "filename")  # last parts of the keys whose values have fields in braces


_SHORT = """"--model PATH" stands for {model}: a .nemo archive; or a Hugging Face folder or a GGUF file,
of which the job makes an archive in its log directory. "--output FOLDER" is that, exp_manager.explicit_log_dir; with
--model or --data, but neither, it is nemo_experiments/NAME."""
_SHORT_DATA = """
"--data FILE" and "--validation FILE", each as often as there are files, stand for {data}."""


_LOG_DIR = "exp_manager.explicit_log_dir"


class Composed(NamedTuple):
    """A command line's config, and what else it says.

    Attributes:
        notes: a line for the log on each argument that means something else than in hydra.
        chosen: what the user has given: see `JobConfig.chosen`.
    """

    cfg: DictConfig
    notes: list[str]
    chosen: frozenset[str]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help says what the command line can have")


def compose(name: str, description: str = "", arguments: Sequence[str] | None = None) -> Composed | None:
    """The config of a command line; None if that only asked for information (``--help``, ``--cfg job``).

    Args:
        name: of the config in ``conf/``.
        description: the entry script's docstring, with which ``--help`` begins.
        arguments: of the script; None: this process's.

    Raises:
        ConfigError: the command line or a config file cannot be read; or the command line asks for several runs, or
            deletes keys without giving them anew.
    """
    config_file(name)  # raises if there is none
    parser = _Parser(add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-c", "--cfg", choices=("job",))
    parser.add_argument("-cp", "--config-path", type=os.path.abspath, default=str(CONFIGS))
    parser.add_argument("-cn", "--config-name", default=name)
    for option in ("--model", "--output"):
        parser.add_argument(option)
    for option in ("--data", "--validation"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_intermixed_args(sys.argv[1:] if arguments is None else arguments)
    if options.help or options.cfg:  # whatever reads this (``| head``, a pager) may end before it has read all of it
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if options.help:
        print(_help(name, description))
        return None
    overrides, notes = _without_removals(options.overrides)
    cfg = _by_hydra(options.config_name, overrides, Path(options.config_path))
    is_own = (Path(options.config_path), options.config_name) != (CONFIGS, name)
    of_file = {str(key) for key, _ in leaves_of(OmegaConf.to_container(cfg))} if is_own else set()  # type: ignore[arg-type]
    short = _short_options(name, options)
    for key, value in short.items():
        if given := [argument for argument in overrides if _sets(argument, key)]:
            raise ConfigError(f"{given[0]}: an option gives {key} as well ({value}): leave one of them out")
        OmegaConf.update(cfg, key, value, merge=False, force_add=True)
    if (options.model or options.data) and not is_own and not any(_sets(given, _LOG_DIR) for given in overrides):
        OmegaConf.update(cfg, _LOG_DIR, options.output)  # NeMo-Aligner's /results is no folder of most users
    if options.cfg:
        print(OmegaConf.to_yaml(cfg))
        return None
    keys = {argument.lstrip("+").partition("=")[0] for argument in overrides} | of_file | short.keys()
    return Composed(complete_config(cfg, name), notes, frozenset(map(names_of(name).read_key, keys)))


def _short_options(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The keys that ``--model``, ``--data`` and the like stand for, with their values."""
    keys = {archive_key(name): options.model, _LOG_DIR: options.output}
    key, parts = data_key(name), {"train": options.data, "validation": options.validation}
    if any(parts.values()) and key is None:
        raise ConfigError("--data, --validation: this job reads no data; leave them out")
    if options.validation and (not options.data or key == "data.data.file_path"):
        raise ConfigError("--validation goes with --data of a job that trains: give both, or the keys of the config")
    if key == "model.data.data_prefix" and options.data:
        keys[key] = {part: files for part, files in parts.items() if files}
    elif key is not None:
        named = {key.replace("train_ds", f"{part}_ds"): files for part, files in parts.items() if files}
        keys |= {key: files if len(files) > 1 else files[0] for key, files in named.items()}
    return {key: value for key, value in keys.items() if value}


def config_with(name: str, overrides: Sequence[str]) -> DictConfig:
    """The config of a job with these overrides (``key=value``), as on its command line.

    Raises:
        ConfigError: an override cannot be read.
    """
    return complete_config(_by_hydra(name, overrides, CONFIGS), name)


def _by_hydra(file: str, overrides: Sequence[str], folder: Path) -> DictConfig:
    register_resolvers()
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(folder)):
            return hydra.compose(file, [*map(_prepared, overrides)])
    except (yaml.YAMLError, UnicodeDecodeError) as error:  # of a file that --config-name names
        raise ConfigError(f"a config file cannot be read: {error}") from error
    except OverrideParseException as error:
        given = error.override.lstrip("+")
        if "=" not in given:
            option = "; a model is given as --model PATH, data as --data PATH" if os.path.exists(given) else ""
            raise ConfigError(
                f"{given} is not a setting: write KEY=VALUE, without spaces around the sign{option}"
            ) from error
        raise ConfigError(
            f"{given} cannot be read ({error.message.splitlines()[0]}): put a text value in quotes, inside those of "
            "the shell: 'KEY=\"{a} b: c\"'"
        ) from error
    except (HydraException, ValueError) as error:  # ValueError: of some that its grammar lets through
        several = re.match(r"(?:Ambiguous value for argument|Sweep parameters) '\+*(.*)'", str(error))
        if several is None:
            cause = "" if error.__cause__ is None else f": {str(error.__cause__).splitlines()[0]}"
            raise ConfigError(f"hydra cannot make a config of this command line: {error}{cause}") from error
        # Hydra would recommend its multirun, which runs job after job in this process: ranks end with their job.
        raise ConfigError(
            f"{several[1]} gives several values: write a list as KEY=[A,B] and a text value in quotes, inside those of "
            "the shell: 'KEY=\"A,B\"'. To try one value after the other, start a run for each, in a log directory of "
            "its own (exp_manager.explicit_log_dir)"
        ) from error


def _prepared(override: str) -> str:
    """An override as hydra should see it.

    ``key=value`` and ``+key=value`` become ``++key=value``, so that hydra accepts keys that are not in the YAML file:
    `check_config` knows more about them. The value is put in quotes if it is text that hydra's grammar does not accept.
    Such are paths (with a name that has ``step=30`` in it, say) and templates (``{input} {output}``). NeMo-Aligner's
    guides have interpolations with a backslash that a shell leaves there, ``"\\${multiply:1e-6,2}"``: its jobs compute
    them all the same.
    """
    key, sign, value = override.lstrip("+").partition("=")
    if not sign or not re.match(r"[A-Za-z_]", key):
        return override
    if escaped := re.fullmatch(r'"\\(\$\{.*\})"', value):
        return f"++{key}={escaped[1]}"
    quote = '"' if "'" in value else "'"
    if quote in value or value.endswith("\\"):
        return f"++{key}={value}"
    is_template = key.rsplit(".", 1)[-1] in _TEMPLATES and "{" in value and value[0] not in "'\""
    is_path = re.match(r"\.{0,2}/|~", value) and "${" not in value and "\\" not in value
    if is_template or (is_path and not re.fullmatch(r"[A-Za-z0-9_/.@%+ -]*", value)):
        return f"++{key}={quote}{value}{quote}"
    return f"++{key}={value}"


def _help(name: str, description: str) -> str:
    path, data = config_file(name), data_key(name)
    return _HELP.format(
        description=description.strip(),
        required="\n".join(f"    {key}" for key in required_keys(name)),
        path=path,
        short=_SHORT.format(model=archive_key(name)) + (_SHORT_DATA.format(data=data) if data else ""),
        content=path.read_text(encoding="utf-8"),
    )


def _without_removals(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The overrides without those of hydra itself and what removes a section, and a line for the log on each of those.

    NeMo's scripts write ``~model.optim '++model.optim={name: sgd}'`` to replace a section, and ``exp_manager=null``
    to run without checkpoints.

    Raises:
        ConfigError: a key is removed and not given anew.
    """
    kept: list[str] = []
    notes: list[str] = []
    for place, argument in enumerate(arguments):
        if re.fullmatch(r"\+{0,2}exp_manager=(null|None|~)?", argument):
            kept += (f"exp_manager.{key}={value}" for key, value in WITHOUT_EXP_MANAGER.items())
            notes.append(f"{argument}: a job always has a log directory; exp_manager's other keys hold all the same")
        elif re.match(r"[+~]*hydra[./]", argument):
            notes.append(f"{argument} has no effect: exp_manager says what is written, and where")
        elif re.match(r"~[A-Za-z_]", argument):
            key = argument[1:].partition("=")[0]
            if not any(_sets(later, key) for later in arguments[place + 1 :]):
                raise ConfigError(
                    f"{argument}: a key that is left out has its default, so it cannot be deleted; to turn off what "
                    f"it sets, write {key}=null, where the key's comment in the config (--help) allows that"
                )
            kept = [other for other in kept if not _sets(other, key)]
            notes.append(f"{argument}: what the command line does not give after it has its default")
        else:
            kept.append(argument)
    return kept, notes


def _sets(argument: str, key: str) -> bool:
    """Whether an argument of the command line gives ``key`` or a key below it a value."""
    name, sign, _ = argument.lstrip("+").partition("=")
    return bool(sign) and f"{name}.".startswith(f"{key}.")
