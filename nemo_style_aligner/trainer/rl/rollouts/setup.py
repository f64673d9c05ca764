"""Builds what makes responses from the actor job's config: sampling, engine, work source, generator."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationEngine, SamplingParams, text_before_end
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine, compile_ahead, num_pages
from nemo_style_aligner.engine.parallel.groups import (
    ParallelLayout,
    broadcast_object,
    control_group,
    device,
    neighbour_group,
)
from nemo_style_aligner.engine.parallel.machine import is_on_one_machine, own_address
from nemo_style_aligner.engine.shard import EngineGroup, TensorParallel
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.engine.vocabulary import vocabulary_options
from nemo_style_aligner.engine.weights.stream import lendable_weights
from nemo_style_aligner.guard.secret import resolve_token
from nemo_style_aligner.trainer.config.loading import ConfigError, log_directory
from nemo_style_aligner.trainer.config.schema import ActorLoop, Generation, Policy, PPOActor, Program, RemoteCritic
from nemo_style_aligner.trainer.launch import roles
from nemo_style_aligner.trainer.launch.roles import Channel
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.rl.episodes.journal import FOLDER, EpisodeJournal
from nemo_style_aligner.trainer.rl.episodes.runner import build_environment
from nemo_style_aligner.trainer.rl.rollouts.collector import Generator
from nemo_style_aligner.trainer.rl.rollouts.disaggregated import RemoteGenerator, RolloutRank
from nemo_style_aligner.trainer.rl.rollouts.generator import LocalGenerator
from nemo_style_aligner.trainer.rl.rollouts.in_flight import in_flight
from nemo_style_aligner.trainer.rl.rollouts.trtllm import TensorRTLLMUnavailable, find_trtllm, trtllm_engine
from nemo_style_aligner.trainer.rl.rollouts.work_queue import (
    StaticPartition,
    WorkQueueClient,
    WorkQueueServer,
    WorkSource,
)
from nemo_style_aligner.wording import counted, unescaped

logger = logging.getLogger(__name__)

_WILDCARDS = ("0.0.0.0", "::")  # addresses to listen on that workers elsewhere cannot connect to


# ---- sampling and engine -------------------------------------------------------------------------


def sampling_params(policy: Policy, seed: int, tokenizer: Tokenizer | None = None) -> SamplingParams:
    """``model.ppo.sampling_params`` and ``length_params`` as the engine's `SamplingParams`.

    With the policy's ``tokenizer``, responses also end as the policy has learnt.

    Raises:
        ValueError: a value that it does not allow.
        TokenizerError: an end string could never be found.
    """
    sampling, length = policy.sampling_params, policy.length_params
    ends = tuple(map(_end_string, sampling.end_strings or ()))
    return SamplingParams(
        max_new_tokens=length.max_length,
        min_new_tokens=length.min_length,
        use_greedy=sampling.use_greedy,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        stop_strings=ends if tokenizer is None else tokenizer.end_strings(ends),
        seed=seed,
    )


def _end_string(given: object) -> str:
    """An end string: YAML reads some as numbers."""
    if not isinstance(given, str | int | float) or isinstance(given, bool):
        raise ValueError(f"end_strings has {given!r} in it, which is no text: put it in quotes")
    return unescaped(str(given))


def choose_engine(ppo: ActorLoop) -> str:
    """The engine's name: ``trainer.ppo.generation.engine``, or trtllm instead of embedded with ``trt_llm.enable``.

    Where TensorRT-LLM cannot be used, ``trt_llm.enable`` falls back to the embedded engine.

    Raises:
        RuntimeError: TensorRT-LLM is asked for by name and missing, or installed in a version that does not fit.
    """
    name = ppo.generation.engine
    if name == "trtllm":
        find_trtllm(ppo.trt_llm.sidecar_python)
    elif ppo.trt_llm.enable:
        try:
            find_trtllm(ppo.trt_llm.sidecar_python)
        except TensorRTLLMUnavailable as reason:
            logger.info("trainer.ppo.trt_llm.enable=True: %s. Until then the embedded engine is used.", reason)
        else:
            name = "trtllm"
    return name


def require_kv_cache(section: Generation, max_sequence_length: int) -> None:
    """Make sure that an embedded engine's KV cache holds a sequence of this length, before one is built.

    Raises:
        ConfigError: it does not.
    """
    if section.engine == "embedded":
        try:
            num_pages(section.kv_cache_tokens, 1, max_sequence_length)
        except ValueError as error:
            raise ConfigError(f"trainer.ppo.generation.{error}") from error


def compile_engine_ahead(config: PPOActor, architecture: ModelArchitecture, dtype: torch.dtype) -> None:
    """Begin to compile what this rank's engine will need, if it is to have the embedded one."""
    ppo = config.trainer.ppo
    generates = not ppo.rollout_devices or roles.is_rollout_rank()
    if generates and choose_engine(ppo) != "trtllm":
        compile_ahead(ppo.generation.step, architecture, dtype, device(), _size_of_engine(config))


