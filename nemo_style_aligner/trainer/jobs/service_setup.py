"""The critic and reward services, from their configs: jobs of their own, or ranks set apart in an actor's job."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from nemo_style_aligner.engine.parallel.detection import LOOPBACK
from nemo_style_aligner.engine.parallel.groups import ParallelLayout
from nemo_style_aligner.engine.parallel.machine import is_on_one_machine, own_address
from nemo_style_aligner.guard.http_server import ConnectionLimits
from nemo_style_aligner.guard.secret import resolve_token
from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_weights
from nemo_style_aligner.trainer.checkpoints.random_states import random_states, set_random_states
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.loading import log_directory
from nemo_style_aligner.trainer.jobs.critic_setup import make_critic, make_optimizer
from nemo_style_aligner.trainer.jobs.job_setup import (
    Run,
    forward_batching,
    lay_out,
    register_model,
    start_run,
    start_service_watchdog,
    start_timeline,
)
from nemo_style_aligner.trainer.jobs.placement import critic_config, frozen_config
from nemo_style_aligner.trainer.launch.ending import abort_job
from nemo_style_aligner.trainer.launch.initialization import bind_address
from nemo_style_aligner.trainer.launch.roles import CRITIC, REFERENCE, TEACHER, Channel
from nemo_style_aligner.trainer.launch.stop_signals import stops
from nemo_style_aligner.trainer.models.critic import RewardModel
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.restore import BaseModel, open_base_model
from nemo_style_aligner.trainer.rl.rollouts.setup import sampling_params
from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints
from nemo_style_aligner.trainer.services.critic_service import CriticService, LogprobService, RewardService
from nemo_style_aligner.trainer.services.endpoints import ModelLimits
from nemo_style_aligner.trainer.services.exactly_once.ledger import TrainingLedger
from nemo_style_aligner.trainer.services.model_server import DispatchSettings, ModelServer
from nemo_style_aligner.trainer.services.routes import HttpSettings
from nemo_style_aligner.trainer.services.scores import REWARDS, Score, ScoreEndpoint, ScoringBackend
from nemo_style_aligner.trainer.training.run_control import RunControl, parse_duration

_LISTEN_SECONDS = 0.2  # between two looks at whether the job ends


def run_critic(config: schema.Critic, channel: Channel | None = None) -> int:
    """Serve a critic until the job ends; return the job's exit status. Collective.

    Args:
        config: of a critic's job.
        channel: to the ranks that train, where these are ranks of their job.
    """
    run = start_run(config)
    base, config = open_base_model(config.pretrained_checkpoint.restore_from_path, config)
    register_model(config, run, base)
    server = listen_as_critic(config.trainer.ppo, run, base)
    status = serve(server, lambda: build_critic_service(config, run, base, server.ledger), run.control, channel)
    run.close()
    return status


def run_frozen_model(
    config: schema.RewardService, channel: Channel | None = None, temperature: float | None = None
) -> int:
    """Serve a model that is never trained until the job ends; see `run_critic`.

    Args:
        temperature: of the log-probs that it gives; None: it is a reward model.
    """
    layout = lay_out(config.model, config.trainer.distributed_timeout_minutes)
    control = RunControl(parse_duration(config.exp_manager.max_time_per_run))
    watchdog = start_service_watchdog(config.exp_manager)
    base, config = open_base_model(config.rm_model_file, config, key="rm_model_file")
    if temperature is None:
        scores = [Score(REWARDS.name, columns=RewardHeadConfig.from_model_config(base.config).num_rewards)]
    else:
        scores = [*LogprobService.scores]
    server = listen_as_frozen_model(config.inference, layout, base, scores)

    def build() -> ScoringBackend:
        if temperature is None:
            return build_reward_service(config, base)
        return LogprobService(base.load(trainable=False), temperature, forward_batching(config.model))

    status = serve(server, build, control, channel)
    if watchdog is not None:
        watchdog.stop()
    return status


def serve_in_job(config: schema.PPOActor, channel: Channel) -> int:
    """Serve the model that this rank of an actor's job is set apart for; return the job's exit status. Collective."""
    start_timeline(config.exp_manager, log_directory(config.exp_manager))
    host = LOOPBACK if is_on_one_machine() else None
    if channel.role == CRITIC:
        return run_critic(critic_config(config).changed({"trainer.ppo.host": host}), channel)
    served = frozen_config(config, channel.role).changed({"inference.host": host})
    if channel.role not in (REFERENCE, TEACHER):
        return run_frozen_model(served, channel)
    sampling = sampling_params(config.model.ppo, config.trainer.ppo.trt_llm.seed)
    return run_frozen_model(served, channel, sampling.logprob_temperature)


def listen_as_critic(ppo: schema.CriticLoop, run: Run, base: BaseModel) -> ModelServer:
    """Open the critic's port: the service is alive from now on, and ready once `serve` runs the backend."""
    combined = ppo.combine_rm_and_critic_server
    endpoints = critic_endpoints(_limits(base), combined=combined, **_scoring(ppo, base))
    http = _http_settings(ppo, "trainer.ppo", ppo.command_timeout_seconds)
    return ModelServer(endpoints, http, _dispatch(ppo, run.layout))


