"""Settings of the algorithm that cannot work together, or do nothing: estimator, policy loss, rewards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import ListConfig, OmegaConf

from nemo_style_aligner.algorithms.job_view import RESPONSES, Check, JobView, as_served, base_config
from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.config import ConfigError, load_defaults
from nemo_style_aligner.config_types import values
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.models.heads import RewardHeadConfig
from nemo_style_aligner.models.policy_losses import LOSSES
from nemo_style_aligner.models.restore import lay_over
from nemo_style_aligner.rl.estimators import ESTIMATORS, Estimator, find_estimator
from nemo_style_aligner.rl.math_verifier import MathVerifier
from nemo_style_aligner.rl.reward_config import REWARDS, RewardSpec, reward_specs
from nemo_style_aligner.rl.reward_functions import require_arguments
from nemo_style_aligner.user_code import UserCodeError, load_function

_ESTIMATOR, _GROUP, _LOSS = "trainer.ppo.estimator", RESPONSES[1], "trainer.ppo.policy_loss"
_CLIPPED = ("ppo", "gspo")
_LONGEST = "model.ppo.length_params.max_length"


def _estimator_of(view: JobView) -> Estimator | None:
    """None if there is no such estimator, and on ranks that only generate, whose machine may lack the user's file."""
    try:
        return None if view.only_generates else find_estimator(str(view.get(_ESTIMATOR)), _ESTIMATOR)
    except UserError:
        return None


def needs_critic(view: JobView) -> bool:
    """Whether there must be a critic, as far as can be told."""
    estimator = _estimator_of(view)
    return estimator is None or estimator.needs_values


def uses_reward_service(view: JobView) -> bool:
    """Whether rewards come from the service that ``remote_critic_rm`` names."""
    return any(spec.kind == "service" for spec in _specs(view))


def shares_secret(view: JobView) -> bool:
    """Whether the actor job serves anybody, or asks a service."""
    is_asking = needs_critic(view) or any(spec.kind in ("service", "url") for spec in _specs(view))
    return is_asking or bool(view.get("trainer.ppo.batch_iterator.use_flask"))


def _specs(view: JobView) -> list[RewardSpec]:
    """Where rewards come from; nowhere if that cannot be read, which `_rewards` reports."""
    with contextlib.suppress(ConfigError):
        return reward_specs(_plain_rewards(view))
    return []


def _plain_rewards(view: JobView) -> Any:
    rewards = view.get(REWARDS)
    return OmegaConf.to_container(rewards, resolve=True) if isinstance(rewards, ListConfig) else None


def _estimator(view: JobView) -> Iterator[str]:
    if view.only_generates:
        return
    try:
        estimator = find_estimator(str(view.get(_ESTIMATOR)), _ESTIMATOR)
    except UserError as error:
        yield str(error)
        return
    if estimator.needs_groups and view.get(_GROUP) == 1:
        yield f"{view.said(_ESTIMATOR, _GROUP)}: it compares the responses to a prompt; give 2 or more"
    if estimator.needs_values and view.get("remote_critic_rm.critic") is None:
        others = ", ".join(name for name, other in ESTIMATORS.items() if not other.needs_values)
        yield f"{view.said(_ESTIMATOR)} needs a critic, which only train_gpt_ppo_actor.py has; choose one of {others}"
    warm_up = "trainer.ppo.critic_warmup_steps"
    if not estimator.needs_values and view.get(warm_up):
        yield f"{view.said(warm_up, _ESTIMATOR)}: there is no critic to warm up; set {warm_up}=0"


def _policy_loss(view: JobView) -> Iterator[str]:
    loss, dual, high = str(view.get(_LOSS)), "trainer.ppo.dual_clip", "model.ppo.ratio_eps_high"
    is_users = loss not in LOSSES
    if is_users and ":" not in loss:
        yield f"{_LOSS}={loss}: choose {', '.join(LOSSES)}, or give a file and a function of yours, FILE.py:NAME"
    elif is_users and not view.only_generates:
        try:
            load_function(loss, _LOSS)
        except UserCodeError as error:
            yield str(error)
    if view.get(dual) is not None and loss != "ppo" and not is_users:
        yield f"{view.said(dual, _LOSS)}: only ppo has this bound; set {dual}=null"
    if view.get(high) is not None and loss not in _CLIPPED and not is_users:
        yield f"{view.said(high, _LOSS)}: only {' and '.join(_CLIPPED)} clip ratios so; set {high}=null"
    constant, aggregation = "trainer.ppo.loss_constant_length", "trainer.ppo.loss_aggregation"
    if view.get(constant) is not None and view.get(aggregation) != "sequence_sum":
        yield f"{view.said(constant, aggregation)}: only sequence_sum divides by it; set {constant}=null"
    kl_in, weight = "trainer.ppo.kl_in", "trainer.ppo.initial_policy_kl_penalty"
    if view.get(kl_in) == "loss" and view.get(weight) == 0:
        yield f"{view.said(kl_in, weight)}: there is no penalty to put there; give it a weight, or set {kl_in}=reward"