def build_engine(
    config: PPOActor, model: MegatronModel, tokenizer: Tokenizer, max_sequence_length: int
) -> tuple[GenerationEngine, EngineGroup]:
    """Build this rank's generation engine; return it and the ranks that share it. Collective.

    The embedded engine is shared by `engine_size` neighbouring ranks, independently of the training layout's groups;
    TensorRT-LLM by a tensor-parallel group of that layout.

    Raises:
        ValueError: a key of ``trainer.ppo.generation`` is wrong, or ranks or model cannot be divided as it says.
    """
    if choose_engine(config.trainer.ppo) == "trtllm":
        options = _engine_options(config, model.architecture, tokenizer, max_sequence_length)
        group = training_group(config, model.layout)
        penalty = config.model.ppo.sampling_params.repetition_penalty
        engine = trtllm_engine(config.trainer.ppo, penalty, model, group, **options)
        engine.build()
        return engine, group
    return build_embedded_engine(
        config, model.architecture, model.config.params_dtype, tokenizer, max_sequence_length, lender=model
    )


def build_embedded_engine(
    config: PPOActor,
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    tokenizer: Tokenizer,
    max_sequence_length: int,
    *,
    lender: MegatronModel | None = None,
) -> tuple[GenerationEngine, EngineGroup]:
    """Build this rank's embedded engine; see `build_engine`. It may use the weights of ``lender`` in place."""
    group = _generation_ranks(config)
    ranks = group.tensor_parallel
    section = config.trainer.ppo.generation
    # Where a round ends by counted passes, these must not depend on what an engine remembers of earlier rounds.
    counts_passes = bool(config.trainer.ppo.staleness) and in_flight(config.trainer.ppo) != "wait"
    engine = EmbeddedEngine(
        architecture,
        dtype=dtype,
        device=device(),
        kv_cache_tokens=section.kv_cache_tokens,
        prefill_chunk_tokens=section.prefill_chunk_tokens,
        tensor_parallel=ranks,
        step=section.step,
        lookup_decoding=False if counts_passes else section.lookup_decoding,
        records_routes=True,
        trainer_weights=None if lender is None else functools.partial(lendable_weights, lender, ranks.rank, ranks.size),
        **_engine_options(config, architecture, tokenizer, max_sequence_length),
    )
    try:
        engine.build()
    except torch.OutOfMemoryError as error:
        gib = architecture.num_parameters * dtype.itemsize / ranks.size / 2**30
        raise ValueError(
            f"the generation engine does not fit into memory beside the model in training: its weights alone take "
            f"{gib:.0f} GiB on each of the {ranks.size} ranks that share it. Let more ranks share it "
            "(trainer.ppo.generation.tensor_parallel_size, or trainer.ppo.trt_llm.reshard=True with pipeline stages), "
            "or give it less memory for keys and values (trainer.ppo.generation.kv_cache_tokens, num_slots)"
        ) from error
    return engine, group


