"""Settings that somebody has given and that have no effect, because of others: a job goes on, and says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import OmegaConf

from nemo_style_aligner.trainer.config.fields import values
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.jobs.actor_checks import (
    CLIPPED,
    ESTIMATOR,
    LOSS,
    estimator_of,
    has_remote_critic,
    listed_rewards,
    needs_critic,
    uses_reward_service,
)
from nemo_style_aligner.trainer.jobs.job_view import KL_PENALTY, TEACHER_ARCHIVE, JobView
from nemo_style_aligner.trainer.jobs.placement import PLACEMENT, has_critic_apart
from nemo_style_aligner.trainer.launch.roles import TEACHER
from nemo_style_aligner.trainer.models.policy_losses import LOSSES
from nemo_style_aligner.trainer.rl.estimators import ESTIMATORS
from nemo_style_aligner.trainer.rl.reward_config import REWARDS, kind_of

_InVain = tuple[str, tuple[str, ...]]
"""A key, and patterns of those that have no effect with its present value."""


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


_OFF = _is(None, False, 0)
_PPO, _OPTIM, _MODEL = "trainer.ppo", "model.optim", "model.activations_checkpoint"
_RECOMPUTED = (f"{_MODEL}_method", f"{_MODEL}_num_layers")
_SWITCHES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    *(
        (f"exp_manager.create_{name}_logger", _OFF, (f"exp_manager.{name}_logger_kwargs.*",))
        for name in ("wandb", "mlflow")
    ),
    ("exp_manager.checkpoint_callback_params.monitor", _OFF, ("exp_manager.checkpoint_callback_params.mode",)),
    ("trainer.profile.start_step", _OFF, ("trainer.profile.ranks",)),
    ("trainer.*.on_nonfinite", _is("stop"), ("trainer.*.max_consecutive_skips",)),
    ("model.peft.peft_scheme", _is(None, "none"), ("model.peft.lora_tuning.*", "model.peft.archive")),
    (f"{_MODEL}_granularity", _is(None, "selective"), _RECOMPUTED),
    (f"{_OPTIM}.name", _is("sgd"), (f"{_OPTIM}.betas", f"{_OPTIM}.eps")),
    (
        f"{_OPTIM}.sched.name",
        _is("constant"),
        tuple(f"{_OPTIM}.sched.{k}" for k in ("min_lr", "constant_steps", "max_steps")),
    ),
    ("model.reward_standardization.enable", _OFF, ("model.reward_standardization.*",)),
    (
        "model.reward_model_type",
        _is("binary_ranking"),
        ("model.regression.loss_mask_val", "model.regression.attribute_weights"),
    ),
    ("model.data.validation_ds.file_path", _OFF, ("model.data.validation_ds.*",)),
    ("model.dpo.preference_loss", _is("dpo", "ipo"), ("model.dpo.gt_reward_scale", "model.data.default_*_reward")),
    ("model.*.sft_loss_weight", _OFF, ("model.*.sft_average_log_probs",)),
    ("model.*.reference_logprobs_dir", bool, ("model.*.reference_policy_placement",)),
    ("model.*.kd_loss_weight", _OFF, ("model.*.target_logits_scale", "model.*.kd_loss")),
    (f"{_PPO}.combine_rm_and_critic_server", _OFF, ("model.rm_placement",)),
    (
        "model.ppo.sampling_params.use_greedy",
        bool,
        tuple(f"model.ppo.sampling_params.{k}" for k in ("temperature", "top_*")),
    ),
    (f"{_PPO}.val_check_interval", _OFF, ("model.ppo.num_val_samples",)),
    (f"{_PPO}.staleness", _OFF, (f"{_PPO}.in_flight",)),
    (f"{_PPO}.dynamic_sampling.enable", _OFF, (f"{_PPO}.dynamic_sampling.*",)),
    (TEACHER_ARCHIVE, _OFF, (f"{TEACHER}.weight",)),
    (f"{_PPO}.overlong.buffer_tokens", _OFF, (f"{_PPO}.overlong.penalty",)),
    (KL_PENALTY, _OFF, tuple(f"{_PPO}.{k}" for k in ("use_absolute_kl", "kl_estimator", "kl_clamp"))),
    (f"{_PPO}.kl_estimator", bool, (f"{_PPO}.use_absolute_kl",)),
    (f"{_PPO}.batch_iterator.use_flask", _OFF, (f"{_PPO}.batch_iterator.port", f"{_PPO}.batch_iterator.host")),
    (f"{_PPO}.serve_policy.enable", _OFF, (f"{_PPO}.serve_policy.*",)),
    (
        f"{_PPO}.generation.engine",
        _is("trtllm"),
        tuple(f"{_PPO}.generation.{k}" for k in ("kv_*", "prefill_*", "step")),
    ),
)  # keys, which of their values switch others off, and patterns of these; a * in a key stands for the same in both


def settings_in_vain(view: JobView) -> Iterator[str]:
    """A line for each setting that makes others that have been given pointless, with these."""
    defaults, present = load_defaults(view.name), dict(values(view.config.given))
    of_an_actor = (*_of_services(view), *_of_algorithms(view)) if view.is_actor else ()
    for key, patterns in (*of_an_actor, *_switched_off(view, present), *_of_rewards(view)):
        given = [
            name
            for name, value in present.items()
            if any(fnmatchcase(name, pattern) for pattern in patterns)
            and name != key
            and not _is_derived(view, name)
            and value != OmegaConf.select(defaults, name, throw_on_missing=False)
        ]
        if given:
            yield f"{view.show(*given)}: no effect with {view.show(key)}"


def _is_derived(view: JobView, name: str) -> bool:
    """Whether a value is still the default's reference to another one."""
    section, _, key = name.rpartition(".")
    return OmegaConf.is_interpolation(view.get(section) if section else view.config.given, key)


