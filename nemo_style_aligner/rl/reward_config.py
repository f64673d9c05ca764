"""Sources of rewards from a config: a list of sections ``{name, source, weight, only}``."""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from omegaconf import ListConfig, OmegaConf

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.rl.reward_functions import DEFAULT_SECONDS, FunctionRewards, MathRewards
from nemo_style_aligner.rl.rewards import ExactMatch, RemoteRewards, RewardSource, RewardSum, WeightedSource
from nemo_style_aligner.servers.http_client import ClientLimits
from nemo_style_aligner.servers.reward_client import RewardClient
from nemo_style_aligner.user_code import load_function

_SOURCES = "exact_match, math_verify, service, http://HOST:PORT/MODEL or FILE.py:FUNCTION"
_KEYS = ("name", "source", "weight", "only", "max_parallel", "timeout_seconds")
_NAME = re.compile(r"[\w.-]+")


class RewardConfigError(UserError, ValueError):
    """Sections of rewards that cannot be used; the message has one line for each problem."""


def build_reward_source(
    section: Sequence[Any] | ListConfig | None,
    key: str,
    *,
    service: Callable[[], RewardSource] | None,
    limits: ClientLimits,
    token: str | None,
) -> RewardSum | None:
    """What the list of sections under ``key`` describes; None for null.

    Args:
        section: the list; each element has ``source``, and may have ``name``, ``weight``, ``only``, ``max_parallel``
            and, for functions, ``timeout_seconds`` (of a call).
        key: of the config, for messages.
        service: makes what the source ``service`` means in this job; None: there is no such service.
        limits: of requests to other services.
        token: the secret that is shared with them; None: no authentication.

    Raises:
        RewardConfigError: all that is wrong with the list.
    """
    if section is None:
        return None
    entries = OmegaConf.to_container(section, resolve=True) if isinstance(section, ListConfig) else section
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise RewardConfigError(f"{key}={entries!r}: give a list of sections {{name, source, weight, only}}, or null")
    problems: list[str] = []
    sources: list[WeightedSource] = []
    for number, entry in enumerate(entries):
        where = f"{key}[{number}]"
        wrong = [*_problems(entry, where)]
        problems += wrong
        if not wrong:
            try:
                source = _build(entry, where, service, limits, token)
            except UserError as error:
                problems.append(str(error) if str(error).startswith(where) else f"{where}.source: {error}")
            else:
                sources.append(WeightedSource(_name(entry), source, float(entry.get("weight", 1.0)), _only(entry)))
    names = [source.name for source in sources]
    problems += [
        f"{key}: {names.count(name)} sources have the name {name}: give each one of its own"
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]
    if problems:
        for weighted in sources:
            weighted.source.close()
        raise RewardConfigError("\n".join(problems))
    return RewardSum(sources)


def _problems(entry: Any, where: str) -> Iterator[str]:
    if not isinstance(entry, Mapping):
        yield f"{where}={entry!r}: must be a section {{name, source, weight, only}}"
        return
    for unknown in [name for name in entry if name not in _KEYS]:
        yield f"{where}.{unknown}: there is no such key; there are {', '.join(_KEYS)}"
    source, name, weight = entry.get("source"), entry.get("name"), entry.get("weight", 1.0)
    if not isinstance(source, str):
        yield f"{where}.source={source!r}: must be {_SOURCES}"
    if name is not None and not (isinstance(name, str) and _NAME.fullmatch(name)):
        yield f"{where}.name={name!r}: must be a word of letters, digits and _.-"
    if not _is_number(weight):
        yield f"{where}.weight={weight!r}: must be a number"
    yield from _problems_of_only(entry.get("only"), where)
    is_function = isinstance(source, str) and ".py:" in source
    seconds, parallel = entry.get("timeout_seconds"), entry.get("max_parallel")
    if seconds is not None and not (is_function and _is_number(seconds) and seconds > 0):
        yield f"{where}.timeout_seconds={seconds!r}: must be a number above 0, and is for functions (FILE.py:NAME)"
    if parallel is not None and not (isinstance(parallel, int) and not isinstance(parallel, bool) and parallel > 0):
        yield f"{where}.max_parallel={parallel!r}: must be a whole number above 0"
    if parallel is not None and source in ("exact_match", "service"):
        yield f"{where}.max_parallel={parallel!r}: is not for {source}"


def _problems_of_only(only: Any, where: str) -> Iterator[str]:
    if only is None:
        return
    if not isinstance(only, Mapping) or not only:
        yield f"{where}.only={only!r}: must be fields of the prompts' lines with their values, such as {{task: math}}"
        return
    for field, value in only.items():
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(v, str | int | float | None) for v in values):
            yield f"{where}.only.{field}={value!r}: must be a text, a number, True, False, null or a list of them"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _only(entry: Mapping[str, Any]) -> dict[str, list[Any]]:
    only = entry.get("only") or {}
    return {str(field): value if isinstance(value, list) else [value] for field, value in only.items()}


def _name(entry: Mapping[str, Any]) -> str:
    """The section's name, or what its source is called: a function, or a service's model."""
    return entry.get("name") or re.split(r"[:/]", entry["source"])[-1]


def _build(
    entry: Mapping[str, Any],
    where: str,
    service: Callable[[], RewardSource] | None,
    limits: ClientLimits,
    token: str | None,
) -> RewardSource:
    source, parallel = entry["source"], entry.get("max_parallel")
    if source == "exact_match":
        return ExactMatch()
    if source == "math_verify":
        return MathRewards(parallel)
    if source == "service":
        if service is None:
            raise RewardConfigError(f"{where}.source=service: this job has no reward service; give {_SOURCES}")
        return service()
    if "://" in source:
        url, model = _url(source, where)
        setting = f"{where}.source"
        return RemoteRewards(
            RewardClient(url, model, limits=limits, token=token, max_parallel=parallel or 8, setting=setting)
        )
    if source.endswith(".py") or ".py:" in source:
        function = load_function(source, f"{where}.source")
        seconds = float(entry.get("timeout_seconds") or DEFAULT_SECONDS)
        return FunctionRewards(function, source, seconds=seconds, max_parallel=parallel)
    raise RewardConfigError(f"{where}.source={source}: there is no such source; give {_SOURCES}")


def _url(source: str, where: str) -> tuple[str, str]:
    """The address of a service, and the name of its model."""
    parts = urllib.parse.urlsplit(source)
    model = parts.path.removeprefix("/")
    try:
        is_whole = parts.scheme == "http" and parts.hostname and parts.port and model and "/" not in model
    except ValueError:  # the port is no number
        is_whole = False
    if not is_whole or parts.query or parts.fragment or parts.username:
        raise RewardConfigError(f"{where}.source={source}: a service is written http://HOST:PORT/MODEL")
    return f"http://{parts.netloc}", model
