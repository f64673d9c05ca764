"""Settings of an actor job that cannot work together, or do nothing: the algorithm, rollouts, engines, services."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import ListConfig, OmegaConf

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.config.schema import ListedReward
from nemo_style_aligner.trainer.jobs.job_view import (
    BEST,
    ETP,
    GLOBAL_BATCH,
    GROUP,
    KL_PENALTY,
    LENGTH,
    PP,
    PROMPTS,
    ROLLOUT_RANKS,
    TEACHER_ARCHIVE,
    TP,
    JobView,
    as_served,
    base_config,
)
from nemo_style_aligner.trainer.jobs.placement import (
    frozen_spec,
    has_critic_here,
    has_reward_model_here,
)
from nemo_style_aligner.trainer.launch.roles import REFERENCE, ROLLOUT, TEACHER
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.lora import LoraSettings
from nemo_style_aligner.trainer.models.policy_losses import LOSSES, find_policy_loss
from nemo_style_aligner.trainer.models.restore import lay_over
from nemo_style_aligner.trainer.rl.episodes.runner import check_environment
from nemo_style_aligner.trainer.rl.estimators import ESTIMATORS, Estimator, find_estimator
from nemo_style_aligner.trainer.rl.experience import kl_estimator
from nemo_style_aligner.trainer.rl.math_verifier import MathVerifier
from nemo_style_aligner.trainer.rl.reward_config import LAYOUT, REWARDS, kind_of, reward_problems, reward_specs
from nemo_style_aligner.trainer.rl.reward_functions import load_reward_function
from nemo_style_aligner.trainer.rl.rollouts.in_flight import in_flight
from nemo_style_aligner.trainer.rl.rollouts.setup import engine_size
from nemo_style_aligner.trainer.rl.rollouts.trtllm import TensorRTLLMMismatch, TensorRTLLMUnavailable, find_trtllm

_PPO_LENGTH = "model.ppo.length_params.max_length"
ESTIMATOR, LOSS = "trainer.ppo.estimator", "trainer.ppo.policy_loss"
CLIPPED = ("ppo", "gspo")
"""Losses that clip ratios."""


# ---- rollouts, engines, services ----------------------------------------------------------------


def _rollout_batches(view: JobView) -> Iterator[str]:
    batch = view.get(GLOBAL_BATCH)
    if not batch or view.responses % batch == 0 or (view.responses < batch and not view.config.is_chosen(GLOBAL_BATCH)):
        return
    product = "" if view.responses == view.get(PROMPTS) else f": their product, {view.responses},"
    yield f"{view.shown_responses}{product} is not a multiple of {view.show(GLOBAL_BATCH)}; change one of them"


def _rollout_lengths(view: JobView) -> Iterator[str]:
    length, response = view.get(LENGTH), view.get(_PPO_LENGTH)
    prompt, bos = "trainer.ppo.trt_llm.max_input_len", bool(view.get("model.ppo.sampling_params.add_BOS"))
    text = "a BOS token and a prompt" if bos else "a prompt"
    room = min(length, view.get("model.data.seq_length")) - response
    if room < 1 + bos:
        yield (
            f"{view.show(_PPO_LENGTH)} leaves no room for {text} in {view.show(LENGTH, 'model.data.seq_length')}; "
            "lower it or raise them"
        )
    elif view.get(prompt) < 1 + bos:
        yield f"{view.show(prompt)}: must be {1 + bos} or more, for {text}"
    elif view.get(prompt) + response > length:
        yield f"{view.show(prompt)} + {view.show(_PPO_LENGTH)} is longer than {view.show(LENGTH)}; lower one of them"
    memory = "trainer.ppo.generation.kv_cache_tokens"
    if view.get(memory) is not None and view.get(memory) < response + 1:
        yield (
            f"{view.show(memory)} cannot hold one sequence: a prompt and {view.show(_PPO_LENGTH)}; raise it or set it "
            "to null"
        )


def _generation(view: JobView) -> Iterator[str]:
    ppo = "trainer.ppo"
    engine, size = f"{ppo}.generation.engine", f"{ppo}.generation.tensor_parallel_size"
    ranks = engine_size(view.get(size), bool(view.get(f"{ppo}.trt_llm.reshard")), view.tp_size, view.pp_size)
    if view.get(engine) != "embedded" or ranks == 1:
        return
    generating = view.rollout_ranks or view.training_ranks
    if generating % ranks:
        yield f"{view.show(size)}: {generating} ranks cannot be divided into groups of {ranks}"
    if view.architecture is not None and ranks != view.tp_size:
        yield from view.architecture.layout_problems(ranks, engine_key=size)


def _trtllm(view: JobView) -> Iterator[str]:
    """Asked for by name, TensorRT-LLM must be there; `choose_engine` would find out only when the critic is ready."""
    engine = "trainer.ppo.generation.engine"
    if view.get(engine) != "trtllm":
        return
    try:
        find_trtllm(view.actor.trainer.ppo.trt_llm.sidecar_python)
    except (TensorRTLLMUnavailable, TensorRTLLMMismatch) as error:
        yield f"{view.show(engine)}: {error}"


def _rollout_ranks(view: JobView) -> Iterator[str]:
    staleness, unload = "trainer.ppo.staleness", "trainer.ppo.trt_llm.unload_engine_train"
    if view.get(staleness) and not view.rollout_ranks:
        yield (
            f"{view.show(staleness)} with {view.show(ROLLOUT_RANKS)}: no rank is free to generate while a step trains; "
            f"set {ROLLOUT_RANKS} to the number of ranks that only generate, or set {staleness}=0"
        )
    if not view.rollout_ranks:
        return
    engine, trt_llm = "trainer.ppo.generation.engine", "trainer.ppo.trt_llm.enable"
    if view.get(engine) != "embedded" or view.get(trt_llm):
        yield (
            f"{view.show(engine, trt_llm)} with {view.show(ROLLOUT_RANKS)}: ranks that only generate use the "
            f"embedded engine; set {engine}=embedded and {trt_llm}=False, or {ROLLOUT_RANKS}=0"
        )
    kept, environment = "trainer.ppo.in_flight", "trainer.ppo.environment"
    guesses = "trainer.ppo.generation.lookup_decoding"
    if view.get(staleness) and in_flight(view.actor.trainer.ppo) != "wait" and view.get(guesses):
        yield (
            f"{view.show(guesses, staleness, kept)}: where responses outlive a round, it ends by counted passes, which "
            f"guesses would change; leave {guesses} out, or choose {kept}=wait"
        )
    if view.get(staleness) and view.get(kept) in ("keep", "restart") and view.get(environment) is not None:
        yield f"{view.show(kept, environment)}: an episode ends with the weights that it began with; set {kept}=wait"
    if view.get(unload):
        yield f"{view.show(unload, ROLLOUT_RANKS)}: training shares no memory with rollout ranks; leave it out"


def _importance(view: JobView) -> Iterator[str]:
    for key in ("trainer.ppo.importance_sequence_bounds", "trainer.ppo.importance_token_bounds"):
        bounds = view.get(key)
        if bounds is not None and (len(bounds) != 2 or not 0 <= bounds[0] < bounds[1]):
            yield f"{key}={bounds}: give two numbers, a lower bound of at least 0 and an upper bound above it"
    region, cap = "trainer.ppo.trust_region", "trainer.ppo.importance_weight_cap"
    if view.get(region) == "sampling" and view.get(cap) is not None:
        yield f"{view.show(region, cap)}: its ratios are those to the engine already; set {cap}=null"


def _policy_logprobs(view: JobView) -> Iterator[str]:
    key, ppo = "trainer.ppo.policy_logprobs", "trainer.ppo"
    if view.get(key) != "engine":
        return
    ratios = ("importance_weight_cap", "importance_sequence_bounds", "importance_token_bounds")
    corrections = [f"{ppo}.{name}" for name in ratios]
    if asked := [name for name in corrections if view.get(name) is not None]:
        yield (
            f"{view.show(key, *asked)}: without the trainer's log-probs there are no importance ratios; choose "
            f"{key}=trainer, or set {' and '.join(asked)} to null"
        )


def _kl_estimator(view: JobView) -> Iterator[str]:
    absolute, estimator = "trainer.ppo.use_absolute_kl", "trainer.ppo.kl_estimator"
    if view.get(absolute) is False and view.get(estimator) == "abs":
        yield f"{view.show(absolute, estimator)} contradict each other: choose {estimator}=k1, or {absolute}=True"


def _services(view: JobView) -> Iterator[str]:
    critic, reward = "remote_critic_rm.critic", "remote_critic_rm.reward_model"
    has_critic = view.get(critic) is not None and has_remote_critic(view)
    if has_critic:
        yield from _host(view, f"{critic}.ip")
    if not uses_reward_service(view) or (has_critic and view.get("remote_critic_rm.combine_rm_and_critic_server")):
        return
    yield from _host(view, f"{reward}.ip")
    if has_critic and all(view.get(f"{critic}.{part}") == view.get(f"{reward}.{part}") for part in ("ip", "port")):
        yield (
            f"{view.show(f'{critic}.port', f'{reward}.port')}: the critic and the reward model cannot share an "
            "address; give the reward model's, or set remote_critic_rm.combine_rm_and_critic_server=True"
        )


def _host(view: JobView, key: str) -> Iterator[str]:
    host = str(view.get(key))
    is_plain = re.fullmatch(r"([\w-]{1,63}\.)*[\w-]{1,63}\.?", host) is not None
    if ":" in host and not re.search(r"[\s/]", host):
        with contextlib.suppress(ValueError):
            is_plain = bool(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    if not is_plain:
        port = key.removesuffix("ip") + "port"
        yield f"{view.show(key)}: give only a host name or address, such as node7; the port goes into {port}"


# ---- the algorithm ------------------------------------------------------------------------------


def estimator_of(view: JobView) -> Estimator | None:
    """None if there is no such estimator, and on ranks that only generate, whose machine may lack the user's file."""
    try:
        return None if view.is_apart else find_estimator(str(view.get(ESTIMATOR)), ESTIMATOR)
    except UserError:
        return None