def listen_as_frozen_model(
    section: schema.RewardServer, layout: ParallelLayout, base: BaseModel, scores: Sequence[Score]
) -> ModelServer:
    """Open the port of a model that is never trained and gives ``scores``; see `listen_as_critic`."""
    endpoint = ScoreEndpoint(section.model_name, scores, _limits(base), **_scoring(section, base))
    return ModelServer([endpoint], _http_settings(section, "inference"), _dispatch(section, layout))


def build_critic_service(config: schema.Critic, run: Run, base: BaseModel, ledger: TrainingLedger) -> CriticService:
    """Build the critic, its optimizer and (if combined) the reward model, resumed if there is a checkpoint.

    If combined, both start from the reward model's weights.
    """
    head = RewardHeadConfig.from_model_config(base.config, merge_attributes=True)
    is_combined = config.trainer.ppo.combine_rm_and_critic_server
    model = base.load(head=head, needs_head=is_combined)
    reward_model, weights = None, None
    if is_combined:
        # Frozen before a checkpoint is loaded: the reward model never changes.
        weights = FrozenWeights(model, config.model.rm_placement, lambda: base.build(head=head, trainable=False))
        reward_model = RewardModel(weights, head, forward_batching(config.model))
    critic = make_critic(config, model, head, weights)
    initial_random_states = random_states()
    # The archive may be a language model's, which has no head: then nothing else keeps the head's initial values. Nor
    # has it adapters.
    apart = [p for name, p in model.named_parameters() if name.startswith("rm_head.") or ".adapter." in name]
    initial = [p.detach().clone() for p in apart]

    def reset() -> None:
        load_nemo_weights(base.path, model)
        for parameter, values in zip(apart, initial, strict=True):
            parameter.data.copy_(values)
        critic.optimizer = make_optimizer(config, model)
        set_random_states(initial_random_states)

    service = CriticService(critic, reward_model, ledger, run.checkpoints, run.metrics, reset)
    run.resume(config, model, critic.optimizer, service)
    critic.optimizer.schedule.warn_if_nothing_decays()
    return service


def build_reward_service(config: schema.RewardService, base: BaseModel) -> RewardService:
    """Build the service of a reward model that is never trained."""
    head = RewardHeadConfig.from_model_config(base.config)
    model = base.load(head=head, trainable=False, needs_head=True)
    return RewardService(RewardModel(model, head, forward_batching(config.model)))


def serve(
    server: ModelServer, build: Callable[[], ScoringBackend], control: RunControl, channel: Channel | None
) -> int:
    """Serve until a rank is asked to stop or the time is up; return the job's exit status, the same on every rank.

    In an actor's job (``channel``) the ranks that train are told where, and they decide when the job stops.
    """
    if channel is not None and dist.get_rank() == 0:
        host = LOOPBACK if is_on_one_machine() else own_address()
        channel.put(f"{channel.role}/address", json.dumps([host, server.port]).encode())
    backend = build()
    control.begin()
    if channel is None:
        control.watch_service(server.request_stop)
        server.run(backend)
        return control.service_status()
    stops.divert(lambda number: True)
    ending = threading.Thread(target=_end_with_job, args=(channel, server.request_stop), daemon=True)
    ending.start()
    server.run(backend, heeds_signals=False)
    ending.join()  # it uses the store, which rank 0 may close next
    return int(channel.read("ending"))


def _end_with_job(channel: Channel, stop: Callable[[], None]) -> None:
    try:
        while not channel.has("ending"):
            time.sleep(_LISTEN_SECONDS)
    except dist.DistError:  # the job's rank 0 is gone, and with it the job
        abort_job(1)
    stop()


def _limits(base: BaseModel) -> ModelLimits:
    return ModelLimits(
        max_sequence_length=base.max_sequence_length,
        vocab_size=base.architecture.vocab_size,
        tokenizer=base.tokenizer.fingerprint(),
    )


def _scoring(section: schema.Service, base: BaseModel) -> dict[str, Any]:
    """How requests for scores become batches, as a `ScoreEndpoint` takes it."""
    multiple = section.strip_sequence_length_to_multiple or 1
    return {"tokenize": base.tokenizer.text_as_trained, "length_multiple": multiple}


def _dispatch(section: schema.Service, layout: ParallelLayout) -> DispatchSettings:
    sizes = section.inference_micro_batch_size  # NeMo-Aligner's configs may list several
    return DispatchSettings(
        max_batch_rows=(sizes if isinstance(sizes, int) else max(sizes)) * layout.dp_size,
        max_queue_delay_microseconds=section.max_queue_delay_microseconds,
    )


def _http_settings(section: schema.Service, key: str, command_seconds: float = 3600) -> HttpSettings:
    """From the config's section at ``key``."""
    return HttpSettings(
        port=section.port,
        host=bind_address(section.host),
        section=key,
        token=resolve_token(section.token, f"{key}.token"),
        known_as=tuple(section.known_as),
        max_body_bytes=section.max_body_bytes,
        max_outstanding_requests=section.max_outstanding_requests,
        infer_timeout_s=section.infer_timeout_seconds,
        command_timeout_s=command_seconds,
        connections=ConnectionLimits(**vars(section.connections)),
    )
