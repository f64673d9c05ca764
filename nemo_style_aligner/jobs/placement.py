"""Where the roles of an actor's job are: the key ``placement``, and ``critic``, the section of a critic in this job.

That section has the keys of the critic's own job (``conf/gpt_ppo_critic.yaml``), so that what is said about a critic
holds wherever it is. What it shares with the policy, layout and precision above all, is not given twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Literal

from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.config.fields import values
from nemo_style_aligner.config.loading import ConfigError, check_config, load_defaults
from nemo_style_aligner.jobs.job_view import LENGTH, PP, ROLLOUT_RANKS, TP, JobView

Strategy = Literal["interleave", "flatten", "separate"]

PLACEMENT = "placement"
CRITIC_JOB = "gpt_ppo_critic"
CRITIC_ARCHIVE = "critic.pretrained_checkpoint.restore_from_path"

_OTHER_NAMES: dict[str, Strategy] = {"colocated": "flatten", "colocate_all": "flatten", "disaggregated": "separate"}
_SHARED = (TP, PP, "model.sequence_parallel", "model.seed", LENGTH, "trainer.precision", "trainer.devices")
_OF_CRITIC = (
    *("pretrained_checkpoint.restore_from_path", "model.*"),
    *(f"trainer.ppo.{name}" for name in ("gradient_clip_val", "on_nonfinite", "max_consecutive_skips", "max_steps")),
    "trainer.ppo.combine_rm_and_critic_server",
)


def strategy_of(cfg: DictConfig) -> Strategy:
    """Which strategy the job's config asks for, by one of its names or, with null, by ``rollout_devices``."""
    name = OmegaConf.select(cfg, PLACEMENT)
    if name is None:
        return "separate" if cfg.trainer.ppo.rollout_devices else "interleave"
    return _OTHER_NAMES.get(name, name)


def has_critic_here(cfg: DictConfig) -> bool:
    """Whether the critic is in the actor's job, if the estimator needs one."""
    strategy = strategy_of(cfg)
    return strategy == "flatten" or (strategy == "separate" and bool(OmegaConf.select(cfg, CRITIC_ARCHIVE)))


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
    problems = []
    for key, value in values(given):
        if key in _SHARED:
            problems.append(f"critic.{key}={value}: it is the policy's, {key}; leave it out")
        elif not any(fnmatchcase(key, pattern) for pattern in _OF_CRITIC):
            problems.append(f"critic.{key}={value}: this is not a key of a critic in this job; leave it out")
    if problems:
        raise ConfigError("\n".join(problems))
    critic = load_defaults(CRITIC_JOB)
    for key in _SHARED:
        OmegaConf.update(critic, key, OmegaConf.select(cfg, key))
    critic.model.offload_adam_states = cfg.model.ppo.offload_adam_states
    critic.exp_manager.explicit_log_dir = None
    complete = OmegaConf.merge(critic, given)
    assert isinstance(complete, DictConfig)
    try:
        check_config(complete, CRITIC_JOB)
    except ConfigError as error:
        raise ConfigError(of_critic(str(error))) from error
    return complete


def of_critic(text: str) -> str:
    """A message about a critic's config with the names that its keys have in the actor's."""

    def renamed(found: re.Match[str]) -> str:
        return found[0] if found[0] in _SHARED else f"critic.{found[0]}"

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
    if strategy == "interleave" and view.get("critic"):
        yield (
            f"{view.show(PLACEMENT)} with keys below critic: then the critic has a job of its own, which they belong "
            "to (serve_ppo_critic.py); choose placement=flatten for a critic in this job, or leave them out"
        )