def needs_critic(view: JobView) -> bool:
    """Whether there must be a critic, as far as can be told."""
    estimator = estimator_of(view)
    return estimator is None or estimator.needs_values


def has_remote_critic(view: JobView) -> bool:
    """Whether there must be a critic in a job of its own."""
    return needs_critic(view) and not has_critic_here(view.actor)


def uses_reward_service(view: JobView) -> bool:
    """Whether rewards come from the service that ``remote_critic_rm`` names."""
    is_here = needs_critic(view) and has_critic_here(view.actor) and has_reward_model_here(view.actor)
    return not is_here and any(kind_of(spec.source) == "service" for spec in listed_rewards(view))


def shares_secret(view: JobView) -> bool:
    """Whether the actor job serves anybody, or asks a service."""
    asks_others = any(kind_of(spec.source) == "url" for spec in listed_rewards(view))
    is_asking = has_remote_critic(view) or uses_reward_service(view) or asks_others
    serves = bool({*view.apart} - {ROLLOUT}) or bool(view.get("trainer.ppo.batch_iterator.use_flask"))
    return is_asking or serves


def listed_rewards(view: JobView) -> list[ListedReward]:
    """Where rewards come from; nowhere if that cannot be read, which `_rewards` reports."""
    return [] if _reward_problems(view) else reward_specs(view.actor.trainer.ppo.rewards)


