"""Where the roles of an actor's job are: the key ``placement``, and ``critic``, the section of a critic in this job.

That section has the keys of the critic's own job (``conf/gpt_ppo_critic.yaml``), so that what is said about a critic
holds wherever it is. What it shares with the policy, precision above all, is not given twice; its layout is its own
where it has ranks of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.config.fields import values
from nemo_style_aligner.config.loading import ConfigError, check_config, load_defaults, log_directory
from nemo_style_aligner.jobs.job_view import CRITIC_RANKS, LENGTH, PP, ROLLOUT_RANKS, TP, JobView, as_served
from nemo_style_aligner.launch.roles import REFERENCE, ROLLOUT, TEACHER
from nemo_style_aligner.rl.reward_config import LAYOUT, REWARDS, FrozenSpec, reward_specs

Strategy = Literal["interleave", "flatten", "separate"]

PLACEMENT = "placement"
CRITIC_JOB = "gpt_ppo_critic"
CRITIC_ARCHIVE = "critic.pretrained_checkpoint.restore_from_path"

_OTHER_NAMES: dict[str, Strategy] = {"colocated": "flatten", "colocate_all": "flatten", "disaggregated": "separate"}
_LAYOUT = (TP, PP, "model.sequence_parallel")
_SHARED = ("model.seed", LENGTH, "trainer.precision", "trainer.devices")
_OF_CRITIC = (
    *("pretrained_checkpoint.restore_from_path", "model.*"),
    *(f"trainer.ppo.{name}" for name in ("gradient_clip_val", "on_nonfinite", "max_consecutive_skips", "max_steps")),
    "trainer.ppo.combine_rm_and_critic_server",
)
_OF_CRITIC_APART = (
    *(f"trainer.ppo.{name}" for name in ("inference_micro_batch_size", "*_seconds", "max_queue_delay_microseconds")),
    *("exp_manager.resume_*", "exp_manager.checkpoint_callback_params.*"),
)


def strategy_of(cfg: DictConfig) -> Strategy:
    """Which strategy the job's config asks for, by one of its names or, with null, by ``rollout_devices``."""
    name = OmegaConf.select(cfg, PLACEMENT)
    if name is None:
        return "separate" if cfg.trainer.ppo.rollout_devices else "interleave"
    return _OTHER_NAMES.get(name, name)


def has_critic_here(cfg: DictConfig) -> bool:
    """Whether the critic is in the actor's job, if the estimator needs one."""
    return strategy_of(cfg) == "flatten" or bool(OmegaConf.select(cfg, CRITIC_ARCHIVE))


def has_critic_apart(cfg: DictConfig) -> bool:
    """Whether it has ranks of that job for itself."""
    return bool(OmegaConf.select(cfg, CRITIC_RANKS))


def has_reward_model_here(cfg: DictConfig) -> bool:
    """Whether a critic in this job brings the reward model that the source ``service`` means."""
    return bool(OmegaConf.select(cfg, "critic.trainer.ppo.combine_rm_and_critic_server", default=True))


def critic_config(cfg: DictConfig) -> DictConfig:
    """The config of a critic in the actor's job, complete, as that of a job of its own.

    Raises:
        ConfigError: keys or values that cannot be; one line for each.
    """
    given = OmegaConf.create(OmegaConf.to_container(cfg.critic, resolve=True))
    assert isinstance(given, DictConfig)
    is_apart = has_critic_apart(cfg)
    shared = _SHARED if is_apart else (*_LAYOUT, *_SHARED)
    allowed = (*_OF_CRITIC, *_OF_CRITIC_APART) if is_apart else _OF_CRITIC
    problems = []
    for key, value in values(given):
        if key == "trainer.devices" and is_apart:
            problems.append(f"critic.{key}={value}: {CRITIC_RANKS} says it; leave it out")
        elif key in shared:
            problems.append(f"critic.{key}={value}: it is the policy's, {key}; leave it out")
        elif not any(fnmatchcase(key, pattern) for pattern in allowed):
            problems.append(f"critic.{key}={value}: this is not a key of a critic in this job; leave it out")
    if problems:
        raise ConfigError("\n".join(problems))
    critic = load_defaults(CRITIC_JOB)
    for key in shared:
        OmegaConf.update(critic, key, OmegaConf.select(cfg, key))
    if is_apart:
        critic.trainer.devices = cfg.trainer.ppo.critic_devices
        _be_part(critic, cfg, "critic")
        critic.trainer.ppo.port, critic.trainer.ppo.token = 0, cfg.remote_critic_rm.token
    else:
        critic.model.offload_adam_states = cfg.model.ppo.offload_adam_states
        critic.exp_manager.explicit_log_dir = None
    complete = OmegaConf.merge(critic, given)
    assert isinstance(complete, DictConfig)
    try:
        check_config(complete, CRITIC_JOB)
    except ConfigError as error:
        raise ConfigError(of_critic(str(error), is_apart=is_apart)) from error
    return complete


