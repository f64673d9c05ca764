"""Checks for settings that cannot work together: all are reported at once, before a job loads anything.

`check_job` is what the entry scripts have ``@job`` call. It reads the checkpoint's own config (not its weights), so it
knows the model's shape, and runs every check that concerns the job. A check is a function over a `JobView` that yields
one line per problem: key=value, why it cannot be, what to do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_style_aligner.algorithms.actor_checks import ACTOR_CHECKS
from nemo_style_aligner.algorithms.checkpoint_checks import (
    archive_name_problems,
    checkpoint_name_problems,
    ranking_doubts,
    ranking_problems,
)
from nemo_style_aligner.algorithms.config_tables import find_choices, find_range
from nemo_style_aligner.algorithms.job_view import (
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    POSITIONS,
    PP,
    ROLLOUT_RANKS,
    TP,
    Check,
    JobView,
    base_config,
)
from nemo_style_aligner.algorithms.place_checks import (
    checkpoint_directory_problems,
    data_prefix_problems,
    log_directory_problems,
    missing_checkpoint_problems,
    resume_problems,
    secret_problems,
    sft_data_problems,
)
from nemo_style_aligner.algorithms.rl_checks import settings_in_vain, shares_secret
from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.config import ConfigError, keys_without_effect, load_defaults, plain_config
from nemo_style_aligner.config_types import not_computed, values, wrong_types
from nemo_style_aligner.data.sft import SFTFormat
from nemo_style_aligner.jobs.run_control import parse_duration
from nemo_style_aligner.models.gpt import parse_precision, uses_distributed_optimizer
from nemo_style_aligner.models.heads import RewardHeadConfig
from nemo_style_aligner.models.kept_passes import why_not_kept
from nemo_style_aligner.models.optimizer import Schedule
from nemo_style_aligner.models.restore import lay_over
from nemo_style_aligner.parallel.detection import detect_launch
from nemo_style_aligner.rl.rollouts.setup import sampling_params
from nemo_style_aligner.telemetry.metrics import wandb_settings

logger = logging.getLogger(__name__)

# The key that names a job's model, where it is not `pretrained_checkpoint.restore_from_path`.
_ARCHIVE_KEYS = {"gpt_sft": "model.restore_from_path", "inference_rm": "rm_model_file"}


def check_job(name: str, cfg: DictConfig, world_size: int) -> None:
    """Check a job's settings against each other and against its model.

    Args:
        name: the job's YAML file, without its ending.
        cfg: its config, which `config.check_config` has passed; left as it is.
        world_size: ranks that the job will have.

    Raises:
        ConfigError: one line for each problem.
    """
    rank = detect_launch(os.environ).rank
    problems = find_problems(name, cfg, world_size, rank)
    if problems:
        raise ConfigError("these settings cannot work:\n" + "\n".join(f"  {problem}" for problem in problems))
    for doubt in _doubts(JobView(name, cfg, world_size, None)) if rank == 0 else ():
        logger.warning(doubt)


def find_problems(name: str, cfg: DictConfig, world_size: int, rank: int = 0) -> list[str]:
    """The problems that `check_job` raises, one line each."""
    problems: list[str] = []
    cfg = cfg.copy()
    architecture = None
    key = _ARCHIVE_KEYS.get(name, "pretrained_checkpoint.restore_from_path")
    try:
        base = base_config(OmegaConf.select(cfg, key), key)
        OmegaConf.set_struct(cfg, False)
        cfg.model = plain_config(lay_over(base, OmegaConf.to_container(cfg.model, resolve=True)))
        problems += wrong_types(cfg, load_defaults(name))  # of the checkpoint: the job's own have been checked
        architecture = ModelArchitecture.from_nemo_config(cfg.model)
    except OmegaConfBaseException:
        pass  # `_out_of_range` reports it, with its key
    except (OSError, ValueError, KeyError) as error:
        problems.append(str(error.args[0] if isinstance(error, KeyError) else error))
    view = JobView(name, cfg, world_size, architecture, rank)
    problems += _out_of_range(view)
    # Most checks compute with sizes: they would make no sense with one that is out of range by itself.
    checks = (_values_that_are_read_as_a_whole,) if _any_size_wrong(problems) else _CHECKS[name]
    return problems + [problem for check in (*checks, _places) for problem in check(view)]


def _any_size_wrong(problems: list[str]) -> bool:
    return any(problem.split("=")[0].endswith(("_size", "_length", "_samples", "_layers")) for problem in problems)


# ---- single values ------------------------------------------------------------------------------


def _out_of_range(view: JobView) -> Iterator[str]:
    unread = keys_without_effect(view.cfg, view.name)  # in NeMo's own files they have values that would be refused
    for key, value in values(view.cfg):
        if key in unread:
            continue
        if isinstance(value, OmegaConfBaseException):
            yield not_computed(key, value)
            continue
        allowed = find_range(key)
        if allowed is not None and not allowed.allows(value):
            yield f"{key}={value}: must be {allowed}"
        choices = find_choices(key)
        if choices and value is not None and value not in choices:
            yield f"{key}={value}: choose {', '.join(map(str, choices[:-1]))} or {choices[-1]}"


def _attempt(read: Callable[[], Any]) -> Iterator[str]:
    """The message of the ValueError or TypeError that ``read`` raises, if it does."""
    try:
        read()
    except (ValueError, TypeError) as error:
        yield str(error)


def _values_that_are_read_as_a_whole(view: JobView) -> Iterator[str]:
    cfg = view.cfg
    yield from _attempt(lambda: parse_precision(cfg.trainer.precision))
    if "exp_manager" in cfg:
        yield from _attempt(lambda: parse_duration(cfg.exp_manager.max_time_per_run))
        yield from archive_name_problems(str(cfg.exp_manager.name))
        settings: list[CheckpointSettings] = []
        yield from _attempt(lambda: settings.append(CheckpointSettings.from_config(cfg.exp_manager)))
        if settings:
            yield from checkpoint_name_problems(view, settings[0].filename)
    if "optim" in cfg.model:
        betas = view.get("model.optim.betas")
        if betas is not None and len(betas) != 2:
            yield f"model.optim.betas={list(betas)}: give two numbers"
        yield from _attempt(lambda: Schedule.from_config(cfg.model.optim, 1))
    if view.name in ("training_rm", "gpt_ppo_critic", "inference_rm"):
        yield from _attempt(lambda: RewardHeadConfig.from_model_config(cfg.model))
    if view.is_actor:
        for problem in _attempt(lambda: sampling_params(cfg)):
            yield f"model.ppo.sampling_params and length_params: {problem}"


def _sft_format(view: JobView) -> Iterator[str]:
    data = view.cfg.model.data
    for part in ("train_ds", "validation_ds"):
        if data[part].file_path:
            for problem in _attempt(functools.partial(SFTFormat.from_config, view.cfg.model, part)):
                yield f"model.data.{part}: {problem}"


def _wandb(view: JobView) -> Iterator[str]:
    key = "exp_manager.create_wandb_logger"
    if view.get(key) and "wandb" not in sys.modules and importlib.util.find_spec("wandb") is None:
        yield f"{view.said(key)}: wandb is not installed; pip install -e '.[wandb]', or set {key}=False"
    elif view.get(key):
        import wandb

        try:
            settings = wandb_settings(view.get("exp_manager.wandb_logger_kwargs") or {})
        except ValueError as error:
            yield str(error)
            return
        known = inspect.signature(wandb.init).parameters
        if unknown := [f"exp_manager.wandb_logger_kwargs.{name}" for name in settings if name not in known]:
            yield f"{', '.join(unknown)}: wandb.init takes no such argument; leave it out"


# ---- places -------------------------------------------------------------------------------------


def _places(view: JobView) -> Iterator[str]:
    with contextlib.suppress(OmegaConfBaseException):  # `_out_of_range` reports it
        yield from _what_is_there(view)


def _what_is_there(view: JobView) -> Iterator[str]:
    if view.name != "inference_rm" or view.get("exp_manager.watchdog_minutes") is not None:
        yield from log_directory_problems(view.cfg.exp_manager)  # where every rank's watchdog writes
    if view.only_generates:
        return
    if view.name != "inference_rm":  # which has none of its own
        yield from checkpoint_directory_problems(view.cfg.exp_manager)
        yield from missing_checkpoint_problems(view.cfg.exp_manager)
    yield from resume_problems(view.cfg.exp_manager)
    if view.name == "gpt_sft":
        yield from sft_data_problems(view.cfg.model.data)
    elif view.is_actor or view.name == "training_rm":
        yield from data_prefix_problems(view.get("model.data.data_prefix"))
    if view.is_actor and not shares_secret(view):
        return
    for token in ("remote_critic_rm.token", "trainer.ppo.token", "inference.token"):  # each in another job
        yield from secret_problems(view.get(token), token)


def _doubts(view: JobView) -> Iterator[str]:
    """Settings that work, but hardly as intended."""
    cfg = view.cfg
    watchdog, limit = "exp_manager.watchdog_minutes", "trainer.distributed_timeout_minutes"
    minutes, timeout = OmegaConf.select(cfg, watchdog), OmegaConf.select(cfg, limit)
    if minutes is not None and minutes >= timeout:
        yield (
            f"{watchdog}={minutes} is not below {limit}={timeout}: a hanging collective will end the job before the "
            "watchdog can report who held it up"
        )
    reshard = "trainer.ppo.trt_llm.reshard"
    if OmegaConf.select(cfg, reshard) and (OmegaConf.select(cfg, PP) or 1) == 1:
        yield (
            f"{reshard}=True has no effect without pipeline stages ({PP}=1): the number of ranks that share an engine "
            "is set by trainer.ppo.generation.tensor_parallel_size"
        )
    if "data" in cfg.model:
        yield from ranking_doubts(cfg)
    if view.is_actor:
        yield from settings_in_vain(view)
    for key in (GLOBAL_BATCH, MICRO_BATCH):
        of_data = key.replace("model.", "model.data.train_ds.")
        size, other = OmegaConf.select(cfg, key), OmegaConf.select(cfg, of_data)
        if other is not None and size != other:
            yield f"{of_data}={other} has no effect: {key}={size} wins"
    if OmegaConf.select(cfg, "model.answer_only_loss") is False:
        yield (
            "model.answer_only_loss=False: prompts are trained on, too; NeMo-Aligner's file says the same, but its job "
            "ignores it"
        )


# ---- layout -------------------------------------------------------------------------------------


def _ranks(view: JobView) -> Iterator[str]:
    parts = view.tp_size * view.pp_size
    if view.training_ranks < 1:
        yield (
            f"{view.said(ROLLOUT_RANKS)}: none of the {view.world_size} ranks is left to train; lower it or start more "
            "ranks"
        )
    elif view.training_ranks % parts:
        rest = f", less {view.said(ROLLOUT_RANKS)}" if view.rollout_ranks else ""
        yield (
            f"{view.said(TP, PP)}: {view.training_ranks} ranks (trainer.devices x trainer.num_nodes{rest}) are not a "
            f"multiple of {parts}; change the sizes or the number of ranks"
        )
    if view.architecture is not None:
        yield from view.architecture.layout_problems(view.tp_size, view.pp_size)


def _batches(view: JobView) -> Iterator[str]:
    """Both sizes must be set. Nothing has to divide a global batch: shares of it may be smaller, or empty."""
    for key in (GLOBAL_BATCH, MICRO_BATCH):
        if not view.get(key):
            yield f"{key} is not set, neither in the job's config nor in the checkpoint's: give it a value"


def _lengths(view: JobView) -> Iterator[str]:
    length, positions = view.get(LENGTH), view.get(POSITIONS)
    if length and positions and length > positions:
        yield f"{view.said(LENGTH)} is longer than {view.said(POSITIONS)}; raise the latter or lower the former"
    for key in (
        "model.data.seq_length",
        "model.data.train_ds.max_seq_length",
        "model.data.validation_ds.max_seq_length",
    ):
        if length and (view.get(key) or 0) > length:
            yield f"{view.said(key)} is longer than {view.said(LENGTH)}; lower it or raise {LENGTH}"
    for part in ("model.data.train_ds", "model.data.validation_ds"):
        least, greatest = view.get(f"{part}.min_seq_length"), view.get(f"{part}.max_seq_length")
        if least and greatest and least > greatest:
            yield f"{view.said(f'{part}.min_seq_length')} is above {view.said(f'{part}.max_seq_length')}"


def _recompute(view: JobView) -> Iterator[str]:
    layers, own = "model.activations_checkpoint_num_layers", view.architecture
    if view.get("model.activations_checkpoint_granularity") != "full" or own is None or view.get(layers) is None:
        return
    of_stage, method = own.num_layers // view.pp_size, view.get("model.activations_checkpoint_method") or "uniform"
    if view.get(layers) > of_stage:
        yield f"{view.said(layers)}: a pipeline stage has only {of_stage} layers; lower it"
    elif method == "uniform" and of_stage % view.get(layers):
        divisors = [n for n in range(1, of_stage) if of_stage % n == 0]
        yield (
            f"{view.said(layers)}: the {of_stage} layers of a pipeline stage cannot be divided into blocks of so many; "
            f"choose one of {', '.join(map(str, divisors))}, or activations_checkpoint_method=block"
        )


# ---- passes that are kept -----------------------------------------------------------------------


def _keep_activations(view: JobView) -> Iterator[str]:
    """With placement ``auto`` only `keep_passes` can tell, once the model is built, whether weights are swapped."""
    if view.is_actor:
        key, placement = "model.ppo.keep_activations", "trainer.ppo.reference_policy_placement"
        has_second = (view.get("trainer.ppo.initial_policy_kl_penalty") or 0) > 0
    else:
        key, placement = "model.keep_activations", "model.rm_placement"
        has_second = bool(view.get("trainer.ppo.combine_rm_and_critic_server"))
    if view.get(key) != "always":
        return
    drops_out = any(view.get(f"model.{name}") for name in ("hidden_dropout", "attention_dropout"))
    reasons = [why_not_kept(has_second and view.get(placement) == "swap", view.pp_size, drops_out)]
    logprobs = "trainer.ppo.policy_logprobs"
    if view.is_actor and view.get(GLOBAL_BATCH) not in (None, view.responses):
        reasons.append(f"with {view.responses_said}, {view.said(GLOBAL_BATCH)} a step makes several updates")
    if view.is_actor and view.get(logprobs) == "engine":
        reasons.append(f"with {view.said(logprobs)} there is no log-prob pass to keep")
    yield from (f"{view.said(key)}: {why}; choose auto or never" for why in reasons if why)


# ---- the reward model and the critic ------------------------------------------------------------


def _reward_head(view: JobView) -> Iterator[str]:
    precision, head, optim = "trainer.precision", "model.force_head_dtype", "model.optim.name"
    try:
        dtypes = parse_precision(view.get(precision)), RewardHeadConfig.from_model_config(view.cfg.model).dtype
    except (ValueError, TypeError):
        return  # `_values_that_are_read_as_a_whole` reports it
    if dtypes[0].itemsize > dtypes[1].itemsize and not uses_distributed_optimizer(view.cfg.model):
        yield (
            f"{view.said(head, precision, optim)}: this optimizer cannot train a head less precise than the model; set "
            f"{head}=float32, or {optim}=distributed_fused_adam"
        )


def _attributes(view: JobView) -> Iterator[str]:
    kind, number = "model.reward_model_type", "model.regression.num_attributes"
    count = view.get(number)
    if view.get(kind) in (None, "binary_ranking") and isinstance(count, int) and count > 1:
        yield (
            f"{number}={count}, {kind}=binary_ranking: only a regression model has several attributes; set "
            f"{kind}=regression, or {number}=1"
        )


def _schedule_of_the_critic(view: JobView) -> Iterator[str]:
    key = "trainer.ppo.max_steps"
    schedule = view.get("model.optim.sched.name")
    is_constant = schedule is None or schedule == "constant"
    if view.get(key) == -1 and view.get("model.optim.sched.max_steps") is None and not is_constant:
        yield f"{view.said(key)}: the learning rate's schedule needs a number of critic updates; give 1 or more"


def _inference_batch(view: JobView) -> Iterator[str]:
    section = "inference" if view.name == "inference_rm" else "trainer.ppo"
    key = f"{section}.inference_micro_batch_size"
    value = view.get(key)
    sizes = list(value) if isinstance(value, ListConfig) else [value]
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
        yield f"{view.said(key)}: give a whole number, or a list of one or more"


def _model_name(view: JobView) -> Iterator[str]:
    key = "inference.model_name"
    if not re.fullmatch(r"[^\s/?#%]+", name := str(view.get(key))) or name == "stats":
        yield f"{key}={name!r}: the service's paths have this name (/v2/models/NAME/infer); give a single plain word"


_COMMON: tuple[Check, ...] = (_values_that_are_read_as_a_whole, _wandb, _ranks)
_TRAINING: tuple[Check, ...] = (*_COMMON, _batches, _lengths, _recompute, ranking_problems)
_CHECKS: dict[str, tuple[Check, ...]] = {
    "gpt_sft": (*_TRAINING, _sft_format),
    "training_rm": (*_TRAINING, _reward_head, _attributes),
    "gpt_ppo_critic": (
        *_TRAINING,
        _reward_head,
        _attributes,
        _schedule_of_the_critic,
        _inference_batch,
        _keep_activations,
    ),
    "gpt_ppo_actor": (*_TRAINING, *ACTOR_CHECKS, _keep_activations),
    "gpt_reinforce_actor": (*_TRAINING, *ACTOR_CHECKS, _keep_activations),
    "inference_rm": (*_COMMON, _attributes, _inference_batch, _model_name),
}