def _reward_problems(view: JobView) -> list[str]:
    rewards = view.get(REWARDS)
    plain: Any = OmegaConf.to_container(rewards, resolve=True) if isinstance(rewards, ListConfig) else []
    return [*reward_problems(plain)]


def _replayed_routes(view: JobView) -> Iterator[str]:
    key, enable, engine = "trainer.ppo.replay_routes", "trainer.ppo.trt_llm.enable", "trainer.ppo.generation.engine"
    if not view.get(key):
        return
    if view.architecture is not None and view.architecture.experts is None:
        yield f"{view.show(key)}: the model has no experts; leave it out"
    flight, staleness = "trainer.ppo.in_flight", "trainer.ppo.staleness"
    if view.get(staleness) and in_flight(view.actor.trainer.ppo) == "keep":
        yield (
            f"{view.show(key, staleness, flight)}: a response that goes on with new weights has been computed with the "
            f"experts of both; choose {flight}=restart or wait"
        )
    if view.get(engine) == "trtllm" or view.get(enable):
        yield f"{view.show(key, engine, enable)}: TensorRT-LLM does not tell its routes; choose engine=embedded"


def _estimator(view: JobView) -> Iterator[str]:
    if view.is_apart:
        return
    try:
        estimator = find_estimator(str(view.get(ESTIMATOR)), ESTIMATOR)
    except UserError as error:
        yield str(error)
        return
    if estimator.needs_groups and view.get(GROUP) == 1:
        yield f"{view.show(ESTIMATOR, GROUP)}: it compares the responses to a prompt; give 2 or more"
    if estimator.needs_values and view.get("remote_critic_rm.critic") is None:
        others = ", ".join(name for name, other in ESTIMATORS.items() if not other.needs_values)
        yield f"{view.show(ESTIMATOR)} needs a critic, which only train_gpt_ppo_actor.py has; choose one of {others}"
    warm_up = "trainer.ppo.critic_warmup_steps"
    if not estimator.needs_values and view.get(warm_up):
        yield f"{view.show(warm_up, ESTIMATOR)}: there is no critic to warm up; set {warm_up}=0"