def _switched_off(view: JobView, present: dict[str, Any]) -> Iterator[_InVain]:
    for pattern, is_off, others in _SWITCHES:
        for key in (key for key in present if fnmatchcase(key, pattern)):
            section = key.split(".")[1]
            if is_off(present[key]):
                yield key, tuple(other.replace(".*.", f".{section}.", 1) for other in others)


def _of_algorithms(view: JobView) -> Iterator[_InVain]:
    named, loss, known = view.get(ESTIMATOR), view.get(LOSS), estimator_of(view)
    if not needs_critic(view):
        yield ESTIMATOR, ("critic.*",)
        yield ESTIMATOR, (f"{_PPO}.gae_lambda",) if named in ESTIMATORS else ()
    if named in ESTIMATORS and named not in ("gae", "reinforce_plus_plus"):
        yield ESTIMATOR, (f"{_PPO}.discount_factor",)
    if named in ("best_of_n", "on_policy_distillation"):
        yield ESTIMATOR, (f"{_PPO}.overlong.*",)
    whitens = f"{_PPO}.normalize_advantages"
    if known is not None and not (known.whitens if view.get(whitens) is None else view.get(whitens)):
        yield whitens, (f"{_PPO}.advantage_whitening_unbiased",)
    if loss in LOSSES and loss not in CLIPPED:
        yield LOSS, ("model.ppo.ratio_eps",)
    if loss in LOSSES and loss != "cispo":
        yield LOSS, ("model.ppo.cispo_ratio_max",)
    if view.get(f"{_PPO}.generation.engine") == "embedded" and not view.get(f"{_PPO}.trt_llm.enable"):
        own = ("sidecar_python", "kv_cache_*", "refit_*", "timeouts.*")
        yield f"{_PPO}.generation.engine", tuple(f"{_PPO}.trt_llm.{name}" for name in own)


def _of_rewards(view: JobView) -> Iterator[_InVain]:
    if view.is_actor and not any(kind_of(spec.source) == "function" for spec in listed_rewards(view)):
        yield REWARDS, (f"{_PPO}.reward_functions.*",)


def _of_services(view: JobView) -> Iterator[_InVain]:
    service, combined = "remote_critic_rm", "remote_critic_rm.combine_rm_and_critic_server"
    if not has_remote_critic(view):
        of_critic: tuple[str, ...] = ("critic.*", "combine_rm_and_critic_server")
        if not has_critic_apart(view.actor):
            of_critic += ("trained_critic", "journal_*", "timeouts.training_*")
        key = PLACEMENT if needs_critic(view) else ESTIMATOR
        yield key, tuple(f"{service}.{name}" for name in of_critic)
    if not uses_reward_service(view):
        yield REWARDS, (f"{service}.reward_model.*",)
    elif has_remote_critic(view) and view.get(combined):
        yield combined, (f"{service}.reward_model.*",)
