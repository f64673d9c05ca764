"""The config that the command line of an entry script makes, by hydra; ``--help`` in place of hydra's own."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import hydra
import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig

from nemo_style_aligner.config import (
    CONF_DIR,
    WITHOUT_EXP_MANAGER,
    ConfigError,
    complete_config,
    config_file,
    prepare_overrides,
    register_resolvers,
    required_keys,
)

_HELP = """{description}

Any key of the config can be set on the command line (trainer.devices=2). These must be:

{required}

"--cfg job" shows the config that a command line makes. The keys, what they mean and their defaults, from
{path}:

{content}"""
"""What ``--help`` says."""


class Composed(NamedTuple):
    """A command line's config, and a line for the log on each argument that means something else than in hydra."""

    cfg: DictConfig
    notes: list[str]


def compose(name: str, description: str) -> Composed | None:
    """The config of this command line; None if that only asked for information (``--help``, ``--cfg job``).

    Args:
        name: of the config in ``conf/``.
        description: the entry script's docstring, with which ``--help`` begins.

    Raises:
        ConfigError: the command line or a config file cannot be read; or the command line asks for several runs, or
            deletes keys without giving them anew.
    """
    composed: list[DictConfig] = []

    def take(cfg: DictConfig) -> None:
        composed.append(cfg)

    register_resolvers()
    config_file(name)  # raises if there is none; hydra's error would not say what to do
    if not {"-h", "--help"}.isdisjoint(sys.argv[1:]):
        with _reader_may_leave():
            print(_help(name, description))  # hydra's own has the bare values, without the comments
        return None
    _refuse_multirun(sys.argv[1:])
    arguments, notes = _without_removals(sys.argv[1:])
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors go to our hook instead of being printed at length
    sys.argv[1:] = prepare_overrides(arguments)
    try:
        with _reader_may_leave():
            hydra.main(config_path=str(CONF_DIR), config_name=name, version_base="1.3")(take)()
    except (yaml.YAMLError, UnicodeDecodeError) as error:  # of a file that --config-name names
        raise ConfigError(f"a config file cannot be read: {error}") from error
    except OverrideParseException as error:
        given = error.override.lstrip("+")
        if "=" not in given:
            raise ConfigError(f"{given} is not a setting: write KEY=VALUE, without spaces around the sign") from error
        raise ConfigError(
            f"{given} cannot be read ({error.message.splitlines()[0]}): put a text value in quotes, inside those of "
            "the shell: 'KEY=\"{a} b: c\"'"
        ) from error
    except (HydraException, ValueError) as error:  # ValueError: of some that its grammar lets through
        several = re.match(r"(?:Ambiguous value for argument|Sweep parameters) '\+*(.*)'", str(error))
        if several is None:
            cause = "" if error.__cause__ is None else f": {str(error.__cause__).splitlines()[0]}"
            raise ConfigError(f"hydra cannot make a config of this command line: {error}{cause}") from error
        # Hydra would recommend its multirun.
        raise ConfigError(
            f"{several[1]} gives several values: write a list as KEY=[A,B] and a text value in quotes, inside those of "
            "the shell: 'KEY=\"A,B\"'. To try one value after the other, start a run for each"
        ) from error
    return Composed(complete_config(composed[0], name), notes) if composed else None


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Let whatever reads what is printed here (``| head``, a pager) end before it has read all of it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())  # for what is still buffered, which Python would write at its end
        os.close(null)


def _help(name: str, description: str) -> str:
    path = config_file(name)
    return _HELP.format(
        description=description.strip(),
        required="\n".join(f"    {key}" for key in required_keys(name)),
        path=path,
        content=path.read_text(encoding="utf-8"),
    )


def _refuse_multirun(arguments: Sequence[str]) -> None:
    """Refuse hydra's multirun: it would run job after job in this process, but ranks meet once and end with their job.

    Raises:
        ConfigError: the command line asks for multirun.
    """
    for argument in arguments:
        is_flag = argument == "-m" or (len(argument) > 2 and "--multirun".startswith(argument))  # argparse's shortened
        if is_flag or re.fullmatch(r"\+{0,2}hydra\.mode=.*MULTIRUN.*", argument):
            raise ConfigError(
                f"{argument}: hydra's multirun does not work for jobs that have ranks. Start each run by itself, in a "
                "log directory of its own: for lr in 1e-6 2e-6; do python SCRIPT model.optim.lr=$lr "
                "exp_manager.explicit_log_dir=results/lr_$lr; done"
            )


def _without_removals(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command line without what removes a section, and a line for the log on each of those.

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
        elif re.match(r"~(?!hydra[./])[A-Za-z_]", argument):
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