def _policy_loss(view: JobView) -> Iterator[str]:
    loss, dual, high = str(view.get(LOSS)), "trainer.ppo.dual_clip", "model.ppo.ratio_eps_high"
    is_users = loss not in LOSSES
    if is_users and not view.is_apart:
        try:
            find_policy_loss(loss, LOSS)
        except UserError as error:
            yield str(error)
    if view.get(dual) is not None and loss != "ppo" and not is_users:
        yield f"{view.show(dual, LOSS)}: only ppo has this bound; set {dual}=null"
    if view.get(high) is not None and loss not in CLIPPED and not is_users:
        yield f"{view.show(high, LOSS)}: only {' and '.join(CLIPPED)} clip ratios so; set {high}=null"
    constant, aggregation = "trainer.ppo.loss_constant_length", "trainer.ppo.loss_aggregation"
    if view.get(constant) is not None and view.get(aggregation) != "sequence_sum":
        yield f"{view.show(constant, aggregation)}: only sequence_sum divides by it; set {constant}=null"
    kl_in = "trainer.ppo.kl_in"
    if view.get(kl_in) == "loss" and view.get(KL_PENALTY) == 0:
        yield f"{view.show(kl_in, KL_PENALTY)}: there is no penalty to put there; give it one, or set {kl_in}=reward"
    chosen, absolute = "trainer.ppo.kl_estimator", "trainer.ppo.use_absolute_kl"
    if view.get(kl_in) == "loss" and kl_estimator(view.actor.trainer.ppo) == "k1":
        yield (
            f"{view.show(kl_in, chosen, absolute)}: the gradient of k1 is 0 on average, whatever the divergence, so "
            f"this would add noise and no penalty; set {chosen}=k3, or {kl_in}=reward"
        )


