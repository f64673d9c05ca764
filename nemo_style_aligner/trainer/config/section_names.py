"""Config sections by two names: the package reads the PPO actor's, and some jobs call them otherwise in their YAML.

`config` names them as the package does right after a config is composed. What a job says to its user goes through
`translated`, and what it keeps of its config through `given`, so that users read only the names of their job's YAML.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.trainer.config.schema import JOBS


@dataclasses.dataclass(frozen=True)
class SectionNames:
    """What a job's YAML calls the sections that the package reads by other names.

    Attributes:
        own: dotted name in the package -> in the YAML; they differ in their last part.
    """

    own: Mapping[str, str]

    def read(self, cfg: DictConfig) -> DictConfig:
        """The job's config with the package's names, interpolations included."""
        return _renamed(cfg, {own: name for name, own in self.own.items()})

    def read_key(self, key: str) -> str:
        """A dotted key of the YAML, by the package's names."""
        for name, own in self.own.items():
            if f"{key}.".startswith(f"{own}."):
                return name + key[len(own) :]
        return key

    def written(self, cfg: DictConfig) -> DictConfig:
        """The opposite of `read`."""
        return _renamed(cfg, self.own)

    def translated(self, text: str) -> str:
        """A text for the job's user, with the names of its YAML."""
        return _words(self.own).sub(lambda found: self.own[found[0]], text) if self.own else text


_current = SectionNames({})  # of the job that this process is a rank of


def names_of(job: str) -> SectionNames:
    """The names of the job whose YAML file this is (without its ending)."""
    return SectionNames(JOBS[job].names)


def speak_as(job: str) -> None:
    """From now on `translated` and `given` use the names of this job: this process is a rank of it, or starts them."""
    global _current
    _current = names_of(job)


def translated(text: str) -> str:
    """A text for this job's user; see `SectionNames.translated`."""
    return _current.translated(text)


def given(cfg: DictConfig) -> DictConfig:
    """This job's config for its user; see `SectionNames.written`."""
    return _current.written(cfg)


def _renamed(cfg: DictConfig, names: Mapping[str, str]) -> DictConfig:
    if not names:
        return cfg
    content: Any = OmegaConf.to_container(cfg, resolve=False)
    renamed = OmegaConf.create(_in_container(content, names))
    assert isinstance(renamed, DictConfig)
    return renamed


def _in_container(value: Any, names: Mapping[str, str], path: str = "") -> Any:
    if isinstance(value, Mapping):
        items = {f"{path}.{key}".lstrip("."): (key, item) for key, item in value.items()}
        return {
            names[full].rpartition(".")[2] if full in names else key: _in_container(item, names, full)
            for full, (key, item) in items.items()
        }
    if isinstance(value, list):
        return [_in_container(item, names, path) for item in value]
    return _in_interpolation(value, names) if isinstance(value, str) and "${" in value else value


def _in_interpolation(text: str, names: Mapping[str, str]) -> str:
    """``${trainer.reinforce.max_steps}`` and, within trainer, ``${.reinforce.max_steps}``."""
    last = {old.rpartition(".")[2]: new.rpartition(".")[2] for old, new in names.items()}
    relative = re.compile(rf"(\$\{{\.+)({'|'.join(map(re.escape, last))})(?![\w-])")
    text = relative.sub(lambda found: found[1] + last[found[2]], text)
    return _words(names).sub(lambda found: names[found[0]], text)


def _words(names: Mapping[str, str]) -> re.Pattern[str]:
    """The names where they stand by themselves or begin a key, and are no part of a path or of a longer name."""
    return re.compile(rf"(?<![\w/.-])({'|'.join(map(re.escape, names))})(?![\w/-])")