def _engine_options(
    config: PPOActor, architecture: ModelArchitecture, tokenizer: Tokenizer, max_sequence_length: int
) -> dict[str, Any]:
    """Options that every engine takes."""
    return {
        "num_slots": config.trainer.ppo.generation.num_slots or config.model.ppo.rollout_micro_batch_size,
        "max_sequence_length": max_sequence_length,
        **vocabulary_options(architecture, tokenizer),
    }


def training_group(config: PPOActor, layout: ParallelLayout) -> EngineGroup:
    """This rank's tensor-parallel group of the training layout. Collective."""
    process_group = parallel_state.get_tensor_model_parallel_group() if layout.tp_size > 1 else None
    return EngineGroup(
        TensorParallel(layout.tp_rank, layout.tp_size, process_group),
        index=layout.replica * layout.pp_size + layout.pp_rank,
        count=layout.num_replicas * layout.pp_size,
        control=_control_group(config, layout.tp_size),
        leader=parallel_state.get_tensor_model_parallel_src_rank(),
    )


def engine_size(asked: int | None, reshard: bool, tp_size: int, pp_size: int) -> int:
    """Ranks that share an embedded engine.

    Args:
        asked: ``trainer.ppo.generation.tensor_parallel_size``.
        reshard: ``trainer.ppo.trt_llm.reshard``: generate with training's tensor parallelism, but without its pipeline
            stages. No effect where training has no stages.
        tp_size, pp_size: of training.
    """
    return asked or (tp_size if reshard and pp_size > 1 else 1)


def _size_of_engine(config: PPOActor) -> int:
    ppo, model = config.trainer.ppo, config.model
    tp_size, pp_size = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    return engine_size(ppo.generation.tensor_parallel_size, ppo.trt_llm.reshard, tp_size, pp_size)


def _generation_ranks(config: PPOActor) -> EngineGroup:
    """The ranks that share this rank's embedded engine. Collective.

    Raises:
        ValueError: the ranks of the job cannot be divided into groups of that size.
    """
    size = _size_of_engine(config)
    try:
        process_group = neighbour_group(size, config.trainer.distributed_timeout_minutes)
    except ValueError as error:
        raise ValueError(f"trainer.ppo.generation.tensor_parallel_size={size}: {error}") from error
    rank, count = dist.get_rank(), dist.get_world_size() // size
    logger.info("generation: %s of %s each", counted(count, "engines"), counted(size, "ranks"))
    return EngineGroup(
        TensorParallel(rank % size, size, process_group),
        index=rank // size,
        count=count,
        control=_control_group(config, size),
        leader=rank - rank % size,
    )


def _control_group(config: PPOActor, size: int) -> dist.ProcessGroup | None:
    """The group in which an engine's ranks wait while their leader waits for the queue or a sidecar. Collective."""
    seconds = max(vars(config.trainer.ppo.trt_llm.timeouts).values())
    return control_group(size, max(config.trainer.distributed_timeout_minutes, seconds / 60))


# ---- work and generator -------------------------------------------------------------------------


def open_work_queue(config: PPOActor) -> WorkQueueServer | None:
    """Start the Flask work queue (``trainer.ppo.batch_iterator.use_flask``) on the first rank that generates.

    Returns None on all other ranks, and without ``use_flask``. Call it before weights are read, so that a port that is
    taken is reported at once.

    Raises:
        OSError: its address cannot be bound.
        SecretError: the shared secret cannot be used.
    """
    section, channel = config.trainer.ppo.batch_iterator, roles.channel()
    generates = channel is None or channel.generates
    if not section.use_flask or not generates or dist.get_rank() != 0:
        return None
    return WorkQueueServer(
        host=section.host or _reachable_address(),
        port=section.port,
        token=shared_token(config.remote_critic_rm),
        section="trainer.ppo.batch_iterator",
    )


