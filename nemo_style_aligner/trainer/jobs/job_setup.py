"""What every job does before its loop: process groups, log, checkpoints, signals."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from nemo_style_aligner.engine.parallel.agreement import on_every_rank, on_first_rank
from nemo_style_aligner.engine.parallel.groups import ParallelLayout, initialize_model_parallel
from nemo_style_aligner.engine.parallel.machine import is_on_one_machine
from nemo_style_aligner.engine.text.text_format import TEXT_FORMAT, TextFormat
from nemo_style_aligner.errors import NotWrittenError
from nemo_style_aligner.guard.secret import AUTO, resolve_token
from nemo_style_aligner.kinds import Placement
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import CheckpointMismatchError
from nemo_style_aligner.trainer.checkpoints.training import RUN_SETTINGS, CheckpointManager, NemoExport
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.config.loading import ConfigError, for_log, log_directory
from nemo_style_aligner.trainer.jobs.log_lock import hold_log_directory
from nemo_style_aligner.trainer.jobs.run_settings import (
    base_of_run,
    changed_settings,
    digests_of_data,
    job_of,
    settings_of_run,
    why_another_base,
    why_another_critic,
)
from nemo_style_aligner.trainer.launch import roles
from nemo_style_aligner.trainer.launch.ending import abort_job, failures
from nemo_style_aligner.trainer.launch.stop_signals import EXIT_REQUEUE, STOPPED_EARLY, write_requeue_file
from nemo_style_aligner.trainer.models.adapter_files import BASE_FINGERPRINT
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.lora import LoraSettings
from nemo_style_aligner.trainer.models.optimizer import Optimizer
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.restore import BaseModel, portable_config
from nemo_style_aligner.trainer.telemetry import timeline
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.telemetry.trackers import start_trackers
from nemo_style_aligner.trainer.telemetry.watchdog import Watchdog
from nemo_style_aligner.trainer.training.run_control import RunControl, parse_duration
from nemo_style_aligner.wording import size_of, some_of

logger = logging.getLogger(__name__)


class Resumable(Protocol):
    """A trainer or service whose counters live in the checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken."""
        ...


_BYTES_OF_STATE = 12  # of a parameter in a checkpoint, beside the weight: fp32 main weight and Adam's two moments
_SURELY_NEEDED = 0.9  # of the estimated size of a checkpoint: a reward model has no output layer
_SHARED_SECONDS = 10.0  # until a file is seen on all machines: file systems may keep what they knew for some seconds
# Limits of the wait for trackers: a job that is stopped has to end in time, and its next start continues their runs.
_TRACKER_SECONDS, _TRACKER_SECONDS_STOPPED = 60.0, 10.0


class Closable(Protocol):
    """What is open while a job runs."""

    def close(self) -> None:
        """End it."""


@dataclasses.dataclass
class Run:
    """The surroundings of a job.

    Attributes:
        log_dir: where the job writes.
        layout: the model-parallel layout.
        metrics: rank 0's log.
        control: when to stop early.
        checkpoints: saving and resuming.
        watchdog: ends the job when it hangs; None if it is turned off.
        dashboard: rank 0's, if there is to be one.
    """

    log_dir: Path
    layout: ParallelLayout
    metrics: MetricsLogger
    control: RunControl
    checkpoints: CheckpointManager
    watchdog: Watchdog | None = None
    dashboard: Closable | None = None

    def resume(self, config: JobConfig, model: MegatronModel, optimizer: Optimizer, trainer: Resumable) -> None:
        """Continue from the checkpoint that ``exp_manager`` selects, if there is one. Log the job's config.

        Raises:
            ConfigError: it is a checkpoint of another kind of job, or of a run that began with another archive.
            CheckpointMismatchError: it is another model's.
        """
        try:
            state = self.checkpoints.resume(model, optimizer, self._require_same_run)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"{error}. To train another model than that of this run, give another exp_manager.explicit_log_dir"
            ) from error
        if self.checkpoints.nemo is not None and self.checkpoints.nemo.tokenizer is not None:
            config.given.model[TEXT_FORMAT] = (
                self.checkpoints.nemo.tokenizer.format.to_config()
            )  # for archives of checkpoints
        # Not before: a start that is refused has nothing to do with what is here.
        self.metrics.log_hyperparameters(*for_log(config.given))
        if state is not None:
            self._warn_of_other_settings(state.get(RUN_SETTINGS) or {})
            trainer.load_state_dict(state)

    def note_format(self, written: TextFormat) -> None:
        """Have the archives say how the texts are written that the model is trained on."""
        nemo = self.checkpoints.nemo
        if nemo is not None and nemo.tokenizer is not None:
            nemo.tokenizer.format = nemo.tokenizer.format.followed_by(written)

    def _require_same_run(self, path: Path, state: Mapping[str, Any]) -> None:
        settings, own_settings = state.get(RUN_SETTINGS) or {}, self.checkpoints.run_settings or {}
        before, now = job_of(settings), job_of(own_settings)
        if None not in (before, now) and before != now:
            raise ConfigError(
                f"{path} is a checkpoint of {before}, and this is {now}: give each job a log directory of its own "
                "(exp_manager.explicit_log_dir). To start from that checkpoint's weights, make an archive of it with "
                "nsa convert"
            )
        if (reason := why_another_critic(settings, own_settings)) is not None:
            raise ConfigError(
                f"{path} cannot be continued: {reason}. To start a new run, give another exp_manager.explicit_log_dir"
            )
        if (reason := why_another_base(settings, own_settings)) is not None:
            raise ConfigError(
                f"{path} cannot be continued: {reason}. To start a new run from the latter, give another "
                "exp_manager.explicit_log_dir"
            )

    def _warn_of_other_settings(self, before: Mapping[str, str]) -> None:
        changed = changed_settings(before, self.checkpoints.run_settings or {})
        if changed and self.metrics.rank == 0:
            logger.warning(
                "the run continues with settings that differ from those of its checkpoint: %s. To start a new run with "
                "them, give another exp_manager.explicit_log_dir",
                some_of(changed, shown=10),
            )

    def close(self) -> int:
        """Wait for the checkpoint and archive being written, and for the log; return the job's exit status.

        Raises:
            OSError: they could not be written.
        """
        self.checkpoints.finish()
        if self.control.status == EXIT_REQUEUE and dist.get_rank() == 0:
            # Before the log is closed: that may wait for a network, and the process may be killed meanwhile.
            write_requeue_file(self.log_dir, STOPPED_EARLY)
        self.metrics.close(_TRACKER_SECONDS_STOPPED if self.control.status == EXIT_REQUEUE else _TRACKER_SECONDS)
        if self.watchdog is not None:
            self.watchdog.stop()
        if self.dashboard is not None:
            self.dashboard.close()
        return self.control.status


def lay_out(model: schema.Model, timeout_minutes: float) -> ParallelLayout:
    """Divide the job's ranks as its ``model`` section says, and seed them; see `initialize_model_parallel`."""
    return initialize_model_parallel(
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.seed,
        timeout_minutes,
        ep_size=model.expert_model_parallel_size,
        etp_size=model.expert_tensor_parallel_size,
        cp_size=model.context_parallel_size,
    )


