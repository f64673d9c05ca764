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
from omegaconf import DictConfig

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.config.loading import ConfigError
from nemo_style_aligner.config.schema import Placement
from nemo_style_aligner.jobs.placement import critic_config, strategy_of
from nemo_style_aligner.models.activation_memory import activation_bytes
from nemo_style_aligner.models.frozen import placement_of
from nemo_style_aligner.models.gpt import uses_distributed_optimizer
from nemo_style_aligner.models.logprobs import chunk_bytes
from nemo_style_aligner.models.lora import LoraSettings
from nemo_style_aligner.models.restore import BaseModel
from nemo_style_aligner.parallel.groups import current_layout, device
from nemo_style_aligner.parallel.machine import available_memory, ranks_on_this_machine
from nemo_style_aligner.placement.costs import Layout, Sizes
from nemo_style_aligner.rl.local_critic import LocalCritic
from nemo_style_aligner.rl.remote_critic import RemoteCritic
from nemo_style_aligner.rl.reward_models import ModelRewards
from nemo_style_aligner.rl.rewards import RemoteRewards, RewardSource, RewardSum
from nemo_style_aligner.rl.rollouts.setup import engine_size
from nemo_style_aligner.rl.scoring import Scorer
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


def announce_placement(cfg: DictConfig, policy: BaseModel, scorer: Scorer) -> None:
    """Log the picture on rank 0.

    Raises:
        ConfigError: weights, gradients and optimizer states do not fit into a rank's memory.
    """
    roles = list(_roles(cfg, policy, scorer))
    layout, apart = current_layout(), int(cfg.trainer.ppo.rollout_devices)
    ranks = dist.get_world_size() + apart
    sizes = f"tensor {layout.tp_size} x pipeline {layout.pp_size} x data {layout.dp_size}"
    if dist.get_rank() == 0:
        heading = f"placement={strategy_of(cfg)}: {counted(ranks, 'ranks')}, {sizes}"
        logger.info("%s", "\n".join([heading, *picture(roles, ranks)]))
    training = [role for role in roles if 0 in role.ranks and role.surely]
    needed, there = _least(training), _memory()
    if needed > there:
        raise ConfigError(
            f"a rank that trains has {size_of(there)} of memory, and needs {size_of(needed)} at once, without "
            f"activations: {', '.join(f'{role.name} {size_of(role.surely)}' for role in training)}, less what is away "
            "between turns. Use more ranks with a larger model.tensor_model_parallel_size, "
            "model.ppo.offload_adam_states=True, trainer.ppo.reference_policy_placement=swap, or a job of its own for "
            "the critic (placement=interleave)"
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


def _roles(cfg: DictConfig, policy: BaseModel, scorer: Scorer) -> Iterator[Role]:
    ppo, itemsize = cfg.trainer.ppo, policy.dtype.itemsize
    yield _trained("policy", cfg, policy.architecture, itemsize, swaps=False)
    if float(ppo.initial_policy_kl_penalty) > 0:
        yield _reference(cfg, policy.architecture, itemsize)
    if isinstance(critic := scorer.values, LocalCritic):
        swaps = _swaps(critic.placement, critic.base.architecture, itemsize)
        yield _trained("critic", critic_config(cfg), critic.base.architecture, itemsize, swaps=swaps)
    elif critic is not None:
        section = cfg.remote_critic_rm.critic
        yield Role("critic", note=f"a job of its own at {section.ip}:{section.port}")
    for name, source in _reward_sources(scorer):
        yield _reward(f"reward {name}", source, itemsize)
    yield _engine(cfg, policy.architecture, itemsize)


def _reward_sources(scorer: Scorer) -> list[tuple[str, RewardSource]]:
    rewards = scorer.rewards
    return [(one.name, one.source) for one in rewards.sources] if isinstance(rewards, RewardSum) else [("", rewards)]


def _reward(name: str, source: RewardSource, itemsize: int) -> Role:
    if isinstance(source, ModelRewards):
        architecture = source.base.architecture
        return _frozen(name, architecture, itemsize, swaps=_swaps(source.placement, architecture, itemsize))
    if isinstance(source, RemoteRewards):
        return Role(name, note=f"at {source.url}")
    if isinstance(source, RemoteCritic):
        return Role(name, note="with the critic")
    return Role(name, *_copies(), note="a function")


def _trained(name: str, cfg: DictConfig, architecture: ModelArchitecture, itemsize: int, *, swaps: bool) -> Role:
    model, layout = Sizes(architecture, itemsize), _layout()
    shards = layout if uses_distributed_optimizer(cfg.model) else dataclasses.replace(layout, dp=1)
    moments = 0.0 if cfg.model.optim.name == "sgd" else model.optimizer(shards)
    states = _trained_share(cfg, architecture) * (model.gradients(layout) + moments)
    weights = model.weights(layout)
    tokens = cfg.model.max_tokens_per_micro_batch
    tokens = int(tokens or cfg.model.micro_batch_size * cfg.model.encoder_seq_length)
    activations = tokens * activation_bytes(
        architecture, itemsize, cfg.model.activations_checkpoint_granularity, layout.tp
    )
    if name == "policy":  # the other has no output layer
        activations += min(chunk_bytes(device()), 4 * tokens * architecture.vocab_size // layout.tp)
    is_away = device().type != "cpu" and bool((cfg.model.get("ppo") or cfg.model).offload_adam_states)
    always = (0 if swaps else weights) + (0 if is_away else states)
    in_turn = activations + (weights if swaps else 0) + (states if is_away else 0)
    away = " and ".join(["weights"] * swaps + ["optimizer's states"] * is_away)
    note = f"{away} in host memory between turns" if away else ""
    return Role(name, *_copies(), always, in_turn, weights + states, note)


def _trained_share(cfg: DictConfig, architecture: ModelArchitecture) -> float:
    """Of a model's parameters; all, unless it has adapters."""
    lora = LoraSettings.from_config(cfg.model)
    return 1.0 if lora is None else lora.num_parameters(architecture) / architecture.num_parameters


def _reference(cfg: DictConfig, architecture: ModelArchitecture, itemsize: int) -> Role:
    """A second set of the weights that are trained."""
    if _swaps(cfg.trainer.ppo.reference_policy_placement, architecture, itemsize):
        return Role("reference", *_copies(), note="in the place of the policy's weights, in host memory between turns")
    role = _frozen("reference", architecture, itemsize, swaps=False)
    size = role.always * _trained_share(cfg, architecture)
    return dataclasses.replace(role, always=size, surely=size)


def _frozen(name: str, architecture: ModelArchitecture, itemsize: int, *, swaps: bool) -> Role:
    weights = Sizes(architecture, itemsize).weights(_layout())
    if swaps:
        return Role(name, *_copies(), 0, weights, note="in host memory between turns")
    return Role(name, *_copies(), weights, 0, weights)


def _engine(cfg: DictConfig, architecture: ModelArchitecture, itemsize: int) -> Role:
    ppo, layout, apart = cfg.trainer.ppo, _layout(), int(cfg.trainer.ppo.rollout_devices)
    size = engine_size(ppo.generation.tensor_parallel_size, bool(ppo.trt_llm.reshard), layout.tp, layout.pp)
    first = dist.get_world_size() if apart else 0
    ranks = range(first, dist.get_world_size() + apart)
    model = Sizes(architecture, itemsize)
    longest = int(ppo.trt_llm.max_input_len) + int(cfg.model.ppo.length_params.max_length)
    slots = int(ppo.generation.num_slots or cfg.model.ppo.rollout_micro_batch_size)
    cache = int(ppo.generation.kv_cache_tokens or slots * longest) * model.kv_bytes(size)
    views = device().type == "cuda" and not apart and (layout.tp, layout.pp) == (size, 1)
    weights = 0 if views else model.weights(Layout(size))
    copies = [(rank - first) // size for rank in ranks]
    if ppo.trt_llm.unload_engine_train:
        return Role("engine", ranks, copies, 0, weights + cache, note="unloaded while training")
    return Role("engine", ranks, copies, weights + cache, 0, weights)


def _swaps(placement: Placement, architecture: ModelArchitecture, itemsize: int) -> bool:
    if placement != "auto":
        return placement == "swap"
    layout = current_layout()
    return placement_of(architecture.num_parameters * itemsize // (layout.tp_size * layout.pp_size)) == "swap"


def _layout() -> Layout:
    layout = current_layout()
    return Layout(layout.tp_size, layout.pp_size, layout.dp_size)


def _copies() -> tuple[range, list[int]]:
    """All ranks that train, in megatron-core's order: tensor, data, pipeline."""
    ranks, layout = range(dist.get_world_size()), _layout()
    return ranks, [rank // layout.tp % layout.dp for rank in ranks]
