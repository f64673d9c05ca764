"""Builds what makes responses from the actor job's config: sampling, work source, generator."""

from __future__ import annotations

import torch
import torch.distributed as dist
from omegaconf import DictConfig

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.data.tokenizer import Tokenizer
from nemo_style_aligner.generation.engine import GenerationEngine, SamplingParams
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel import worlds
from nemo_style_aligner.parallel.groups import broadcast_object, control_group
from nemo_style_aligner.parallel.machine import is_on_one_machine, own_address
from nemo_style_aligner.parallel.worlds import Link
from nemo_style_aligner.rl.rollouts.engine_setup import build_embedded_engine, build_engine
from nemo_style_aligner.rl.rollouts.generator import Generator, LocalGenerator
from nemo_style_aligner.rl.rollouts.remote import RemoteGenerator
from nemo_style_aligner.rl.rollouts.rollout_ranks import RolloutRank
from nemo_style_aligner.rl.rollouts.work_client import WorkerLimits, WorkQueueClient
from nemo_style_aligner.rl.rollouts.work_queue import WorkQueue
from nemo_style_aligner.rl.rollouts.work_server import WorkQueueServer
from nemo_style_aligner.rl.rollouts.work_source import StaticPartition, WorkSource
from nemo_style_aligner.servers.secret import resolve_token
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.wording import unescaped

_WILDCARDS = ("0.0.0.0", "::")  # addresses to listen on that workers elsewhere cannot connect to


def sampling_params(cfg: DictConfig, tokenizer: Tokenizer | None = None) -> SamplingParams:
    """``model.ppo.sampling_params`` and ``length_params`` as the engine's `SamplingParams`.

    With the policy's ``tokenizer``, responses also end as the policy has learnt.

    Raises:
        ValueError: a value that it does not allow.
        TokenizerError: an end string could never be found.
    """
    sampling, length = cfg.model.ppo.sampling_params, cfg.model.ppo.length_params
    ends = tuple(map(_end_string, sampling.end_strings or ()))
    return SamplingParams(
        max_new_tokens=int(length.max_length),
        min_new_tokens=int(length.min_length),
        use_greedy=bool(sampling.use_greedy),
        temperature=float(sampling.temperature),
        top_k=int(sampling.top_k),
        top_p=float(sampling.top_p),
        repetition_penalty=float(sampling.repetition_penalty),
        stop_strings=ends if tokenizer is None else tokenizer.end_strings(ends),
        seed=int(cfg.trainer.ppo.trt_llm.seed),
    )


def _end_string(given: object) -> str:
    """An end string: YAML reads some as numbers."""
    if not isinstance(given, str | int | float) or isinstance(given, bool):
        raise ValueError(f"end_strings has {given!r} in it, which is no text: put it in quotes")
    return unescaped(str(given))


def open_work_queue(cfg: DictConfig) -> WorkQueueServer | None:
    """Start the Flask work queue (``trainer.ppo.batch_iterator.use_flask``) on the first rank that generates.

    Returns None on all other ranks, and without ``use_flask``. Call it before weights are read, so that a port that is
    taken is reported at once.

    Raises:
        OSError: its address cannot be bound.
        SecretError: the shared secret cannot be used.
    """
    section, link = cfg.trainer.ppo.batch_iterator, worlds.link()
    generates = link is None or link.is_rollout_rank
    if not section.use_flask or not generates or dist.get_rank() != 0:
        return None
    return WorkQueueServer(
        WorkQueue(float(section.lease_seconds)),
        host=section.host or _reachable_address(),
        port=int(section.port),
        token=shared_token(cfg),
        section="trainer.ppo.batch_iterator",
    )


def build_work_source(
    cfg: DictConfig, engine: GenerationEngine, group: EngineGroup, queue: WorkQueueServer | None
) -> WorkSource:
    """A client of the queue that `open_work_queue` started; a fixed partition without ``use_flask``. Collective."""
    section = cfg.trainer.ppo.batch_iterator
    if not section.use_flask:
        return StaticPartition(group.index, group.count, int(cfg.trainer.ppo.num_rollouts_per_prompt))
    address = None
    if queue is not None:
        queue.queue.workers = group.count
        address = (_reachable_address() if queue.host in _WILDCARDS else queue.host, queue.port)
    host, port = broadcast_object(address)
    limits = WorkerLimits(
        lease_seconds=float(section.lease_seconds),
        stall_seconds=float(section.stall_seconds),
        wait_seconds=float(section.wait_seconds),
    )
    return WorkQueueClient(
        host,
        port,
        limits,
        token=shared_token(cfg),
        server=queue,
        slots=engine.num_slots,
        progress=lambda: activity.current().progress,  # what the watchdog looks at, too
        poll_seconds=max(0.5, dist.get_world_size() / 100),  # at most 100 polls a second from all ranks together
    )


def _reachable_address() -> str:
    """An address of this machine that all ranks of the job reach."""
    return "127.0.0.1" if is_on_one_machine() else own_address()


def shared_token(cfg: DictConfig) -> str | None:
    return resolve_token(cfg.remote_critic_rm.token, "remote_critic_rm.token")


def build_generator(
    cfg: DictConfig,
    model: MegatronModel,
    tokenizer: Tokenizer,
    max_sequence_length: int,
    queue: WorkQueueServer | None,
) -> Generator:
    """The generator of responses: this rank's engine, or the job's rollout ranks. Collective."""
    other_world = worlds.link()
    if other_world is not None:
        return RemoteGenerator(
            other_world,
            model.architecture,
            model.config.params_dtype,
            max_sequence_length,
            float(cfg.trainer.ppo.batch_iterator.wait_seconds),
        )
    return _local_generator(cfg, tokenizer, *build_engine(cfg, model, tokenizer, max_sequence_length), queue)


def build_rollout_rank(
    cfg: DictConfig, link: Link, architecture: ModelArchitecture, dtype: torch.dtype, tokenizer: Tokenizer
) -> RolloutRank:
    """What a rollout rank runs. Its engine is built when the training ranks send the maximum sequence length."""
    queue = open_work_queue(cfg)

    def build(max_sequence_length: int) -> LocalGenerator:
        engine, group = build_embedded_engine(cfg, architecture, dtype, tokenizer, max_sequence_length)
        return _local_generator(cfg, tokenizer, engine, group, queue)

    return RolloutRank(link, architecture, dtype, build)


def _local_generator(
    cfg: DictConfig,
    tokenizer: Tokenizer,
    engine: GenerationEngine,
    group: EngineGroup,
    queue: WorkQueueServer | None,
) -> LocalGenerator:
    work = build_work_source(cfg, engine, group, queue)
    meeting = None
    if isinstance(work, StaticPartition):  # with the queue, ranks wait for each other there
        minutes = max(cfg.trainer.distributed_timeout_minutes, cfg.trainer.ppo.batch_iterator.wait_seconds / 60)
        meeting = control_group(dist.get_world_size(), minutes)
    return LocalGenerator(engine, work, sampling_params(cfg, tokenizer), group, meeting)