def _best_of_n(view: JobView) -> Iterator[str]:
    best, group = view.get(BEST), view.get(GROUP)
    if best is not None and best > group:
        yield f"{view.show(BEST, GROUP)}: there are not so many responses to choose from; lower the former"
    if view.get(ESTIMATOR) == "best_of_n" and (best is None or best == group):
        yield f"{view.show(ESTIMATOR, GROUP, BEST)}: all responses would be imitated, bad ones too; lower the last"
    whitens = "trainer.ppo.normalize_advantages"
    if view.get(ESTIMATOR) == "best_of_n" and view.get(whitens):
        yield f"{view.show(ESTIMATOR, whitens)}: its advantages are all 1, and whitened 0; set {whitens}=null"


def _dynamic_sampling(view: JobView) -> Iterator[str]:
    enable = "trainer.ppo.dynamic_sampling.enable"
    if view.get(enable) and view.get(GROUP) == 1:
        yield f"{view.show(enable, GROUP)}: it compares the rewards of a prompt's responses; give 2 or more"


def _overlong(view: JobView) -> Iterator[str]:
    buffer, longest = "trainer.ppo.overlong.buffer_tokens", view.get(_PPO_LENGTH)
    if longest and (view.get(buffer) or 0) > longest:
        yield f"{view.show(buffer)} is longer than the longest response, {view.show(_PPO_LENGTH)}; lower it"


def _rewards(view: JobView) -> Iterator[str]:
    yield from (problems := _reward_problems(view))
    if problems or view.is_apart:
        return
    specs = listed_rewards(view)
    if not specs and not view.get(TEACHER_ARCHIVE):
        yield f"{REWARDS}=[]: nothing would be rewarded; list a source, or give null for the service"
    for place, spec in enumerate(specs):
        entry = f"{REWARDS}[{place}]"
        yield from (
            _misfits(view, spec, entry, "source")
            if kind_of(spec.source) == "archive"
            else _missing(spec, f"{entry}.source")
        )


def _environment(view: JobView) -> Iterator[str]:
    """Episodes need the embedded engine, and rewards of their own."""
    key, enable, engine = "trainer.ppo.environment", "trainer.ppo.trt_llm.enable", "trainer.ppo.generation.engine"
    named = view.actor.trainer.ppo.environment
    is_rewarded = any(kind_of(spec.source) == "environment" for spec in listed_rewards(view))
    if is_rewarded and named is None:
        yield f"{REWARDS} has the source environment, but there is none: give {key}"
    if named is None:
        return
    if view.get(REWARDS) is None:
        yield (
            f"{view.show(key)}: say where its rewards come from: {REWARDS}=[{{source: environment}}] for what the "
            "function returns, or other sources, which score the last reply"
        )
    if view.get(engine) != "embedded" or view.get(enable):
        yield f"{view.show(key, engine, enable)}: episodes are generated by the embedded engine alone"
    if not view.is_apart:
        try:
            check_environment(named, key)
        except UserError as error:
            yield str(error)


def _teacher(view: JobView) -> Iterator[str]:
    path, weight = view.get(TEACHER_ARCHIVE), f"{TEACHER}.weight"
    yield from _own_ranks(view, TEACHER, TEACHER_ARCHIVE, "there is no teacher")
    if path and not view.is_apart:
        yield from _misfits(view, frozen_spec(view.actor, TEACHER), TEACHER, "restore_from_path")
    if path and not view.get(weight):
        yield f"{view.show(TEACHER_ARCHIVE, weight)}: nothing would be learnt from it; give a weight, or leave it out"
    if not path and view.get(ESTIMATOR) == "on_policy_distillation":
        yield f"{view.show(ESTIMATOR, TEACHER_ARCHIVE)}: there is nobody to learn from; give a teacher"


