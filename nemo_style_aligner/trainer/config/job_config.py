"""The config of a whole job, typed, with the config that it was read from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.trainer.config.fields import Section

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.config.schema import ExpManager, Model, Trainer


class JobConfig(Section):
    """The sections of a job; `schema` has one for each kind of job.

    Attributes:
        given: what it was read from, where keys that follow others (``${...}``) still do.
        chosen: the dotted keys and sections that the user has given; None: nobody knows.
    """

    if TYPE_CHECKING:  # each job annotates its own, in the order of its YAML file
        given: DictConfig
        chosen: frozenset[str] | None
        trainer: Trainer
        exp_manager: ExpManager
        model: Model

    @classmethod
    def read(cls, given: DictConfig, chosen: frozenset[str] | None = None) -> Self:
        """The values of a config that `check_config` has passed."""
        content: Any = OmegaConf.to_container(given, resolve=True)
        config = cls.among(content)
        vars(config).update(given=given, chosen=chosen)
        return config

    def is_chosen(self, *keys: str) -> bool:
        """Whether the user has given one of these keys, as far as anybody knows: else a job may fit its value."""
        if self.chosen is None:
            return True
        return any(f"{key}.".startswith(f"{given}.") for key in keys for given in self.chosen)

    def get(self, key: str) -> Any:
        """The value of a dotted key; None if it is not set, or this job has no such key."""
        return OmegaConf.select(self.given, key)

    def model_given(self) -> dict[str, Any]:
        """The ``model`` section with all its keys, those of a model's shape among them."""
        content: Any = OmegaConf.to_container(self.given.model, resolve=True)
        return content

    def changed(self, values: Mapping[str, Any]) -> Self:
        """The same with other values of dotted keys, which keys that follow them follow."""
        given = self.given.copy()
        OmegaConf.set_struct(given, False)
        for key, value in values.items():
            OmegaConf.update(given, key, plain_config(value) if isinstance(value, Mapping) else value, merge=False)
        return self.read(given, self.chosen)


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