def start_run(config: JobConfig) -> Run:
    """Set up a job's surroundings. torch.distributed must be initialised (the ``@job`` decorator does it).

    Raises:
        ConfigError: another job works in its log directory, it may not be written to, or machines see different ones.
        NotWrittenError: there is no room in it.
    """
    layout = lay_out(config.model, config.trainer.distributed_timeout_minutes)
    exp_manager, log_dir, rank = config.exp_manager, log_directory(config.exp_manager), dist.get_rank()
    on_first_rank(lambda: hold_log_directory(log_dir, exp_manager.name))
    require_shared(log_dir)
    run_settings = settings_of_run(config.given)
    data = vars(config.model).get("data")
    if isinstance(data, schema.SFTData | schema.Data) and not rank:  # whose settings are saved and compared
        run_settings |= digests_of_data(data)
    return Run(
        log_dir=log_dir,
        layout=layout,
        metrics=MetricsLogger(log_dir, rank, () if rank else start_trackers(exp_manager, log_dir)),
        control=RunControl(parse_duration(exp_manager.max_time_per_run)),
        checkpoints=CheckpointManager(
            log_dir / "checkpoints",
            CheckpointSettings.from_config(exp_manager),
            run_settings=run_settings,
        ),
        watchdog=start_watchdog(exp_manager.watchdog_minutes, log_dir),
        dashboard=start_dashboard(exp_manager, log_dir),
    )


