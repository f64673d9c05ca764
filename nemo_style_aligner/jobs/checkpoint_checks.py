"""Checks of what checkpoints are called, and by what they are ranked. Each yields one line per problem or doubt."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from nemo_style_aligner.checkpoints.directory import DAMAGED, LAST, checkpoint_name
from nemo_style_aligner.checkpoints.durable import UNFINISHED
from nemo_style_aligner.checkpoints.settings import CheckpointSettings, monitored_name
from nemo_style_aligner.config.foreign_keys import section_of_job
from nemo_style_aligner.jobs.job_view import JobView


def ranking_problems(view: JobView) -> Iterator[str]:
    """Problems if checkpoints are to be ranked by what this job, or its steps that are saved, do not measure."""
    params = "exp_manager.checkpoint_callback_params"
    name = view.get(f"{params}.monitor")
    if name is not None and not _is_measured(view, str(name)):
        yield f"{params}.monitor={name}: this job measures no such thing; choose one of {', '.join(_measured(view))}"
    key = f"{params}.save_best_model"
    if not view.get(key):
        return
    section = f"trainer.{section_of_job(view.cfg)}"
    save_interval, val_check_interval = (view.get(f"{section}.{name}_interval") or 0 for name in ("save", "val_check"))
    if not any(view.get(f"model.data.{files}") for files in ("validation_ds.file_path", "data_prefix.validation")):
        val_check_interval = 0
    # Shares of a run are a number of steps when its length is known.
    if isinstance(save_interval, int) and isinstance(val_check_interval, int):
        with contextlib.suppress(ValueError):  # reported by other checks
            settings = CheckpointSettings.from_config(view.cfg.exp_manager)
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


def archive_name_problems(name: str) -> Iterator[str]:
    """A problem of ``exp_manager.name``."""
    if not name.strip() or any(len(os.fsencode(part)) > _LONGEST_NAME for part in name.split("/")):
        yield f"exp_manager.name={name!r}: the archive NAME.nemo needs a name, of at most {_LONGEST_NAME} bytes"


def checkpoint_name_problems(view: JobView, template: str) -> Iterator[str]:
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


_LONGEST_NAME = 200  # file systems allow 255; numbers grow, and suffixes are added
