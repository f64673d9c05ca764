"""Settings of which checkpoints are written and kept, and from which one a job resumes."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from nemo_style_aligner.trainer.config.schema import ExpManager


def monitored_name(monitor: str) -> str:
    """The metric that ``monitor`` means: NeMo-Aligner's ``validation_X`` and ``val_global_X`` are ``val_X``."""
    return re.sub("^(validation_|val_global_)", "val_", monitor)


@dataclasses.dataclass(frozen=True)
class CheckpointSettings:
    """``exp_manager.checkpoint_callback_params`` and the resume keys of ``exp_manager``: `config.schema` explains them.

    ``nemo_name``: the archive's file name without ``.nemo`` [exp_manager.name].
    """

    filename: str = "megatron_gpt-{step}"
    monitor: str | None = None
    mode: Literal["min", "max"] = "min"
    save_top_k: int = 1
    save_last_n: int = 2
    save_nemo_on_train_end: bool = True
    always_save_nemo: bool = False
    save_best_model: bool = False
    async_save: bool = True
    nemo_name: str = "megatron_gpt"
    resume_if_exists: bool = True
    resume_ignore_no_checkpoint: bool = True
    resume_from_checkpoint: str | None = None

    def __post_init__(self) -> None:
        if self.save_best_model and self.save_top_k == 0:
            raise ValueError(
                "exp_manager.checkpoint_callback_params.save_best_model=True with save_top_k=0: the best is not kept; "
                "set save_top_k to 1 or more, or to -1"
            )

    def why_best_is_unknown(self, section: str, save_interval: int, val_check_interval: int) -> str | None:
        """Why ``monitor`` cannot tell which of the checkpoints is the best, and what to do; None if it can.

        Args:
            section: of the config that has the intervals, for the message.
            save_interval, val_check_interval: steps between checkpoints and validations; 0: never.
        """
        if self.monitor is None:
            return "with checkpoint_callback_params.monitor=null nothing ranks checkpoints: name a metric"
        if save_interval == 0:
            return f"with {section}.save_interval=0 only the last step is saved: give an interval"
        if not self.monitor.startswith("val_"):
            return None
        if val_check_interval == 0:
            return f"nothing is validated, so no checkpoint has a {self.monitor}: give validation data and an interval"
        if save_interval % val_check_interval and val_check_interval % save_interval:
            return (
                f"{section}.save_interval={save_interval}, val_check_interval={val_check_interval}: of steps "
                f"{save_interval}, {2 * save_interval}, ..., which are saved, those that are not validated have no "
                f"{self.monitor}: make one interval a multiple of the other"
            )
        return None

    @classmethod
    def from_config(cls, exp_manager: ExpManager) -> CheckpointSettings:
        """Those of a job's ``exp_manager``."""
        params = exp_manager.checkpoint_callback_params
        given = vars(exp_manager) | vars(params) | {"nemo_name": exp_manager.name}
        given["monitor"] = None if params.monitor is None else monitored_name(params.monitor)
        return cls(**{field.name: given[field.name] for field in dataclasses.fields(cls)})
