"""Checks of what checkpoints are called, and by what they are ranked. Each yields one line per problem or doubt."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from nemo_style_aligner.algorithms.job_view import JobView
from nemo_style_aligner.checkpoints.directory import DAMAGED, LAST, checkpoint_name
from nemo_style_aligner.checkpoints.durable import UNFINISHED
from nemo_style_aligner.checkpoints.settings import CheckpointSettings, monitored_name


def ranking_problems(view: JobView) -> Iterator[str]:
    """Problems if checkpoints are to be ranked by what this job, or its steps that are saved, do not measure."""
    params = "exp_manager.checkpoint_callback_params"
    name = view.get(f"{params}.monitor")
    if name is not None and not _is_measured(view, str(name)):
        yield f"{params}.monitor={name}: this job measures no such thing; choose one of {', '.join(_measured(view))}"
    key = f"{params}.save_best_model"
    # What cannot be read is reported by other checks.
    with contextlib.suppress(OmegaConfBaseException, ValueError, TypeError):
        if view.get(key) is True and (reason := _why_best_is_unknown(view.cfg, *_intervals(view.cfg))) is not None:
            yield f"{key}=True: {reason}"


def _job_section(cfg: DictConfig) -> str:
    return next(name for name in ("sft", "rm", "ppo") if name in cfg.trainer)


def _intervals(cfg: DictConfig) -> tuple[Any, Any]:
    """``save_interval`` and ``val_check_interval``, the latter 0 where there is nothing to validate on."""
    section = cfg.trainer[_job_section(cfg)]
    return section.save_interval or 0, (section.val_check_interval or 0) if _has_validation_data(cfg) else 0


def _why_best_is_unknown(cfg: DictConfig, save_interval: Any, val_check_interval: Any) -> str | None:
    """`CheckpointSettings.why_best_is_unknown` of a job; None where that depends on the length of the run."""
    if not isinstance(save_interval, int) or not isinstance(val_check_interval, int):
        return None
    settings = CheckpointSettings.from_config(cfg.exp_manager)
    return settings.why_best_is_unknown(f"trainer.{_job_section(cfg)}", save_interval, val_check_interval)


def _has_validation_data(cfg: DictConfig) -> bool:
    data = cfg.model.data
    if "data_prefix" not in data:
        return bool(data.validation_ds.file_path)
    return isinstance(data.data_prefix, DictConfig) and bool(data.data_prefix.get("validation"))


def _measured(view: JobView) -> tuple[str, ...]:
    """What checkpoints can be ranked by and named after; ``*`` stands for any text."""
    if view.name == "gpt_ppo_critic":
        return ("step",)
    known = ("step", "epoch", "consumed_samples", "val_*", "train_*")
    return (*known, "ppo_optimization_step", "reinforce_optimization_step") if view.is_actor else known


def _is_measured(view: JobView, name: str) -> bool:
    return any(re.fullmatch(pattern.replace("*", ".+"), monitored_name(name)) for pattern in _measured(view))


def ranking_doubts(cfg: DictConfig) -> Iterator[str]:
    """Settings of validation and ranking that work, but hardly as intended; of a job with data."""
    params, intervals = cfg.exp_manager.checkpoint_callback_params, _intervals(cfg)
    is_ranked = params.monitor and params.save_top_k and all(intervals) and not params.save_best_model
    if is_ranked and (reason := _why_best_is_unknown(cfg, *intervals)) is not None:
        yield f"save_top_k={params.save_top_k}: {reason}"
    name, mode = str(params.monitor), params.mode
    if re.search("loss|kl" if mode == "max" else "accuracy|rewards", name):
        kept = "largest" if mode == "max" else "smallest"
        yield f"monitor={name} with mode={mode} takes the {kept} value for the best: is that what you want?"


def archive_name_problems(name: str) -> Iterator[str]:
    """A problem of ``exp_manager.name``."""
    if not name.strip() or any(len(os.fsencode(part)) > _LONGEST_NAME for part in name.split("/")):
        yield f"exp_manager.name={name!r}: the archive NAME.nemo needs a name, of at most {_LONGEST_NAME} bytes"


def checkpoint_name_problems(view: JobView, template: Any) -> Iterator[str]:
    """Problems of ``checkpoint_callback_params.filename``."""
    key = "exp_manager.checkpoint_callback_params.filename"
    if not isinstance(template, str):
        yield f"{key}={template}: must be text"
        return
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


_LONGEST_NAME = 200  # file systems allow 255; numbers grow, and suffixes are added