def has_reference_here(cfg: DictConfig) -> bool:
    """Whether the ranks that train have the initial policy."""
    return float(cfg.trainer.ppo.initial_policy_kl_penalty) > 0 and not cfg.trainer.ppo.reference.devices


def frozen_spec(cfg: DictConfig, role: str) -> FrozenSpec:
    """The frozen model of a role: the reference, the teacher, or one of the reward models."""
    if role not in (REFERENCE, TEACHER):
        listed: Any = OmegaConf.to_container(cfg.trainer.ppo.rewards, resolve=True)
        return next(spec for place, spec in enumerate(reward_specs(listed)) if f"{REWARDS}[{place}]" == role)
    section = OmegaConf.select(cfg, role)
    archive = (cfg.pretrained_checkpoint if role == REFERENCE else section).restore_from_path
    return FrozenSpec(role.rpartition(".")[2], archive, **{key: section[key] for key in LAYOUT})


def frozen_config(cfg: DictConfig, role: str) -> DictConfig:
    """The config of a frozen model on ranks of its own, as that of a job of its own (``inference_rm``)."""
    served, spec, ppo = as_served(cfg), frozen_spec(cfg, role), cfg.model.ppo
    served.rm_model_file = spec.source
    OmegaConf.set_struct(served, False)
    if role == REFERENCE:  # what the job says about its policy holds for this one, too
        served.model = OmegaConf.to_container(cfg.model, resolve=True)
    served.model.tensor_model_parallel_size = spec.tensor_parallel_size
    served.model.pipeline_model_parallel_size = spec.pipeline_parallel_size
    served.model.sequence_parallel = False
    served.model.forward_micro_batch_size = ppo.forward_micro_batch_size
    served.model.forward_max_tokens_per_micro_batch = ppo.forward_max_tokens_per_micro_batch
    served.trainer.devices = spec.devices
    served.inference.model_name = spec.name
    served.inference.port, served.inference.token = 0, cfg.remote_critic_rm.token
    _be_part(served, cfg, spec.name if role in (REFERENCE, TEACHER) else f"reward_{spec.name}")
    return served


def _be_part(service: DictConfig, cfg: DictConfig, folder: str) -> None:
    """Set what a service has of the job of which it is a part."""
    service.trainer.distributed_timeout_minutes = cfg.trainer.distributed_timeout_minutes
    service.exp_manager.explicit_log_dir = str(log_directory(cfg.exp_manager) / folder)
    service.exp_manager.watchdog_minutes = cfg.exp_manager.watchdog_minutes


def of_critic(text: str, *, is_apart: bool) -> str:
    """A message about a critic's config with the names that its keys have in the actor's."""
    names = {key: key for key in (_SHARED if is_apart else (*_LAYOUT, *_SHARED))}
    names |= {"trainer.devices": CRITIC_RANKS, "trainer.num_nodes": "1"} if is_apart else {}

    def renamed(found: re.Match[str]) -> str:
        return names.get(found[0], f"critic.{found[0]}")

    return re.sub(r"(?<![\w/.=-])(?:pretrained_checkpoint|model|trainer)(?:\.\w+)+", renamed, text)


def placement_problems(view: JobView) -> Iterator[str]:
    """A strategy and other keys that contradict each other, one line for each."""
    if not view.is_actor:
        return
    strategy = strategy_of(view.cfg)
    if strategy == "separate" and not view.rollout_ranks:
        yield f"{view.show(PLACEMENT, ROLLOUT_RANKS)}: give the number of ranks that only generate"
    elif strategy != "separate" and view.rollout_ranks:
        yield (
            f"{view.show(PLACEMENT, ROLLOUT_RANKS)}: ranks that only generate are {PLACEMENT}=separate; choose that, "
            f"or set {ROLLOUT_RANKS}=0"
        )
    if strategy == "flatten":
        for role, count in view.apart.items():
            if role != ROLLOUT:
                yield (
                    f"{view.show(PLACEMENT)}: all roles are on all ranks, and {role} has {count} for itself; choose "
                    f"{PLACEMENT}=interleave, or leave these out"
                )
    is_apart = has_critic_apart(view.cfg)
    if strategy == "interleave" and view.get("critic") and not is_apart:
        yield (
            f"{view.show(PLACEMENT)} with keys below critic: give the ranks of this job that it has for itself "
            f"({CRITIC_RANKS}), choose placement=flatten for a critic on all ranks, or leave them out for one in a job "
            "of its own (serve_ppo_critic.py)"
        )
    if is_apart and strategy != "flatten" and not view.get(CRITIC_ARCHIVE):
        yield f"{view.show(CRITIC_RANKS, CRITIC_ARCHIVE)}: give the archive that the critic begins with"
