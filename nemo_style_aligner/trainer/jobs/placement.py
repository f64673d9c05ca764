"""Where the roles of an actor's job are: the key ``placement``, and ``critic``, the section of a critic in this job.

That section has the keys of the critic's own job (``conf/gpt_ppo_critic.yaml``), so that what is said about a critic
holds wherever it is. What it shares with the policy, precision above all, is not given twice; its layout is its own
where it has ranks of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal, cast

from omegaconf import OmegaConf

from nemo_style_aligner.trainer.config.fields import values
from nemo_style_aligner.trainer.config.loading import ConfigError, check_config, load_defaults, log_directory
from nemo_style_aligner.trainer.config.schema import ActorLoop, Critic, ListedReward, PPOActor, RewardService
from nemo_style_aligner.trainer.jobs.job_view import CP, CRITIC_RANKS, LENGTH, PP, ROLLOUT_RANKS, TP, JobView, as_served
from nemo_style_aligner.trainer.launch.roles import REFERENCE, ROLLOUT, TEACHER
from nemo_style_aligner.trainer.rl.reward_config import LAYOUT, REWARDS, reward_specs

Strategy = Literal["interleave", "flatten", "separate"]

PLACEMENT = "placement"
CRITIC_JOB = "gpt_ppo_critic"
CRITIC_ARCHIVE = "critic.pretrained_checkpoint.restore_from_path"

_OTHER_NAMES: dict[str, Strategy] = {"colocated": "flatten", "colocate_all": "flatten", "disaggregated": "separate"}
_LAYOUT = (TP, CP, PP, "model.sequence_parallel")
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


def strategy_of(config: PPOActor) -> Strategy:
    """Which strategy the job's config asks for, by one of its names or, with null, by ``rollout_devices``."""
    name = config.placement
    if name is None:
        return "separate" if config.trainer.ppo.rollout_devices else "interleave"
    return _OTHER_NAMES.get(name) or cast(Strategy, name)


def has_critic_here(config: PPOActor) -> bool:
    """Whether the critic is in the actor's job, if the estimator needs one."""
    return strategy_of(config) == "flatten" or bool(config.get(CRITIC_ARCHIVE))


def has_critic_apart(config: PPOActor) -> bool:
    """Whether it has ranks of that job for itself."""
    return config.trainer.ppo.critic_devices > 0


def has_reward_model_here(config: PPOActor) -> bool:
    """Whether a critic in this job brings the reward model that the source ``service`` means."""
    return config.get("critic.trainer.ppo.combine_rm_and_critic_server") is not False


def critic_config(config: PPOActor) -> Critic:
    """The config of a critic in the actor's job, complete, as that of a job of its own.

    Raises:
        ConfigError: keys or values that cannot be; one line for each.
    """
    given = OmegaConf.create(config.critic)
    is_apart = has_critic_apart(config)
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
    settings = {key: config.get(key) for key in shared}
    if is_apart:
        settings |= _as_part(config, "critic") | {"trainer.devices": config.trainer.ppo.critic_devices}
        settings |= {"trainer.ppo.port": 0, "trainer.ppo.token": config.remote_critic_rm.token}
    else:
        settings["model.offload_adam_states"] = config.model.ppo.offload_adam_states
        settings["exp_manager.explicit_log_dir"] = None
    for key, value in settings.items():
        OmegaConf.update(critic, key, value)
    complete: Any = OmegaConf.merge(critic, given)
    try:
        check_config(complete, CRITIC_JOB)
    except ConfigError as error:
        raise ConfigError(of_critic(str(error), is_apart=is_apart)) from error
    return Critic.read(complete)


def has_reference_here(ppo: ActorLoop) -> bool:
    """Whether the ranks that train have the initial policy."""
    return ppo.initial_policy_kl_penalty > 0 and not ppo.reference.devices


def frozen_spec(config: PPOActor, role: str) -> ListedReward:
    """The frozen model of a role: one of the reward models or, as if it were one, the reference or the teacher."""
    ppo = config.trainer.ppo
    if role not in (REFERENCE, TEACHER):
        return next(spec for place, spec in enumerate(reward_specs(ppo.rewards)) if f"{REWARDS}[{place}]" == role)
    ranks, archive = ppo.reference, config.pretrained_checkpoint.restore_from_path
    if role == TEACHER:
        ranks, archive = ppo.teacher, str(ppo.teacher.restore_from_path)
    return ListedReward(name=role.rpartition(".")[2], source=archive, **{key: vars(ranks)[key] for key in LAYOUT})


def frozen_config(config: PPOActor, role: str) -> RewardService:
    """The config of a frozen model on ranks of its own, as that of a job of its own (``inference_rm``)."""
    spec, ppo = frozen_spec(config, role), config.model.ppo
    folder = spec.name if role in (REFERENCE, TEACHER) else f"reward_{spec.name}"
    # What the job says about its policy holds for the reference, too.
    of_policy = {"model": config.model_given()} if role == REFERENCE else {}
    return as_served(config).changed(
        of_policy
        | {
            "rm_model_file": spec.source,
            "model.tensor_model_parallel_size": spec.tensor_parallel_size,
            "model.pipeline_model_parallel_size": spec.pipeline_parallel_size,
            "model.expert_model_parallel_size": 1,
            "model.expert_tensor_parallel_size": None,
            CP: 1,
            "model.sequence_parallel": False,
            "model.share_prompts": config.model.share_prompts,
            "model.forward_micro_batch_size": ppo.forward_micro_batch_size,
            "model.forward_max_tokens_per_micro_batch": ppo.forward_max_tokens_per_micro_batch,
            "trainer.devices": spec.devices,
            "inference.model_name": spec.name,
            "inference.port": 0,
            "inference.token": config.remote_critic_rm.token,
        }
        | _as_part(config, folder)
    )


def _as_part(config: PPOActor, folder: str) -> dict[str, Any]:
    """What a service has of the job of which it is a part."""
    return {
        "trainer.distributed_timeout_minutes": config.trainer.distributed_timeout_minutes,
        "exp_manager.explicit_log_dir": str(log_directory(config.exp_manager) / folder),
        "exp_manager.watchdog_minutes": config.exp_manager.watchdog_minutes,
    }


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
    strategy = strategy_of(view.actor)
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
    is_apart = has_critic_apart(view.actor)
    if strategy == "interleave" and view.get("critic") and not is_apart:
        yield (
            f"{view.show(PLACEMENT)} with keys below critic: give the ranks of this job that it has for itself "
            f"({CRITIC_RANKS}), choose placement=flatten for a critic on all ranks, or leave them out for one in a job "
            "of its own (serve_ppo_critic.py)"
        )
    if is_apart and strategy != "flatten" and not view.get(CRITIC_ARCHIVE):
        yield f"{view.show(CRITIC_RANKS, CRITIC_ARCHIVE)}: give the archive that the critic begins with"