def _reference(view: JobView) -> Iterator[str]:
    devices, start = f"{REFERENCE}.devices", "model.peft.restore_from_path"
    yield from _own_ranks(view, REFERENCE, KL_PENALTY, "nothing asks for the initial policy")
    if not view.get(devices):
        return
    if view.architecture is not None:
        yield from _layout_problems(view, frozen_spec(view.actor, REFERENCE), REFERENCE, view.architecture)
    lora, init = LoraSettings.from_config(view.config.given.model), "model.peft.lora_tuning.row_init_method"
    if lora is not None and (view.get(start) or "zero" not in (lora.init_a, lora.init_b)):
        yield (
            f"{view.show(devices, start, init)}: a reference there has no adapters, and the policy begins with some "
            f"that are not 0; merge them into its archive (nsa convert), or set {devices}=0"
        )


def _own_ranks(view: JobView, role: str, needed: str, why_not: str) -> Iterator[str]:
    """Problems of keys that say which ranks a model has, which there is with the key ``needed``."""
    devices, *sizes = (f"{role}.{name}" for name in LAYOUT)
    if view.get(devices) and not view.get(needed):
        yield f"{view.show(devices, needed)}: {why_not}; set {devices}=0"
    if not view.get(devices) and (given := [size for size in sizes if view.get(size) != 1]):
        yield f"{view.show(*given)}: it is of ranks that this model has for itself: give {devices}"


def _misfits(view: JobView, spec: ListedReward, role: str, source: str) -> Iterator[str]:
    """Problems of a frozen model in this job, as far as its config tells; the key ``source`` names its archive."""
    key = f"{role}.{source}"
    try:
        config = lay_over(base_config(spec.source, key), as_served(view.config).model_given())
        RewardHeadConfig.from_model_config(config)
        problems = [*_layout_problems(view, spec, role, ModelArchitecture.from_nemo_config(config))]
    except (ValueError, KeyError) as error:
        problems = [str(error.args[0])]
    for problem in problems:
        yield problem if problem.startswith(role) else f"{key}={spec.source}: {problem}"


def _layout_problems(view: JobView, spec: ListedReward, role: str, architecture: ModelArchitecture) -> Iterator[str]:
    """Why a frozen model cannot be divided among the ranks that train, or its own."""
    if not spec.devices:
        yield from architecture.layout_problems(view.tp_size, view.pp_size)
        yield from architecture.expert_layout_problems(view.ep_size, view.etp_size)
        return
    tp, pp = spec.tensor_parallel_size, spec.pipeline_parallel_size
    if spec.devices % (tp * pp):
        yield f"{role}.devices={spec.devices}: not a multiple of its parallel sizes, {tp} x {pp}"
    for problem in [*architecture.layout_problems(tp, pp), *architecture.expert_layout_problems(1, tp)]:
        for key, own in ((TP, "tensor_parallel_size"), (ETP, "tensor_parallel_size"), (PP, "pipeline_parallel_size")):
            problem = problem.replace(key, f"{role}.{own}")
        yield problem


def _missing(spec: ListedReward, key: str) -> Iterator[str]:
    """A problem if what a source of rewards needs is not on this machine."""
    try:
        if kind_of(spec.source) == "function":
            load_reward_function(spec.source, key)
        elif kind_of(spec.source) == "math_verify":
            MathVerifier()
    except UserError as error:
        yield str(error) if str(error).startswith(key) else f"{key}={spec.source}: {error}"


def actor_problems(view: JobView) -> Iterator[str]:
    """The problems of an actor's settings: key=value, why it cannot be, what to do."""
    for check in (
        *(_rollout_batches, _rollout_lengths, _generation, _trtllm, _rollout_ranks, _importance, _policy_logprobs),
        _replayed_routes,
        *(
            _kl_estimator,
            _estimator,
            _policy_loss,
            _best_of_n,
            _dynamic_sampling,
            _overlong,
            _rewards,
            _environment,
            _services,
        ),
        *(_environment, _reference, _teacher),
    ):
        yield from check(view) if view.is_actor else ()
