"""Where an actor's rewards come from, as ``trainer.ppo.rewards`` says."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from nemo_style_aligner.config import ConfigError

REWARDS = "trainer.ppo.rewards"

SourceKind = Literal["exact_match", "math_verify", "service", "url", "archive", "function"]

# What a source looks like; without a pattern, it is its kind's name.
_PATTERNS: Mapping[str, str] = {
    "url": r"http://[^\s/]+/[^\s/?#%]+",
    "archive": r".*\.nemo/?",
    "function": r".+\.py:\w+",
}
_KINDS: tuple[SourceKind, ...] = ("exact_match", "math_verify", "service", "url", "archive", "function")
_KEYS: Mapping[str, Any] = {"name": None, "source": None, "weight": 1.0, "only": {}}  # and their defaults
_CHOICES = "exact_match, math_verify, service, http://HOST:PORT/NAME, a reward model (PATH.nemo) or FILE.py:NAME"


@dataclasses.dataclass(frozen=True)
class RewardSpec:
    """One of the sources.

    Attributes:
        name: of its part in the log.
        source: as in the config; see `kind`.
        weight: of its rewards in the sum.
        only: fields of a prompt's line, and the values, any of several, that they must have for it to count.
    """

    name: str
    source: str
    weight: float = 1.0
    only: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)

    @property
    def kind(self) -> SourceKind:
        """What the source is: built in, the service of ``remote_critic_rm``, another, a reward model, a function."""
        kind = _kind_of(self.source)
        assert kind is not None
        return kind


def reward_specs(rewards: Sequence[Any] | None) -> list[RewardSpec]:
    """The sources that ``trainer.ppo.rewards``, as plain values, lists; null is the service alone.

    Raises:
        ConfigError: a source is not described as it should be; one line for each problem.
    """
    if rewards is None:
        return [RewardSpec("reward", "service")]
    problems = list(_problems(rewards))
    if problems:
        raise ConfigError("\n".join(problems))
    return [
        RewardSpec(
            name=reward["name"],
            source=reward["source"],
            weight=float(reward.get("weight", 1.0)),
            only={
                field: value if isinstance(value, list) else [value] for field, value in reward.get("only", {}).items()
            },
        )
        for reward in rewards
    ]


def _kind_of(source: str) -> SourceKind | None:
    return next((kind for kind in _KINDS if re.fullmatch(_PATTERNS.get(kind, kind), source)), None)


def _problems(rewards: Sequence[Any]) -> Iterator[str]:
    if not rewards:
        yield f"{REWARDS}=[]: nothing would be rewarded; list a source, or give null for the service"
    names: set[str] = set()
    for place, reward in enumerate(rewards):
        key = f"{REWARDS}[{place}]"
        if not isinstance(reward, Mapping):
            yield f"{key}={reward}: give {{name: NAME, source: SOURCE}}"
            continue
        if unknown := [name for name in reward if name not in _KEYS]:
            yield f"{key} has no {', '.join(map(str, unknown))}: its keys are {', '.join(_KEYS)}"
        name, source, weight, only = (reward.get(name, default) for name, default in _KEYS.items())
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            yield f"{key}.name={name}: give a plain word, by which it is logged"
        elif name in names:
            yield f"{key}.name={name}: another source has this name"
        names.add(str(name))
        if not isinstance(source, str) or _kind_of(source) is None:
            yield f"{key}.source={source}: choose {_CHOICES}"
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
            yield f"{key}.weight={weight}: must be a finite number"
        if not isinstance(only, Mapping):
            yield f"{key}.only={only}: give fields of the prompts' lines and their values, {{FIELD: VALUE}}"
