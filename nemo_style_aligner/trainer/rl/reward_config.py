"""Where an actor's rewards come from, as the list ``trainer.ppo.rewards`` says."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from nemo_style_aligner.guard.http_client import ClientLimits
from nemo_style_aligner.trainer.config.schema import ListedReward
from nemo_style_aligner.trainer.rl.remote_scores import RemoteScores
from nemo_style_aligner.trainer.rl.reward_functions import (
    DEFAULT_SECONDS,
    EnvironmentRewards,
    FunctionRewards,
    MathRewards,
    load_reward_function,
)
from nemo_style_aligner.trainer.rl.rewards import ExactMatch, RewardSource, RewardSum, WeightedSource
from nemo_style_aligner.trainer.services.score_client import ScoreClient

REWARDS = "trainer.ppo.rewards"

SourceKind = Literal["exact_match", "math_verify", "service", "environment", "url", "archive", "function"]

# What a source looks like; without a pattern, it is its kind's name.
_PATTERNS: Mapping[str, str] = {
    "url": r"http://[^\s/?#@]+:\d{1,5}/[^\s/?#%]+",
    "archive": r".*\.nemo/?",
    "function": r".+\.py:\w+",
}
_KINDS: tuple[SourceKind, ...] = get_args(SourceKind)
LAYOUT = ("devices", "tensor_parallel_size", "pipeline_parallel_size")
"""Keys of a frozen model's ranks."""
_DEFAULTS = vars(ListedReward())
_CHOICES = "exact_match, math_verify, service, environment, http://HOST:PORT/NAME, FILE.py:NAME or MODEL.nemo"


def reward_specs(rewards: Sequence[ListedReward] | None) -> list[ListedReward]:
    """The sources that ``trainer.ppo.rewards`` lists, with their names; null is the service alone."""
    if rewards is None:
        return [ListedReward(name="reward", source="service")]
    return [
        reward.replaced(name=_name(vars(reward)), only={field: _as_list(value) for field, value in reward.only.items()})
        for reward in rewards
    ]


def build_reward_source(
    rewards: Sequence[ListedReward],
    *,
    service: Callable[[], RewardSource],
    reward_model: Callable[[ListedReward, str], RewardSource],
    limits: ClientLimits,
    token: str | None,
    threads: int | None = None,
    seconds: float = DEFAULT_SECONDS,
) -> RewardSum:
    """The sources that ``trainer.ppo.rewards`` lists.

    Args:
        rewards: the list, in which there are no `reward_problems`.
        service: makes what the source ``service`` means in this job.
        reward_model: makes a source of an archive; its other argument is the config key of its entry.
        limits: of requests to other services.
        token: the secret that is shared with them; None: no authentication.
        threads: calls of a function at a time; see `FunctionRewards`.
        seconds: limit of such a call.

    Raises:
        UserCodeError: a function cannot be loaded, or does not take what it gets.
        MathVerifyError: the package is not installed.
    """

    def build(spec: ListedReward, entry: str) -> RewardSource:
        key, kind = f"{entry}.source", kind_of(spec.source)
        if kind == "exact_match":
            return ExactMatch()
        if kind == "math_verify":
            return MathRewards()
        if kind == "environment":
            return EnvironmentRewards()
        if kind == "service":
            return service()
        if kind == "url":
            url, _, model = spec.source.rpartition("/")
            return RemoteScores(ScoreClient(url, model, limits=limits, token=token, setting=key))
        if kind == "function":
            function = load_reward_function(spec.source, key)
            return FunctionRewards(function, spec.source, seconds=seconds, max_parallel=threads)
        return reward_model(spec, entry)

    return RewardSum(
        [
            WeightedSource(spec.name, build(spec, f"{REWARDS}[{place}]"), spec.weight, spec.only)
            for place, spec in enumerate(reward_specs(rewards))
        ]
    )


def kind_of(source: str) -> SourceKind | None:
    """What a source is: built in, the service of ``remote_critic_rm``, another, a reward model, a function; or none."""
    return next((kind for kind in _KINDS if re.fullmatch(_PATTERNS.get(kind, kind), source)), None)


def _name(reward: Mapping[str, Any]) -> str:
    """The source's name; without one, what it is called: a function, a service's model."""
    return reward.get("name") or re.split(r"[:/]", reward["source"].rstrip("/"))[-1].removesuffix(".nemo")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def reward_problems(rewards: Sequence[Any]) -> Iterator[str]:
    """How sources, as plain values, are not described as they should be; one line for each problem."""
    names: set[str] = set()
    for place, reward in enumerate(rewards):
        key = f"{REWARDS}[{place}]"
        if not isinstance(reward, Mapping):
            yield f"{key}={reward}: give {{name: NAME, source: SOURCE}}"
            continue
        if problems := list(_problems_of_one(reward, key)):
            yield from problems
        elif (name := _name(reward)) in names:
            yield f"{key}.name={name}: another source has this name; give each one of its own"
        else:
            names.add(name)


def _problems_of_one(reward: Mapping[str, Any], key: str) -> Iterator[str]:
    if unknown := [name for name in reward if name not in _DEFAULTS]:
        yield f"{key} has no {', '.join(map(str, unknown))}: its keys are {', '.join(_DEFAULTS)}"
    name, source, weight, only = ({**_DEFAULTS, **reward}[name] for name in ("name", "source", "weight", "only"))
    if name is not None and not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
        yield f"{key}.name={name}: give a plain word, by which it is logged"
    if not isinstance(source, str) or kind_of(source) is None:
        yield f"{key}.source={source}: choose {_CHOICES}"
    for field in LAYOUT:
        default = _DEFAULTS[field]
        count = reward.get(field, default)
        if not isinstance(count, int) or isinstance(count, bool) or count < default:
            yield f"{key}.{field}={count}: give a whole number of {default} or more"
        elif field != "devices" and field in reward and not reward.get("devices"):
            yield f"{key}.{field}={count}: it is of ranks that this reward model has for itself: give their `devices`"
    if reward.get("devices") and kind_of(str(source)) != "archive":
        yield f"{key}.devices={reward['devices']}: only a reward model (.nemo) has ranks of its own; leave it out"
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not math.isfinite(weight):
        yield f"{key}.weight={weight}: must be a finite number"
    if not isinstance(only, Mapping):
        yield f"{key}.only={only}: give fields of the prompts' lines and their values, {{FIELD: VALUE}}"
        return
    for field, value in only.items():
        if not _as_list(value) or not all(isinstance(one, str | int | float | None) for one in _as_list(value)):
            yield f"{key}.only.{field}={value}: give a text, a number, True, False, null, or a list of them"
