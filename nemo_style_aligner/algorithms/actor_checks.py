"""Settings of the actor job that cannot work together: rollouts, engines, ranks that only generate, services."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterator

from nemo_style_aligner.algorithms.job_view import (
    GLOBAL_BATCH,
    LENGTH,
    PP,
    RESPONSES,
    ROLLOUT_RANKS,
    TP,
    Check,
    JobView,
)
from nemo_style_aligner.algorithms.rl_checks import RL_CHECKS, needs_critic, uses_reward_service
from nemo_style_aligner.generation.trtllm.construct import TensorRTLLMMismatch, TensorRTLLMUnavailable, find_trtllm
from nemo_style_aligner.rl.rollouts.setup import engine_size

_PPO_LENGTH = "model.ppo.length_params.max_length"


def _rollout_batches(view: JobView) -> Iterator[str]:
    if not view.get(GLOBAL_BATCH) or view.responses is None or view.responses % view.get(GLOBAL_BATCH) == 0:
        return
    product = "" if view.get(RESPONSES[1]) == 1 else f": their product, {view.responses},"
    yield f"{view.responses_said}{product} is not a multiple of {view.said(GLOBAL_BATCH)}; change one of them"


def _rollout_lengths(view: JobView) -> Iterator[str]:
    length, response = view.get(LENGTH), view.get(_PPO_LENGTH)
    if not length or not response:
        return
    prompt, bos = "trainer.ppo.trt_llm.max_input_len", bool(view.get("model.ppo.sampling_params.add_BOS"))
    text = "a BOS token and a prompt" if bos else "a prompt"
    room = min(length, view.get("model.data.seq_length") or length) - response
    if room < 1 + bos:
        yield (
            f"{view.said(_PPO_LENGTH)} leaves no room for {text} in {view.said(LENGTH, 'model.data.seq_length')}; "
            "lower it or raise them"
        )
    elif not isinstance(view.get(prompt), int):  # found by the check of single values
        return
    elif view.get(prompt) < 1 + bos:
        yield f"{view.said(prompt)}: must be {1 + bos} or more, for {text}"
    elif view.get(prompt) + response > length:
        yield f"{view.said(prompt)} + {view.said(_PPO_LENGTH)} is longer than {view.said(LENGTH)}; lower one of them"
    memory = "trainer.ppo.generation.kv_cache_tokens"
    if view.get(memory) is not None and view.get(memory) < response + 1:
        yield (
            f"{view.said(memory)} cannot hold one sequence: a prompt and {view.said(_PPO_LENGTH)}; raise it or set it "
            "to null"
        )


def _generation(view: JobView) -> Iterator[str]:
    ppo = "trainer.ppo"
    engine, size = f"{ppo}.generation.engine", f"{ppo}.generation.tensor_parallel_size"
    trt_llm = f"{ppo}.trt_llm.enable"
    if view.get(engine) == "megatron" and view.get(trt_llm):
        yield f"{view.said(engine, trt_llm)} ask for two engines: set {trt_llm}=False, or {engine}=trtllm"
    if view.get(engine) == "megatron" and view.pp_size > 1:
        yield f"{view.said(engine)} cannot generate with {view.said(PP)}; choose embedded"
    parallel = "model.sequence_parallel"
    if view.get(engine) == "megatron" and view.get(parallel) and view.tp_size > 1:
        yield f"{view.said(engine)} cannot generate with {view.said(parallel, TP)}; choose embedded"
    ranks = engine_size(view.get(size), bool(view.get(f"{ppo}.trt_llm.reshard")), view.tp_size, view.pp_size)
    if view.get(engine) != "embedded" or ranks == 1:
        return
    generating = view.rollout_ranks or view.world_size
    if generating % ranks:
        yield f"{view.said(size)}: {generating} ranks cannot be divided into groups of {ranks}"
    if view.architecture is not None and ranks != view.tp_size:
        yield from view.architecture.layout_problems(ranks, engine_key=size)


def _trtllm(view: JobView) -> Iterator[str]:
    """Asked for by name, TensorRT-LLM must be there; `choose_engine` would find out only when the critic is ready."""
    engine = "trainer.ppo.generation.engine"
    if view.get(engine) != "trtllm":
        return
    try:
        find_trtllm(view.cfg)
    except (TensorRTLLMUnavailable, TensorRTLLMMismatch) as error:
        yield f"{view.said(engine)}: {error}"


def _rollout_ranks(view: JobView) -> Iterator[str]:
    staleness, unload = "trainer.ppo.staleness", "trainer.ppo.trt_llm.unload_engine_train"
    if view.get(staleness) and not view.rollout_ranks:
        yield (
            f"{view.said(staleness)} with {view.said(ROLLOUT_RANKS)}: no rank is free to generate while a step trains; "
            f"set {ROLLOUT_RANKS} to the number of ranks that only generate, or set {staleness}=0"
        )
    if not view.rollout_ranks:
        return
    engine, trt_llm = "trainer.ppo.generation.engine", "trainer.ppo.trt_llm.enable"
    if view.get(engine) != "embedded" or view.get(trt_llm):
        yield (
            f"{view.said(engine, trt_llm)} with {view.said(ROLLOUT_RANKS)}: ranks that only generate use the "
            f"embedded engine; set {engine}=embedded and {trt_llm}=False, or {ROLLOUT_RANKS}=0"
        )
    if view.get(unload):
        yield f"{view.said(unload, ROLLOUT_RANKS)}: training shares no memory with rollout ranks; leave it out"


def _importance(view: JobView) -> Iterator[str]:
    key = "trainer.ppo.importance_sequence_bounds"
    bounds = view.get(key)
    if bounds is not None and (len(bounds) != 2 or not 0 <= bounds[0] < bounds[1]):
        yield f"{key}={bounds}: give two numbers, a lower bound of at least 0 and an upper bound above it"


def _policy_logprobs(view: JobView) -> Iterator[str]:
    key, ppo = "trainer.ppo.policy_logprobs", "trainer.ppo"
    if view.get(key) != "engine":
        return
    corrections = [f"{ppo}.{name}" for name in ("importance_weight_cap", "importance_sequence_bounds")]
    if asked := [name for name in corrections if view.get(name) is not None]:
        yield (
            f"{view.said(key, *asked)}: without the trainer's log-probs there are no importance ratios; choose "
            f"{key}=trainer, or set {' and '.join(asked)} to null"
        )


def _kl_estimator(view: JobView) -> Iterator[str]:
    absolute, estimator = "trainer.ppo.use_absolute_kl", "trainer.ppo.kl_estimator"
    if view.get(absolute) is False and view.get(estimator) == "abs":
        yield f"{view.said(absolute, estimator)} contradict each other: choose {estimator}=k1, or {absolute}=True"


def _services(view: JobView) -> Iterator[str]:
    critic, reward = "remote_critic_rm.critic", "remote_critic_rm.reward_model"
    has_critic = view.get(critic) is not None and needs_critic(view)
    if has_critic:
        yield from _host(view, f"{critic}.ip")
    if not uses_reward_service(view) or (has_critic and view.get("remote_critic_rm.combine_rm_and_critic_server")):
        return
    yield from _host(view, f"{reward}.ip")
    if has_critic and all(view.get(f"{critic}.{part}") == view.get(f"{reward}.{part}") for part in ("ip", "port")):
        yield (
            f"{view.said(f'{critic}.port', f'{reward}.port')}: the critic and the reward model cannot share an "
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
        yield f"{view.said(key)}: give only a host name or address, such as node7; the port goes into {port}"


ACTOR_CHECKS: tuple[Check, ...] = (
    _rollout_batches,
    _rollout_lengths,
    _generation,
    _trtllm,
    _rollout_ranks,
    _importance,
    _policy_logprobs,
    _kl_estimator,
    *RL_CHECKS,
    _services,
)