def _dynamic_sampling(view: JobView) -> Iterator[str]:
    enable, staleness = "trainer.ppo.dynamic_sampling.enable", "trainer.ppo.staleness"
    if not view.get(enable):
        return
    if view.get(_GROUP) == 1:
        yield f"{view.said(enable, _GROUP)}: it compares the rewards of a prompt's responses; give 2 or more"
    if view.get(staleness):
        yield (
            f"{view.said(enable, staleness)}: what a step generates ahead is fixed before its rewards are known; set "
            f"{staleness}=0"
        )


def _overlong(view: JobView) -> Iterator[str]:
    buffer, longest = "trainer.ppo.overlong.buffer_tokens", view.get(_LONGEST)
    if longest and (view.get(buffer) or 0) > longest:
        yield f"{view.said(buffer)} is longer than the longest response, {view.said(_LONGEST)}; lower it"


def _rewards(view: JobView) -> Iterator[str]:
    try:
        specs = reward_specs(_plain_rewards(view))
    except ConfigError as error:
        yield from str(error).splitlines()
        return
    if view.only_generates:
        return
    for place, spec in enumerate(specs):
        key = f"{REWARDS}[{place}].source"
        yield from _misfits(view, spec.source, key) if spec.kind == "archive" else _missing(spec, key)


def _misfits(view: JobView, path: str, key: str) -> Iterator[str]:
    """Problems of a reward model in this job, as far as its config tells."""
    try:
        given = OmegaConf.to_container(as_served(view.cfg).model, resolve=True)
        config = lay_over(base_config(path, key), given)
        problems = ModelArchitecture.from_nemo_config(config).layout_problems(view.tp_size, view.pp_size)
        RewardHeadConfig.from_model_config(config)
    except (ValueError, KeyError) as error:
        problems = [str(error.args[0])]
    for problem in problems:
        yield problem if problem.startswith(key) else f"{key}={path}: {problem}"


def _missing(spec: RewardSpec, key: str) -> Iterator[str]:
    """A problem if what a source of rewards needs is not on this machine."""
    try:
        if spec.kind == "function":
            require_arguments(load_function(spec.source, key), f"{key}={spec.source}")
        elif spec.kind == "math_verify":
            MathVerifier()
    except UserError as error:
        yield str(error) if str(error).startswith(key) else f"{key}={spec.source}: {error}"


RL_CHECKS: tuple[Check, ...] = (_estimator, _policy_loss, _dynamic_sampling, _overlong, _rewards)


def settings_in_vain(view: JobView) -> Iterator[str]:
    """A line for each of an actor's settings that makes others that have been given pointless, with these."""
    defaults, present = load_defaults(view.name), dict(values(view.cfg))
    for key, patterns in _in_vain(view):
        given = [
            name
            for name, value in present.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns) and value != OmegaConf.select(defaults, name)
        ]
        if given:
            yield f"{view.said(*given)}: no effect with {view.said(key)}"


def _in_vain(view: JobView) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Keys, each with patterns of those that have no effect with its present value."""
    loss, service = view.get(_LOSS), "remote_critic_rm"
    if not needs_critic(view):
        of_critic = ("critic.*", "combine_rm_and_critic_server", "trained_critic", "journal_*", "timeouts.training_*")
        yield _ESTIMATOR, tuple(f"{service}.{name}" for name in of_critic)
        if view.get(_ESTIMATOR) in ESTIMATORS:
            yield _ESTIMATOR, ("trainer.ppo.gae_lambda",)
    if loss in LOSSES and loss not in _CLIPPED:
        yield _LOSS, ("model.ppo.ratio_eps",)
    if loss in LOSSES and loss != "cispo":
        yield _LOSS, ("model.ppo.cispo_ratio_max",)
    if not view.get("trainer.ppo.dynamic_sampling.enable"):
        yield "trainer.ppo.dynamic_sampling.enable", ("trainer.ppo.dynamic_sampling.max_rounds",)
    if view.get("trainer.ppo.overlong.buffer_tokens") == 0:
        yield "trainer.ppo.overlong.buffer_tokens", ("trainer.ppo.overlong.penalty",)
    if view.get(REWARDS) is None:
        yield REWARDS, ("trainer.ppo.reward_functions.*",)
