"""Checks for settings that cannot work together: all are reported at once, before a job loads anything.

`check_job` is what the entry scripts have ``@job`` call. It reads the checkpoint's own config (not its weights), so it
knows the model's shape, and runs every check that concerns the job. A check is a function over a `JobView` that yields
one line per problem: key=value, why it cannot be, what to do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from nemo_style_aligner.arguments import why_unwritable
from nemo_style_aligner.durable import UNFINISHED
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.detection import LOOPBACK, detect_launch
from nemo_style_aligner.guard.http_server import require_free
from nemo_style_aligner.trainer.checkpoints.directory import DAMAGED, LAST, checkpoint_name
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings, monitored_name
from nemo_style_aligner.trainer.config.fields import value_problems
from nemo_style_aligner.trainer.config.foreign_keys import section_of_job
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.config.loading import ConfigError, archive_key, load_defaults
from nemo_style_aligner.trainer.config.schema import SFT, Data, Optimizer, SFTData, fields_of_job
from nemo_style_aligner.trainer.data.datasets import data_source
from nemo_style_aligner.trainer.data.sft import SFTFormat
from nemo_style_aligner.trainer.jobs.actor_checks import actor_problems, needs_critic, shares_secret
from nemo_style_aligner.trainer.jobs.job_view import (
    CP,
    EP,
    ETP,
    GLOBAL_BATCH,
    LENGTH,
    MICRO_BATCH,
    POSITIONS,
    PP,
    TP,
    Check,
    JobView,
    base_config,
)
from nemo_style_aligner.trainer.jobs.path_checks import (
    checkpoint_directory_problems,
    data_problems,
    log_directory_problems,
    resume_problems,
    secret_problems,
)
from nemo_style_aligner.trainer.jobs.placement import (
    CRITIC_JOB,
    critic_config,
    has_critic_apart,
    has_critic_here,
    has_reference_here,
    has_reward_model_here,
    of_critic,
    placement_problems,
)
from nemo_style_aligner.trainer.jobs.settings_in_vain import settings_in_vain
from nemo_style_aligner.trainer.launch.initialization import bind_address
from nemo_style_aligner.trainer.launch.roles import devices_key
from nemo_style_aligner.trainer.models.adapter_files import adapter_kind
from nemo_style_aligner.trainer.models.gpt import parse_precision, uses_distributed_optimizer
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.kept_passes import why_not_kept
from nemo_style_aligner.trainer.models.lora import LoraSettings
from nemo_style_aligner.trainer.models.optimizer import Schedule
from nemo_style_aligner.trainer.models.restore import lay_over
from nemo_style_aligner.trainer.rl.rollouts.setup import sampling_params
from nemo_style_aligner.trainer.training.run_control import parse_duration

logger = logging.getLogger(__name__)

_LONGEST_NAME = 200  # file systems allow 255; numbers grow, and suffixes are added


def check_job(name: str, config: JobConfig, world_size: int) -> None:
    """Check a job's settings against each other and against its model.

    Args:
        name: the job's YAML file, without its ending.
        config: its config, which `config.check_config` has passed.
        world_size: ranks that the job will have.

    Raises:
        ConfigError: one line for each problem.
        PlaceTakenError: a port is taken.
    """
    rank = detect_launch(os.environ).rank
    problems = find_problems(name, config, world_size, rank)
    if problems:
        raise ConfigError("these settings cannot work:\n" + "\n".join(f"  {problem}" for problem in problems))
    view = JobView(name, config, world_size, None)
    if rank == 0:
        _require_free_ports(view)
        for doubt in _doubts(view):
            logger.warning(doubt)


def _require_free_ports(view: JobView) -> None:
    """Find out whether rank 0 could listen where it will, before what takes long. Raises PlaceTakenError."""
    queue, served = "trainer.ppo.batch_iterator", "trainer.ppo.serve_policy"
    places = {"trainer.ppo": "service", "inference": "service", served: "API", queue: "rollout work queue"}
    off = {served: not view.get(f"{served}.enable"), queue: not view.get(f"{queue}.use_flask") or view.rollout_ranks}
    for section, name in places.items():
        if view.has(f"{section}.port") and view.get(f"{section}.port") and not off.get(section):
            require_free(bind_address(view.get(f"{section}.host")), int(view.get(f"{section}.port")), name, section)
    if dashboard := view.get("exp_manager.dashboard_port"):
        require_free(LOOPBACK, int(dashboard), "dashboard", port_key="exp_manager.dashboard_port")


def find_problems(
    name: str, config: JobConfig, world_size: int, rank: int = 0, checks: Sequence[Check] | None = None
) -> list[str]:
    """The problems that `check_job` raises, one line each; ``checks``: those to make, by default all."""
    problems: list[str] = []
    architecture = None
    key = archive_key(name)
    try:
        config = config.changed({"model": lay_over(base_config(config.get(key), key), config.model_given())})
        if wrong := [*value_problems(config.given, fields_of_job(name), load_defaults(name))]:  # of the checkpoint's
            return wrong
        architecture = ModelArchitecture.from_nemo_config(config.given.model)
    except (OSError, ValueError, KeyError) as error:
        problems.append(str(error.args[0] if isinstance(error, KeyError) else error))
    view = JobView(name, config, world_size, architecture, rank)
    return problems + [problem for check in checks or _CHECKS for problem in check(view)]


# ---- single values ------------------------------------------------------------------------------


def _attempt(read: Callable[[], Any]) -> Iterator[str]:
    """The message of the ValueError or TypeError that ``read`` raises, if it does."""
    try:
        read()
    except (ValueError, TypeError) as error:
        yield str(error)


def _values_that_are_read_as_a_whole(view: JobView) -> Iterator[str]:
    trainer, exp_manager = view.config.trainer, view.config.exp_manager
    yield from _attempt(lambda: parse_precision(trainer.precision))
    yield from _attempt(lambda: parse_duration(exp_manager.max_time_per_run))
    yield from _archive_name(exp_manager.name)
    if view.has("exp_manager.checkpoint_callback_params"):
        yield from _attempt(lambda: CheckpointSettings.from_config(exp_manager))
        yield from _checkpoint_name(view, exp_manager.checkpoint_callback_params.filename)
    if isinstance(optim := vars(view.config.model).get("optim"), Optimizer):
        if len(optim.betas) != 2:
            yield f"{view.show('model.optim.betas')}: give two numbers"
        yield from _attempt(lambda: Schedule.from_config(optim, 1))
    if view.has("model.force_head_dtype"):
        yield from _attempt(lambda: RewardHeadConfig.from_model_config(view.config.given.model))
    if view.is_actor:
        for problem in _attempt(lambda: sampling_params(view.actor.model.ppo, view.actor.trainer.ppo.trt_llm.seed)):
            yield f"model.ppo.sampling_params and length_params: {problem}"


def _sft_format(view: JobView) -> Iterator[str]:
    if not isinstance(view.config, SFT):
        return
    data, answer_only = view.config.model.data, view.config.model.answer_only_loss
    for part, files in (("train_ds", data.train_ds), ("validation_ds", data.validation_ds)):
        if files.file_path:
            read = functools.partial(SFTFormat.from_config, files, data, answer_only, has_template=True)
            yield from (f"model.data.{part}: {problem}" for problem in _attempt(read))


def _trackers(view: JobView) -> Iterator[str]:
    for package in ("wandb", "mlflow"):
        key = f"exp_manager.create_{package}_logger"
        if view.get(key) and package not in sys.modules and importlib.util.find_spec(package) is None:
            install = f"pip install 'nemo_style_aligner[{package}]'"
            yield f"{view.show(key)}: {package} is not installed; {install}, or set {key}=False"


def _profile(view: JobView) -> Iterator[str]:
    first, last = (view.get(f"trainer.profile.{name}_step") for name in ("start", "end"))
    if last is not None and (first is None or last < first):
        yield f"trainer.profile.end_step={last}: needs a trainer.profile.start_step that is not behind it, not {first}"
    if first is not None and not all(0 <= rank < view.training_ranks for rank in view.get("trainer.profile.ranks")):
        yield f"{view.show('trainer.profile.ranks')}: the ranks that train are 0 to {view.training_ranks - 1}"


# ---- paths --------------------------------------------------------------------------------------


def _paths(view: JobView) -> Iterator[str]:
    has_checkpoints = view.has("exp_manager.checkpoint_callback_params")
    if has_checkpoints or view.get("exp_manager.watchdog_minutes") is not None:
        yield from log_directory_problems(view.config.exp_manager)  # where every rank's watchdog writes
    if view.is_apart:
        return
    if has_checkpoints:
        yield from checkpoint_directory_problems(view.config.exp_manager)
        yield from resume_problems(view.config.exp_manager)
    if isinstance(data := vars(view.config.model).get("data"), SFTData | Data):
        yield from data_problems(data)
    if view.is_actor and not shares_secret(view):
        return
    for token in ("remote_critic_rm.token", "trainer.ppo.token", "inference.token"):  # each in another job
        yield from secret_problems(view.get(token), token)


def _doubts(view: JobView) -> Iterator[str]:
    """Settings that work, but hardly as intended."""
    watchdog, limit = "exp_manager.watchdog_minutes", "trainer.distributed_timeout_minutes"
    minutes, timeout = view.get(watchdog), view.get(limit)
    if minutes is not None and minutes >= timeout:
        yield (
            f"{watchdog}={minutes} is not below {limit}={timeout}: a hanging collective will end the job before the "
            "watchdog can report who held it up"
        )
    reshard = "trainer.ppo.trt_llm.reshard"
    if view.get(reshard) and view.pp_size == 1:
        yield (
            f"{reshard}=True has no effect without pipeline stages ({PP}=1): the number of ranks that share an engine "
            "is set by trainer.ppo.generation.tensor_parallel_size"
        )
    yield from settings_in_vain(view)
    for key in (GLOBAL_BATCH, MICRO_BATCH):
        of_data = key.replace("model.", "model.data.train_ds.")
        size, other = view.get(key), view.get(of_data)
        if other is not None and size != other:
            yield f"{of_data}={other} has no effect: {key}={size} wins"


# ---- layout -------------------------------------------------------------------------------------


def _ranks(view: JobView) -> Iterator[str]:
    parts = view.tp_size * view.cp_size * view.pp_size
    apart = ", ".join(f"{devices_key(role)}={count}" for role, count in view.apart.items())
    if view.training_ranks < 1:
        yield f"{apart}: none of the {view.world_size} ranks is left to train; lower it or start more ranks"
    elif view.training_ranks % parts:
        rest, shown = f", less {apart}" if apart else "", [CP] if view.cp_size > 1 else []
        yield (
            f"{view.show(TP, *shown, PP)}: {view.training_ranks} ranks (trainer.devices x trainer.num_nodes{rest}) "
            f"are not a multiple of {parts}; change the sizes or the number of ranks"
        )
    if view.architecture is not None:
        yield from view.architecture.layout_problems(view.tp_size, view.pp_size)
        yield from _experts(view, view.architecture)


def _experts(view: JobView, architecture: ModelArchitecture) -> Iterator[str]:
    """The ranks that share experts, and what keeps their loads even."""
    loss, step = (view.get(f"model.{name}") or 0 for name in ("moe_aux_loss_coeff", "moe_router_bias_update_rate"))
    if (loss or step) and architecture.experts is None:
        yield f"model.moe_aux_loss_coeff={loss}, moe_router_bias_update_rate={step}: the model has no experts"
    elif step and architecture.experts is not None and not architecture.experts.has_bias:
        yield f"model.moe_router_bias_update_rate={step}: the choice of the model's experts has no bias; set it to 0"
    if architecture.experts is None:
        if view.ep_size > 1 or view.get(ETP):
            yield f"{view.show(EP, ETP)}: the model has no experts; leave them out"
        return
    parts = view.ep_size * view.etp_size * view.pp_size
    if view.training_ranks > 0 and view.training_ranks % parts:
        yield (
            f"{view.show(EP, ETP, PP)}: {view.training_ranks} ranks are not a multiple of {parts}; change the sizes or "
            "the number of ranks"
        )
    yield from architecture.expert_layout_problems(view.ep_size, view.etp_size)
    if view.tp_size > 1 and view.has("model.optim") and not view.get("model.sequence_parallel"):
        yield f"{view.show(TP)}: ranks that train experts must share tokens, too; set model.sequence_parallel=True"


def _batches(view: JobView) -> Iterator[str]:
    """Both sizes must be set. Nothing has to divide a global batch: shares of it may be smaller, or empty."""
    for key in (GLOBAL_BATCH, MICRO_BATCH):
        if view.has(key) and not view.get(key):
            yield f"{key} is not set, neither in the job's config nor in the checkpoint's: give it a value"


def _lengths(view: JobView) -> Iterator[str]:
    length, positions = view.get(LENGTH), view.get(POSITIONS)
    if length and positions and length > positions:
        yield f"{view.show(LENGTH)} is longer than {view.show(POSITIONS)}; raise the latter or lower the former"
    for key in (
        "model.data.seq_length",
        "model.data.train_ds.max_seq_length",
        "model.data.validation_ds.max_seq_length",
    ):
        if length and (view.get(key) or 0) > length:
            yield f"{view.show(key)} is longer than {view.show(LENGTH)}; lower it or raise {LENGTH}"
    for part in ("model.data.train_ds", "model.data.validation_ds"):
        least, greatest = view.get(f"{part}.min_seq_length"), view.get(f"{part}.max_seq_length")
        if least and greatest and least > greatest:
            yield f"{view.show(f'{part}.min_seq_length')} is above {view.show(f'{part}.max_seq_length')}"


def _recompute(view: JobView) -> Iterator[str]:
    layers, own = "model.activations_checkpoint_num_layers", view.architecture
    if view.get("model.activations_checkpoint_granularity") != "full" or own is None or view.get(layers) is None:
        return
    of_stage, method = own.num_layers // view.pp_size, view.get("model.activations_checkpoint_method") or "uniform"
    if view.get(layers) > of_stage:
        yield f"{view.show(layers)}: a pipeline stage has only {of_stage} layers; lower it"
    elif method == "uniform" and of_stage % view.get(layers):
        divisors = [n for n in range(1, of_stage) if of_stage % n == 0]
        yield (
            f"{view.show(layers)}: the {of_stage} layers of a pipeline stage cannot be divided into blocks of so many; "
            f"choose one of {', '.join(map(str, divisors))}, or activations_checkpoint_method=block"
        )


# ---- adapters -----------------------------------------------------------------------------------


def _adapters(view: JobView) -> Iterator[str]:
    if not view.has("model.peft"):
        return
    start, tuning = "model.peft.restore_from_path", "model.peft.lora_tuning"
    lora = LoraSettings.from_config(view.config.given.model)
    if lora is None:
        if view.get(start):
            yield f"{view.show(start)}: needs model.peft.peft_scheme=lora"
        return
    for key in ("weight_tying", "position_embedding_strategy"):
        if view.get(f"{tuning}.{key}"):
            yield f"{view.show(f'{tuning}.{key}')}: not supported; leave it out"
    if view.architecture is not None:
        yield from lora.problems(view.architecture, view.pp_size)
    if view.get(start) and not view.is_apart:
        try:
            problem = adapter_kind(Path(str(view.get(start)))).problem(lora)
        except (OSError, ValueError) as error:
            problem = f"{view.show(start)}: {error}"
        if problem:
            yield problem


# ---- passes that are kept -----------------------------------------------------------------------


def _keep_activations(view: JobView) -> Iterator[str]:
    """With placement ``auto`` only `keep_passes` can tell, once the model is built, whether weights are swapped."""
    if view.is_actor:
        key, placement = "model.ppo.keep_activations", "trainer.ppo.reference_policy_placement"
        has_second = has_reference_here(view.actor.trainer.ppo)
    else:
        key, placement = "model.keep_activations", "model.rm_placement"
        has_second = bool(view.get("trainer.ppo.combine_rm_and_critic_server"))
    if view.get(key) != "always":
        return
    drops_out = any(view.get(f"model.{name}") for name in ("hidden_dropout", "attention_dropout"))
    lora = LoraSettings.from_config(view.config.given.model)  # with it, nothing is swapped
    swaps = has_second and view.get(placement) == "swap" and lora is None
    shares = view.architecture is not None and view.architecture.experts is not None and view.shares_experts
    reasons = [why_not_kept(swaps, view.pp_size, drops_out or bool(lora and lora.dropout), shares)]
    logprobs = "trainer.ppo.policy_logprobs"
    if view.is_actor and view.get(GLOBAL_BATCH) not in (None, view.responses):
        reasons.append(f"with {view.shown_responses}, {view.show(GLOBAL_BATCH)} a step makes several updates")
    if view.is_actor and view.get(logprobs) == "engine":
        reasons.append(f"with {view.show(logprobs)} there is no log-prob pass to keep")
    yield from (f"{view.show(key)}: {why}; choose auto or never" for why in reasons if why)


# ---- what checkpoints are called, and by what they are ranked -----------------------------------


def _ranking(view: JobView) -> Iterator[str]:
    """Problems if checkpoints are to be ranked by what this job, or its steps that are saved, do not measure."""
    params = "exp_manager.checkpoint_callback_params"
    name = view.get(f"{params}.monitor")
    if name is not None and not _is_measured(view, str(name)):
        yield f"{params}.monitor={name}: this job measures no such thing; choose one of {', '.join(_measured(view))}"
    key = f"{params}.save_best_model"
    if not view.get(key):
        return
    section = f"trainer.{section_of_job(view.config.given)}"
    save_interval, val_check_interval = (view.get(f"{section}.{name}_interval") or 0 for name in ("save", "val_check"))
    if not any(view.get(f"model.data.{files}") for files in ("validation_ds.file_path", "data_prefix.validation")):
        val_check_interval = 0
    # Shares of a run are a number of steps when its length is known.
    if isinstance(save_interval, int) and isinstance(val_check_interval, int):
        with contextlib.suppress(ValueError):  # reported by other checks
            settings = CheckpointSettings.from_config(view.config.exp_manager)
            if (reason := settings.why_best_is_unknown(section, save_interval, val_check_interval)) is not None:
                yield f"{key}=True: {reason}"


def _measured(view: JobView) -> tuple[str, ...]:
    """What checkpoints can be ranked by and named after; ``*`` stands for any text."""
    if not view.has("exp_manager.checkpoint_callback_params.save_best_model"):  # the critic's service
        return ("step",)
    known = ("step", "epoch", "consumed_samples", "val_*", "train_*")
    counters = (f"{name}_optimization_step" for name in ("ppo", "reinforce", "rs"))
    return (*known, *counters) if view.is_actor else known


def _is_measured(view: JobView, name: str) -> bool:
    return any(re.fullmatch(pattern.replace("*", ".+"), monitored_name(name)) for pattern in _measured(view))


def _archive_name(name: str) -> Iterator[str]:
    """A problem of ``exp_manager.name``."""
    if not name.strip() or any(len(os.fsencode(part)) > _LONGEST_NAME for part in name.split("/")):
        yield f"exp_manager.name={name!r}: the archive NAME.nemo needs a name, of at most {_LONGEST_NAME} bytes"


def _checkpoint_name(view: JobView, template: str) -> Iterator[str]:
    """Problems of ``checkpoint_callback_params.filename``."""
    key = "exp_manager.checkpoint_callback_params.filename"
    fields = [name.split(":")[0] for name in re.findall(r"\{([^{}]+)\}", template)]
    monitor = str(view.get("exp_manager.checkpoint_callback_params.monitor"))  # `_monitor` checks it; it may be null
    if unknown := [field for field in fields if field != monitor and not _is_measured(view, field)]:
        names = ", ".join(_measured(view))
        yield f"{key}={template}: this job measures no {', '.join(unknown)}; fields in braces can be {names}"
        return
    # Values to try the template with: counters are integers, metrics of steps and validations are floats.
    examples = {name: 0.5 if name.startswith(("val_", "train_")) else 1 for name in fields}
    try:
        name = checkpoint_name(template, examples)
    except ValueError as error:
        yield f"exp_manager.{error}"
        return
    taken = (UNFINISHED, DAMAGED, LAST)
    if name.strip() in ("", ".", "..") or name.endswith(taken):
        yield (
            f"{key}={template!r}: a checkpoint needs a name, and it must not end with {', '.join(taken)}, which "
            "mark its state; try megatron_gpt-{step}"
        )
    elif len(os.fsencode(name)) > _LONGEST_NAME:
        yield f"{key}={template}: makes names of more than {_LONGEST_NAME} bytes; choose a shorter one"


# ---- the reward model and the critic ------------------------------------------------------------


def _reward_head(view: JobView) -> Iterator[str]:
    if not view.has("model.force_head_dtype") or not view.has("model.optim"):
        return
    precision, head, optim = "trainer.precision", "model.force_head_dtype", "model.optim.name"
    try:
        dtypes = parse_precision(view.get(precision)), RewardHeadConfig.from_model_config(view.config.given.model).dtype
    except (ValueError, TypeError):
        return  # `_values_that_are_read_as_a_whole` reports it
    if dtypes[0].itemsize > dtypes[1].itemsize and not uses_distributed_optimizer(view.get(optim)):
        yield (
            f"{view.show(head, precision, optim)}: this optimizer cannot train a head less precise than the model; set "
            f"{head}=float32, or {optim}=distributed_fused_adam"
        )


def _attributes(view: JobView) -> Iterator[str]:
    kind, number = "model.reward_model_type", "model.regression.num_attributes"
    count = view.get(number)
    if view.has(kind) and view.get(kind) in (None, "binary_ranking") and isinstance(count, int) and count > 1:
        yield (
            f"{number}={count}, {kind}=binary_ranking: only a regression model has several attributes; set "
            f"{kind}=regression, or {number}=1"
        )


def _loss_weights(view: JobView) -> Iterator[str]:
    losses = {"dpo": "preference", "kto": "preference", "knowledge_distillation": "kd"}
    for section, loss in losses.items():
        weights = f"model.{section}.{loss}_loss_weight", f"model.{section}.sft_loss_weight"
        if view.has(weights[0]) and not any(map(view.get, weights)):
            yield f"{view.show(*weights)}: there is nothing to learn; raise one of them"


def _preferences(view: JobView) -> Iterator[str]:
    for section in ("model.dpo", "model.kto"):
        if not view.has(section):
            continue
        folder = f"{section}.reference_logprobs_dir"
        if view.get(folder) and (reason := why_unwritable(Path(os.path.expanduser(view.get(folder))))) is not None:
            yield f"{view.show(folder)} cannot be written to ({reason}): give a folder that you may write to"
        start, lora = "model.peft.restore_from_path", LoraSettings.from_config(view.config.given.model)
        if view.get(folder) and lora is not None and (view.get(start) or lora.init_b != "zero"):
            init = "model.peft.lora_tuning.row_init_method"
            yield (
                f"{view.show(folder, start, init)}: what is kept is of the base model alone, and the reference has "
                f"adapters of its own; set {folder}=null"
            )


def _teacher_logits(view: JobView) -> Iterator[str]:
    output, top_k = "output_path", "top_k"
    if not view.has(output):
        return
    yield from _attempt(lambda: data_source(view.get("data.data.file_path"), "data.data.file_path"))
    if not view.get(output):
        yield f"{output} is not set: pass {output}=FILE.jsonl"
    elif (reason := why_unwritable(Path(os.path.expanduser(view.get(output))).absolute().parent)) is not None:
        yield f"{view.show(output)} cannot be written ({reason}): give a file in a folder that you may write to"
    if view.architecture is not None and view.get(top_k) > view.architecture.vocab_size:
        yield f"{view.show(top_k)}: the model's vocabulary has {view.architecture.vocab_size} tokens; lower it"


def _schedule_of_the_critic(view: JobView) -> Iterator[str]:
    key = "trainer.ppo.max_steps"  # an actor's is of the run
    has_end = view.get("model.optim.sched.name") in (None, "constant") or view.get("model.optim.sched.max_steps")
    if not view.is_actor and view.get(key) == -1 and not has_end:
        yield f"{view.show(key)}: the learning rate's schedule needs a number of critic updates; give 1 or more"


def _model_name(view: JobView) -> Iterator[str]:
    key, name = "inference.model_name", str(view.get("inference.model_name"))
    if view.has(key) and (name == "stats" or not re.fullmatch(r"[^\s/?#%]+", name)):
        yield f"{key}={name!r}: the service's paths have this name (/v2/models/NAME/infer); give a single plain word"


def _critic_here(view: JobView) -> Iterator[str]:
    """Problems of a critic in the actor's job: those that a job of its own would have."""
    if not view.is_actor or not needs_critic(view) or not has_critic_here(view.actor) or view.is_apart:
        return
    try:
        critic = critic_config(view.actor)
    except ConfigError as error:
        yield from str(error).splitlines()
        return
    start = "critic.model.peft.restore_from_path"
    if view.get(start) and has_reward_model_here(view.actor):
        yield (
            f"{view.show(start)}: the reward model beside this critic would be without these adapters; merge them into "
            f"its archive (nsa convert), or set critic.trainer.ppo.combine_rm_and_critic_server=False"
        )
    is_apart = has_critic_apart(view.actor)
    ranks = critic.trainer.devices if is_apart else view.training_ranks
    for problem in find_problems(CRITIC_JOB, critic, ranks, view.rank, _OF_MODELS):
        yield of_critic(problem, is_apart=is_apart)


_OF_MODELS: tuple[Check, ...] = (
    *(_values_that_are_read_as_a_whole, _ranks, _batches, _lengths, _recompute, _adapters),
    *(_reward_head, _attributes, _schedule_of_the_critic, _keep_activations),
)
_CHECKS: tuple[Check, ...] = (
    *(*_OF_MODELS, _trackers, _profile, _ranking, _sft_format, _loss_weights, _preferences, _model_name),
    *(_teacher_logits, placement_problems, _critic_here, actor_problems, _paths),
)  # each concerns the jobs that have the keys of which it speaks