def require_shared(log_dir: Path) -> None:
    """Make sure that all machines see the same log directory: every rank writes its part of a checkpoint. Collective.

    Raises:
        ConfigError: some do not.
    """
    if is_on_one_machine():
        return

    def look() -> tuple[str, bool]:
        deadline = time.monotonic() + _SHARED_SECONDS
        while not (is_there := (log_dir / name).exists()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return socket.gethostname(), is_there

    name = on_first_rank(lambda: Path(tempfile.mkdtemp(prefix="shared_", dir=log_dir)).name)
    seen = on_every_rank(look, None)
    if dist.get_rank() == 0:
        (log_dir / name).rmdir()
    if others := sorted({host for host, is_there in seen if not is_there}):
        raise ConfigError(
            f"the log directory {log_dir} is not the same folder on all machines: what rank 0 writes on {seen[0][0]} "
            f"is not there on {some_of(others, shown=10)}. All ranks write checkpoints: set "
            "exp_manager.explicit_log_dir to a folder on a file system that the machines share"
        )


def start_service_watchdog(exp_manager: schema.ExpManager) -> Watchdog | None:
    """The watchdog of a service that writes nothing else in its log directory. Collective.

    Raises:
        ConfigError: another job works there. Without a watchdog nothing is written, so any number of jobs may.
    """
    log_dir = log_directory(exp_manager)
    if exp_manager.watchdog_minutes is not None:
        on_first_rank(lambda: hold_log_directory(log_dir, exp_manager.name))
    return start_watchdog(exp_manager.watchdog_minutes, log_dir)


def start_watchdog(minutes: float | None, log_dir: Path) -> Watchdog | None:
    """Start this rank's watchdog in a directory that is this job's alone; None: no watchdog.

    ``minutes`` are ``exp_manager.watchdog_minutes``.
    """
    if minutes is None:
        return None
    channel = roles.channel()
    if channel is None or channel.serves:  # a service is not stuck while nobody asks it: its watchdog watches it alone
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        rank, size = channel.rank, channel.size - sum(channel.apart.values()) + channel.num_rollout_ranks
    watchdog = Watchdog(log_dir, rank, size, minutes * 60, failures.run, abort_job, failures.first)
    watchdog.start()
    return watchdog


def frozen_policy(model: MegatronModel, base: BaseModel, placement: Placement) -> FrozenWeights:
    """The policy as it is now, which it is compared with while it is trained: its reference."""
    return FrozenWeights(model, placement, lambda: base.build(trainable=False))


def start_timeline(exp_manager: schema.ExpManager, log_dir: Path) -> None:
    """Note this rank's phases from now on, if that is asked for."""
    if exp_manager.timeline or exp_manager.dashboard_port is not None:
        channel = roles.channel()
        timeline.record(log_dir, dist.get_rank() if channel is None else channel.rank)


def start_dashboard(exp_manager: schema.ExpManager, log_dir: Path) -> Closable | None:
    """Note phases and, on rank 0, serve the page, if that is asked for. Collective.

    The page is a tool, and training loads no tool that nobody asks for: it is imported by its name.

    Raises:
        PlaceTakenError: the port is taken.
        SecretError: the shared secret cannot be used.
    """
    start_timeline(exp_manager, log_dir)
    opened = list[Closable]()

    def serve(port: int) -> None:
        dashboard = importlib.import_module("nemo_style_aligner.tools.reports.dashboard")
        opened.append(dashboard.Dashboard(log_dir, port, resolve_token(AUTO, "exp_manager.dashboard_port")))

    if (port := exp_manager.dashboard_port) is not None:
        on_first_rank(lambda: serve(port))
    return opened[0] if opened else None


def training_batching(model: schema.TrainedModel, group: int = 1, micro_batch_size: int | None = None) -> MicroBatching:
    """Micro batches of forward-backward passes, from the ``model`` section; ``group`` rows make an example.

    ``micro_batch_size``, if given, replaces the section's.
    """
    examples = model.micro_batch_size if micro_batch_size is None else micro_batch_size
    return MicroBatching(examples * group, model.max_tokens_per_micro_batch, group, model.share_prompts)


def forward_batching(
    model: schema.ActorModel | schema.CriticModel | schema.ServedRewardModel,
) -> MicroBatching:
    """Micro batches of passes without gradients, from the ``model`` section: of an actor, what its ``ppo`` says."""
    own = model.ppo if isinstance(model, schema.ActorModel) else model
    num_rows, max_tokens = own.forward_micro_batch_size, own.forward_max_tokens_per_micro_batch
    return MicroBatching(num_rows, max_tokens, shares_prompts=model.share_prompts)


def announce_checkpoints(run: Run, base: BaseModel, critic: BaseModel | None = None) -> None:
    """Log how large checkpoints will be, before anything is trained that could not be saved. Collective.

    Raises:
        NotWrittenError: the disk has no room for one.
    """
    size = _checkpoint_bytes(base) + (0 if critic is None else _checkpoint_bytes(critic))
    free = on_first_rank(lambda: shutil.disk_usage(run.log_dir).free)
    about = f"a checkpoint takes about {size_of(size)}" + ("" if critic is None else " with the critic")
    logger.info("%s; %s are free in %s", about, size_of(free), run.log_dir)
    if free < size * _SURELY_NEEDED:
        raise NotWrittenError(
            f"{about}, and {size_of(free)} are free in {run.log_dir}: make room, or give another "
            "exp_manager.explicit_log_dir"
        )


def _checkpoint_bytes(base: BaseModel) -> int:
    """What a model that is trained takes of a checkpoint, about."""
    lora = LoraSettings.from_config(base.config)
    trained = base.architecture.num_parameters if lora is None else lora.num_parameters(base.architecture)
    return trained * (base.dtype.itemsize + _BYTES_OF_STATE)


def register_model(config: JobConfig, run: Run, base: BaseModel) -> None:
    """Log the model once; tell the checkpoints what their archives need, and what the run begins with. Collective.

    Raises:
        NotWrittenError: the disk has no room for a checkpoint.

    For other errors see `archive_identity`.
    """
    portable = portable_config(base.config, base.architecture, vars(config.trainer), base.path)
    lora = LoraSettings.from_config(base.config)
    identity = on_first_rank(base.identity)
    if lora is not None:
        config.given.model.peft[BASE_FINGERPRINT] = identity.partition("+")[0]
    is_adapter = lora is not None and base.config["peft"]["archive"] == "adapter"
    if is_adapter:
        portable |= {key: config.model_given()[key] for key in ("peft", "seed")}
    run.checkpoints.nemo = NemoExport(portable, base.tokenizer, is_adapter)
    announce_checkpoints(run, base)
    began_with = on_first_rank(lambda: base_of_run(base.path, identity, base.tokenizer))
    run.checkpoints.run_settings = {**(run.checkpoints.run_settings or {}), **began_with}
    logger.info(
        "%s: %.1f M parameters, %s, %s", base.path, base.architecture.num_parameters / 1e6, base.dtype, run.layout
    )
    if lora is not None:
        logger.info("adapters: %.2f M parameters are trained", lora.num_parameters(base.architecture) / 1e6)
