"""What an actor's job does where: role by role, rank by rank, with memory per rank, before anything is loaded.

Bytes are those of docs/architecture.md (Memory). A role has some on the device all the time; others it gives back when
its turn is over, so that of these the largest counts.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import current_layout, device
from nemo_style_aligner.engine.parallel.machine import available_memory, ranks_on_this_machine
from nemo_style_aligner.kinds import Placement
from nemo_style_aligner.trainer.config.loading import ConfigError
from nemo_style_aligner.trainer.config.schema import ActorModel, CriticModel, PPOActor, TrainedModel
from nemo_style_aligner.trainer.jobs.placement import (
    CRITIC_ARCHIVE,
    critic_config,
    frozen_config,
    frozen_spec,
    has_critic_apart,
    has_reference_here,
    has_reward_model_here,
    strategy_of,
)
from nemo_style_aligner.trainer.launch.roles import CRITIC, REFERENCE, ROLLOUT, TEACHER, channel, ranks_apart
from nemo_style_aligner.trainer.models.activation_memory import activation_bytes
from nemo_style_aligner.trainer.models.frozen import placement_of
from nemo_style_aligner.trainer.models.gpt import uses_distributed_optimizer
from nemo_style_aligner.trainer.models.logprobs import chunk_bytes
from nemo_style_aligner.trainer.models.lora import LoraSettings
from nemo_style_aligner.trainer.models.restore import BaseModel, open_base_model
from nemo_style_aligner.trainer.models.sizes import Layout, Sizes
from nemo_style_aligner.trainer.rl.local_critic import LocalCritic
from nemo_style_aligner.trainer.rl.remote_critic import RemoteCritic
from nemo_style_aligner.trainer.rl.remote_scores import RemoteScores
from nemo_style_aligner.trainer.rl.reward_config import REWARDS, reward_specs
from nemo_style_aligner.trainer.rl.reward_models import ModelRewards
from nemo_style_aligner.trainer.rl.rewards import RewardSource, RewardSum
from nemo_style_aligner.trainer.rl.rollouts.setup import engine_size
from nemo_style_aligner.trainer.rl.scoring import Scorer
from nemo_style_aligner.wording import counted, size_of

logger = logging.getLogger(__name__)

_COLUMNS = 32  # of the picture; with more ranks, each stands for several
_NOTHING = "."


@dataclasses.dataclass(frozen=True)
class Role:
    """A role of the job.

    Attributes:
        ranks: that have it; none: it is elsewhere.
        copies: by rank, in order, which copy of the model it has a part of.
        always, in_turn: bytes on the device of a rank: at any time, and besides while the role is at work.
        surely: of both, what does not depend on the length of sequences.
        note: what else there is to say.
    """

    name: str
    ranks: range = range(0)
    copies: Sequence[int] = ()
    always: float = 0
    in_turn: float = 0
    surely: float = 0
    note: str = ""


def announce_placement(config: PPOActor, policy: BaseModel, scorer: Scorer, teacher: BaseModel | None) -> None:
    """Log the picture on rank 0.

    Raises:
        ConfigError: weights, gradients and optimizer states do not fit into a rank's memory.
    """
    found = list(_roles(config, policy, scorer, teacher))
    layout, ranks = current_layout(), dist.get_world_size() + sum(ranks_apart(config.trainer.ppo).values())
    if dist.get_rank() == 0:
        heading = f"placement={strategy_of(config)}: {counted(ranks, 'ranks')}, {layout}"
        logger.info("%s", "\n".join([heading, *picture(found, ranks)]))
    if short := [*_shortages(found)]:
        raise ConfigError(
            "\n".join(short) + "\nUse more ranks with a larger tensor_model_parallel_size, offload_adam_states=True, "
            "trainer.ppo.reference_policy_placement=swap, or ranks or a job of its own for the critic "
            "(placement=interleave)"
        )


def picture(roles: Sequence[Role], ranks: int) -> Iterator[str]:
    """Lines: a column for each rank, in it the number of the copy of the model that it has a part of."""
    step = -(-ranks // _COLUMNS)
    columns = range(0, ranks, step)
    width = max(len(role.name) for role in roles)
    label = "rank" if step == 1 else f"every {step}th rank"
    numbers = "".join(f"{rank % 10:2}" for rank in columns) if step == 1 else ""
    yield f"  {label:{width}} {numbers}   on the device: always + in its turn".rstrip()
    for role in roles:
        copies = dict(zip(role.ranks, role.copies, strict=True))
        cells = "".join(f"{copies[rank] % 10 if rank in copies else _NOTHING:>2}" for rank in columns)
        memory = f"{size_of(role.always)} + {size_of(role.in_turn)}" if role.always or role.in_turn else ""
        yield f"  {role.name:{width}} {cells}   {memory}{'  ' if memory and role.note else ''}{role.note}".rstrip()


def _shortages(roles: Sequence[Role]) -> Iterator[str]:
    """A line for each kind of rank whose memory does not suffice."""
    there = _memory()
    for first in sorted({role.ranks[0] for role in roles if role.ranks}):
        here = [role for role in roles if first in role.ranks and role.surely]
        if here and (needed := _least(here)) > there:
            yield (
                f"rank {first} has {size_of(there)} of memory and needs {size_of(needed)} at once without activations: "
                f"{', '.join(f'{role.name} {size_of(role.surely)}' for role in here)}, less what is away between turns"
            )


def _least(roles: Sequence[Role]) -> float:
    """Bytes that a rank with these roles surely needs at once."""
    static = [max(0.0, role.surely - role.always) for role in roles]
    return sum(min(role.always, role.surely) for role in roles) + max(static)


def _memory() -> float:
    """Bytes of this rank's device, or of its share of this machine's memory."""
    if device().type == "cuda":
        return float(torch.cuda.get_device_properties(device()).total_memory)
    return available_memory() / ranks_on_this_machine()


# ---- the roles ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Place:
    """The ranks of a model, and its layout over them."""

    ranks: range
    layout: Layout

    @classmethod
    def apart(cls, role: str, tp: int, pp: int, cp: int = 1) -> _Place:
        """The ranks that a role has for itself."""
        to_others = channel()
        ranks = range(0) if to_others is None else to_others.ranks_of(role)
        return cls(ranks, Layout(tp, pp, len(ranks) // (tp * cp * pp), cp))

    @property
    def copies(self) -> list[int]:
        """By rank, in megatron-core's order: tensor, context, data, pipeline."""
        replicas = self.layout.cp * self.layout.dp
        return [place // self.layout.tp % replicas for place in range(len(self.ranks))]


def _roles(config: PPOActor, policy: BaseModel, scorer: Scorer, teacher: BaseModel | None) -> Iterator[Role]:
    ppo, itemsize, layout = config.trainer.ppo, policy.dtype.itemsize, current_layout()
    others = {"cp": layout.cp_size, "ep": layout.ep_size, "etp": layout.etp_size}
    here = _Place(range(dist.get_world_size()), Layout(layout.tp_size, layout.pp_size, layout.dp_size, **others))
    yield _trained("policy", config.model, policy.architecture, itemsize, here)
    if ppo.reference.devices:
        yield _apart("reference", config, REFERENCE, policy.architecture, itemsize)
    elif has_reference_here(ppo):
        yield _reference(config, policy.architecture, itemsize, here)
    if teacher is not None and ppo.teacher.devices:
        yield _apart("teacher", config, TEACHER, teacher.architecture, itemsize)
    elif teacher is not None:
        swaps = _swaps(ppo.reference_policy_placement, teacher.architecture, itemsize, here)
        yield _frozen("teacher", teacher.architecture, itemsize, here, swaps=swaps)
    yield from _critic(config, scorer, itemsize, here)
    for number, (spec, source) in enumerate(zip(reward_specs(ppo.rewards), _reward_sources(scorer), strict=True)):
        name, entry = f"reward {spec.name}" if ppo.rewards else "reward", f"{REWARDS}[{number}]"
        if spec.devices:
            base, _ = open_base_model(spec.source, frozen_config(config, entry), key=f"{entry}.source")
            yield _apart(name, config, entry, base.architecture, itemsize)
        else:
            yield _reward(name, source, itemsize, here)
    yield _engine(config, policy.architecture, itemsize, here)


def _critic(config: PPOActor, scorer: Scorer, itemsize: int, here: _Place) -> Iterator[Role]:
    """The critic's role, and that of the reward model beside it on ranks of their own."""
    if isinstance(scorer.values, LocalCritic):
        architecture = scorer.values.base.architecture
        swaps = _swaps(scorer.values.placement, architecture, itemsize, here)
        yield _trained("critic", critic_config(config).model, architecture, itemsize, here, swaps=swaps)
    elif scorer.values is not None and has_critic_apart(config):
        own = critic_config(config)
        base, own = open_base_model(own.pretrained_checkpoint.restore_from_path, own, key=CRITIC_ARCHIVE)
        architecture = base.architecture
        tp, pp = own.model.tensor_model_parallel_size, own.model.pipeline_model_parallel_size
        place = _Place.apart(CRITIC, tp, pp, own.model.context_parallel_size)
        yield _trained("critic", own.model, architecture, itemsize, place)
        if has_reward_model_here(config):
            swaps = _swaps(own.model.rm_placement, architecture, itemsize, place)
            yield _frozen("its reward model", architecture, itemsize, place, swaps=swaps)
    elif scorer.values is not None:
        section = config.remote_critic_rm.critic
        yield Role("critic", note=f"a job of its own at {section.ip}:{section.port}")


def _reward_sources(scorer: Scorer) -> list[RewardSource]:
    rewards = scorer.rewards
    return [one.source for one in rewards.sources] if isinstance(rewards, RewardSum) else [rewards]


def _reward(name: str, source: RewardSource, itemsize: int, here: _Place) -> Role:
    if isinstance(source, ModelRewards):
        architecture = source.base.architecture
        swaps = _swaps(source.placement, architecture, itemsize, here)
        return _frozen(name, architecture, itemsize, here, swaps=swaps)
    if isinstance(source, RemoteCritic):
        return Role(name, note="with the critic")
    if isinstance(source, RemoteScores):
        return Role(name, note=f"at {source.client.base_url}")
    return Role(name, here.ranks, here.copies, note="a function")


def _trained(
    name: str,
    own: ActorModel | CriticModel,
    architecture: ModelArchitecture,
    itemsize: int,
    place: _Place,
    *,
    swaps: bool = False,
) -> Role:
    model, layout = Sizes(architecture, itemsize), place.layout
    shards = layout if uses_distributed_optimizer(own.optim.name) else dataclasses.replace(layout, dp=1, cp=1)
    moments = 0.0 if own.optim.name == "sgd" else model.optimizer(shards)
    states = _trained_share(own, architecture) * (model.gradients(layout) + moments)
    weights = model.weights(layout)
    tokens = own.max_tokens_per_micro_batch or own.micro_batch_size * own.encoder_seq_length
    tokens //= layout.cp
    activations = tokens * activation_bytes(architecture, itemsize, own.activations_checkpoint_granularity, layout.tp)
    if name == "policy":  # the other has no output layer
        activations += min(chunk_bytes(device()), 4 * tokens * architecture.vocab_size // layout.tp)
    is_away = device().type != "cpu" and bool((own.ppo if isinstance(own, ActorModel) else own).offload_adam_states)
    always = (0 if swaps else weights) + (0 if is_away else states)
    in_turn = activations + (weights if swaps else 0) + (states if is_away else 0)
    away = " and ".join(["weights"] * swaps + ["optimizer's states"] * is_away)
    note = f"{away} in host memory between turns" if away else ""
    return Role(name, place.ranks, place.copies, always, in_turn, weights + states, note)


def _trained_share(own: TrainedModel, architecture: ModelArchitecture) -> float:
    """Of a model's parameters; all, unless it has adapters."""
    lora = LoraSettings.of(own.peft, own.seed)
    return 1.0 if lora is None else lora.num_parameters(architecture) / architecture.num_parameters


def _reference(config: PPOActor, architecture: ModelArchitecture, itemsize: int, here: _Place) -> Role:
    """A second set of the weights that are trained."""
    if _swaps(config.trainer.ppo.reference_policy_placement, architecture, itemsize, here):
        note = "in the place of the policy's weights, in host memory between turns"
        return Role("reference", here.ranks, here.copies, note=note)
    role = _frozen("reference", architecture, itemsize, here)
    size = role.always * _trained_share(config.model, architecture)
    return dataclasses.replace(role, always=size, surely=size)


def _frozen(name: str, architecture: ModelArchitecture, itemsize: int, place: _Place, *, swaps: bool = False) -> Role:
    weights = Sizes(architecture, itemsize).weights(place.layout)
    if swaps:
        return Role(name, place.ranks, place.copies, 0, weights, note="in host memory between turns")
    return Role(name, place.ranks, place.copies, weights, 0, weights)


def _apart(name: str, config: PPOActor, role: str, architecture: ModelArchitecture, itemsize: int) -> Role:
    """A frozen model on ranks of its own."""
    spec = frozen_spec(config, role)
    place = _Place.apart(role, spec.tensor_parallel_size, spec.pipeline_parallel_size)
    return _frozen(name, architecture, itemsize, place)


def _engine(config: PPOActor, architecture: ModelArchitecture, itemsize: int, here: _Place) -> Role:
    ppo, layout, apart = config.trainer.ppo, here.layout, _Place.apart(ROLLOUT, 1, 1).ranks
    size = engine_size(ppo.generation.tensor_parallel_size, ppo.trt_llm.reshard, layout.tp, layout.pp)
    ranks = apart or here.ranks
    model = Sizes(architecture, itemsize)
    longest = ppo.trt_llm.max_input_len + config.model.ppo.length_params.max_length
    slots = ppo.generation.num_slots or config.model.ppo.rollout_micro_batch_size
    cache = (ppo.generation.kv_cache_tokens or slots * longest) * model.kv_bytes(size)
    views = device().type == "cuda" and not apart and (layout.tp, layout.pp) == (size, 1)
    weights = 0 if views else model.weights(Layout(size))
    copies = [place // size for place in range(len(ranks))]
    if ppo.trt_llm.unload_engine_train:
        return Role("engine", ranks, copies, 0, weights + cache, note="unloaded while training")
    return Role("engine", ranks, copies, weights + cache, 0, weights)


def _swaps(placement: Placement, architecture: ModelArchitecture, itemsize: int, place: _Place) -> bool:
    if placement != "auto":
        return placement == "swap"
    share = place.layout.tp * place.layout.pp
    return placement_of(architecture.num_parameters * itemsize // share) == "swap"