def build_work_source(
    config: PPOActor, engine: GenerationEngine, group: EngineGroup, queue: WorkQueueServer | None
) -> WorkSource:
    """A client of the queue that `open_work_queue` started; a fixed partition without ``use_flask``. Collective."""
    if not config.trainer.ppo.batch_iterator.use_flask:
        return StaticPartition(group.index, group.count, config.trainer.ppo.num_rollouts_per_prompt)
    address = None
    if queue is not None:
        queue.queue.workers = group.count
        address = (_reachable_address() if queue.host in _WILDCARDS else queue.host, queue.port)
    host, port = broadcast_object(address)
    return WorkQueueClient(
        host, port, token=shared_token(config.remote_critic_rm), server=queue, slots=engine.num_slots
    )


def _reachable_address() -> str:
    """An address of this machine that all ranks of the job reach."""
    return "127.0.0.1" if is_on_one_machine() else own_address()


def shared_token(remote: RemoteCritic) -> str | None:
    """The secret that this job shares with the services; None: there is no authentication."""
    return resolve_token(remote.token, "remote_critic_rm.token")


def build_generator(
    config: PPOActor,
    model: MegatronModel,
    tokenizer: Tokenizer,
    max_sequence_length: int,
    queue: WorkQueueServer | None,
) -> Generator:
    """The generator of responses: this rank's engine, or the job's rollout ranks. Collective."""
    channel = roles.channel()
    if channel is not None and not channel.generates:
        return RemoteGenerator(
            channel,
            model.architecture,
            model.config.params_dtype,
            max_sequence_length,
            config.trainer.ppo.batch_iterator.wait_seconds,
            config.trainer.ppo.staleness,
        )
    return _local_generator(config, tokenizer, *build_engine(config, model, tokenizer, max_sequence_length), queue)


def build_rollout_rank(
    config: PPOActor, channel: Channel, architecture: ModelArchitecture, dtype: torch.dtype, tokenizer: Tokenizer
) -> RolloutRank:
    """What a rollout rank runs. Its engine is built when the training ranks send the maximum sequence length."""
    queue = open_work_queue(config)

    def build(max_sequence_length: int) -> LocalGenerator:
        engine, group = build_embedded_engine(config, architecture, dtype, tokenizer, max_sequence_length)
        return _local_generator(config, tokenizer, engine, group, queue)

    return RolloutRank(channel, architecture, dtype, build)


def _local_generator(
    config: PPOActor,
    tokenizer: Tokenizer,
    engine: GenerationEngine,
    group: EngineGroup,
    queue: WorkQueueServer | None,
) -> LocalGenerator:
    work = build_work_source(config, engine, group, queue)
    minutes = max(config.trainer.distributed_timeout_minutes, config.trainer.ppo.batch_iterator.wait_seconds / 60)
    meeting = control_group(dist.get_world_size(), minutes)
    sampling = sampling_params(config.model.ppo, config.trainer.ppo.trt_llm.seed, tokenizer)
    named, environment = config.trainer.ppo.environment, None
    if named is not None:
        assert isinstance(engine, EmbeddedEngine)  # the config's checks have seen to it
        environment = build_environment(
            named,
            "trainer.ppo.environment",
            engine,
            tokenizer,
            sampling,
            response_text(sampling, tokenizer),
            config.trainer.ppo.episodes,
            episode_journal(config),
        )
    return LocalGenerator(engine, work, sampling, group, meeting, environment)


def episode_journal(config: PPOActor) -> EpisodeJournal | None:
    """The journal of a run whose environment is a program; None of any other."""
    is_program = isinstance(config.trainer.ppo.environment, Program)
    return EpisodeJournal(log_directory(config.exp_manager) / FOLDER) if is_program else None


def response_text(sampling: SamplingParams, tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """What gives the text of a response's tokens, without what ended it."""

    def decode(token_ids: Sequence[int]) -> str:
        ids, least = tokenizer.without_end(list(token_ids)), sampling.min_new_tokens
        return text_before_end(ids, tokenizer.ids_to_text, sampling.stop_strings, least)

    return decode
