"""Trackers, which a job's numbers are sent to beside its own files: Weights & Biases, and MLflow."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from nemo_style_aligner.errors import UserError, excepthook_kept
from nemo_style_aligner.guard.masking import masked
from nemo_style_aligner.trainer.config.fields import Section
from nemo_style_aligner.trainer.config.loading import leaves_of
from nemo_style_aligner.trainer.config.schema import ExpManager
from nemo_style_aligner.trainer.telemetry.log_files import HYPERPARAMETERS_FILE, replace_text

logger = logging.getLogger(__name__)

_OF_LIGHTNING = {"save_dir": "dir", "version": "id"}  # its names of wandb's arguments
_MOST_PARAMS = 100  # that MLflow takes at once
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)  # of MLflow's metrics
_START_SECONDS = 30.0  # for all that a tracker does when it starts
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_MLFLOW_DEFAULTS = {  # A job neither waits minutes for a server, nor reports to MLflow's makers, nor shows passwords.
    _RETRIES: "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class TrackerError(UserError):
    """A tracker cannot be sent to: nobody is logged in, its server is out of reach, or the like."""

    exit_status = 1


class Tracker:
    """Tells a service what a job logs, in a thread of its own: training waits for no network, nor fails with it.

    Services may raise anything. The first call that fails ends the telling, with a warning.

    Args:
        kind: of the service.
        start: makes it, in that thread.

    Attributes:
        started: done when the service has started, or has failed to.
    """

    def __init__(self, kind: type[Service], start: Callable[[], Service]) -> None:
        self.kind = kind
        self.started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._start, self._remedy = start, kind.remedy
        self._is_over = False
        self._calls: queue.SimpleQueue[Callable[[Service], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name=f"to {kind.name}", daemon=True)
        self._thread.start()

    def tell(self, call: Callable[[Service], object]) -> None:
        """Have ``call`` called with the service, after those before it."""
        if not self._is_over:
            self._calls.put(call)

    def finish(self) -> None:
        """Tell no more, and end the run there."""
        self._calls.put(lambda service: service.finish())
        self._calls.put(None)

    def wait(self, until: float) -> None:
        """Wait for the end, until ``time.monotonic()`` is ``until``: services have no limit of their own."""
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            self.warn("takes too long, and is given up")

    def _send(self) -> None:
        try:
            with excepthook_kept():
                service = self._start()
        except Exception as error:  # noqa: BLE001  # whatever it is: the log directory has everything
            self._is_over = True
            self.started.set_exception(error)
            return
        self._remedy = service.remedy
        self.started.set_result(None)
        try:
            for call in iter(self._calls.get, None):
                call(service)
        except Exception as error:  # noqa: BLE001
            self._is_over = True
            self.warn(f"failed ({type(error).__name__}: {error}), and ends here")

    def warn(self, what: str) -> None:
        """Say what has become of the sending."""
        logger.warning("sending to %s %s. The log directory has everything. %s", self.kind.name, what, self._remedy)


def start_trackers(exp_manager: ExpManager, log_dir: Path) -> list[Tracker]:
    """Those that ``exp_manager`` asks for.

    When a run is started again, they start in the background, and one that does not is a warning: what is down by then
    must not end a run that has begun.

    Raises:
        TrackerError: on the first start of a run, one does not start, or not within half a minute.
    """
    services: list[tuple[type[Service], Callable[[], Service]]] = []
    if exp_manager.create_wandb_logger:
        services.append((Wandb, partial(Wandb, log_dir, _arguments(exp_manager.wandb_logger_kwargs))))
    if exp_manager.create_mlflow_logger:
        named = {"experiment_name": exp_manager.name} | _arguments(exp_manager.mlflow_logger_kwargs)
        services.append((MLflow, partial(MLflow, log_dir, named)))
    for kind, _ in services:
        with excepthook_kept():
            importlib.import_module(kind.package)  # takes seconds of its own, and is for the main thread
    if (log_dir / HYPERPARAMETERS_FILE).exists():
        trackers = [Tracker(kind, start) for kind, start in services]
        for tracker in trackers:
            tracker.started.add_done_callback(partial(_warn_unless_started, tracker))
        return trackers
    with _asking_once():
        return [_started(Tracker(kind, start)) for kind, start in services]


def _started(tracker: Tracker) -> Tracker:
    kind = tracker.kind
    try:
        tracker.started.result(_START_SECONDS)
    except Exception as error:
        why = str(error) or f"no answer within {_START_SECONDS:.0f} s"
        key = f"exp_manager.create_{kind.package}_logger"
        raise TrackerError(
            f"{kind.name} does not start. Do without it ({key}=False), or {kind.otherwise}. Its error: {why}"
        ) from error
    return tracker


def _warn_unless_started(tracker: Tracker, started: concurrent.futures.Future[None]) -> None:
    if (error := started.exception()) is not None:
        tracker.warn(f"does not start ({type(error).__name__}: {error}), and this start of the run does without")


@contextlib.contextmanager
def _asking_once() -> Iterator[None]:
    """Have MLflow's client say at once that nobody answers; later it asks again, for a network may fail for seconds."""
    known = os.environ.get(_RETRIES)
    os.environ.setdefault(_RETRIES, "0")
    try:
        yield
    finally:
        os.environ[_RETRIES] = known or _MLFLOW_DEFAULTS[_RETRIES]


def _arguments(section: Section) -> dict[str, Any]:
    return {key: value for key, value in vars(section).items() if value is not None}


class Wandb:
    """Weights & Biases; ``kwargs`` are arguments of ``wandb.init`` or of Lightning's ``WandbLogger``."""

    name, package = "Weights & Biases", "wandb"
    otherwise = "keep the run on disk for `wandb sync` (WANDB_MODE=offline in the environment)"
    remedy = ""

    def __init__(self, log_dir: Path, kwargs: Mapping[str, Any]) -> None:
        settings = {"dir": str(log_dir), **_wandb_settings(kwargs)}
        known = _known_run(log_dir / "wandb_run_id")
        if known and not settings.keys() & {"id", "resume"}:
            settings |= {"id": known, "resume": "allow"}
        import wandb

        self._run = wandb.init(**settings)
        if self._run.id != known:
            replace_text(log_dir / "wandb_run_id", f"{self._run.id}\n")
        self._run.define_metric("*", step_metric="step")
        self.remedy = f"To send what there is: wandb sync {Path(self._run.dir).parent}"

    def metrics(self, scalars: Mapping[str, float], step: int) -> None:
        """Send numbers."""
        self._run.log({**scalars, "step": step})

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Send a table."""
        import wandb

        self._run.log({key: wandb.Table(columns=list(columns), data=rows), "step": step})

    def config(self, config: dict[str, Any], text: str) -> None:
        """Send the config, also given as YAML."""
        self._run.config.update(config, allow_val_change=True)

    def finish(self) -> None:
        """Send what is left: the run is over."""
        self._run.finish()


def _wandb_settings(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of ``wandb.init``, from such or from those of Lightning's ``WandbLogger``, as NeMo has them."""
    settings = {_OF_LIGHTNING.get(key, key): value for key, value in kwargs.items() if value is not None}
    if settings.pop("offline", False):
        settings["mode"] = "offline"
    for name in ("log_model", "prefix"):  # of Lightning's logger alone: wandb refuses them where they ask for something
        if not settings.get(name):
            settings.pop(name, None)
    return settings


class MLflow:
    """MLflow: a server or, without ``tracking_uri`` and MLFLOW_TRACKING_URI, a file ``mlflow.db``.

    ``kwargs`` are those of ``exp_manager.mlflow_logger_kwargs``, without nulls.
    """

    name, package = "MLflow", "mlflow"
    otherwise = "log to a file (no tracking_uri in exp_manager.mlflow_logger_kwargs)"
    remedy = "MLflow keeps what it was sent until then."

    def __init__(self, log_dir: Path, kwargs: Mapping[str, Any]) -> None:
        for variable, value in _MLFLOW_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        folder = Path(kwargs.get("save_dir", log_dir)).absolute()
        uri, artifacts = kwargs.get("tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI"), None
        if not uri:
            folder.mkdir(parents=True, exist_ok=True)
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", str(folder / "mlflow_artifacts")
        known = _known_run(log_dir / "mlflow_run_id")
        import mlflow

        self._client = mlflow.MlflowClient(uri)
        self._id = str(kwargs.get("run_id", known)) or self._new_run(kwargs, artifacts)
        self._client.update_run(self._id, status="RUNNING")
        if self._id != known:
            replace_text(log_dir / "mlflow_run_id", f"{self._id}\n")

    def _new_run(self, kwargs: Mapping[str, Any], artifacts: str | None) -> str:
        found = self._client.get_experiment_by_name(kwargs["experiment_name"])
        experiment = found.experiment_id if found else None
        if experiment is None:
            location = kwargs.get("artifact_location", artifacts)
            experiment = self._client.create_experiment(kwargs["experiment_name"], location)
        run = self._client.create_run(experiment, tags=masked(kwargs.get("tags")), run_name=kwargs.get("run_name"))
        return str(run.info.run_id)

    def metrics(self, scalars: Mapping[str, float], step: int) -> None:
        """Send numbers. Of their names, MLflow takes no other signs than ``-. :/``: they become ``_``."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        values = [Metric(_NOT_IN_NAMES.sub("_", name), value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=values)

    def table(self, key: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Send a table, as an artifact in the form that MLflow shows as one."""
        self._client.log_dict(self._id, {"columns": columns, "data": rows}, f"{key}/step_{step}.json")

    def config(self, config: dict[str, Any], text: str) -> None:
        """Send the config. Parameters of a run cannot change: a later start's is in the artifact alone."""
        from mlflow.entities import Param

        self._client.log_text(self._id, text, "hyperparameters.yaml")
        known = self._client.get_run(self._id).data.params
        new = [Param(key, str(value)) for key, value in leaves_of(config) if key not in known]
        for first in range(0, len(new), _MOST_PARAMS):
            self._client.log_batch(self._id, params=new[first : first + _MOST_PARAMS])

    def finish(self) -> None:
        """The run is over."""
        self._client.set_terminated(self._id)


Service: TypeAlias = Wandb | MLflow


def _known_run(path: Path) -> str:
    """The run that an earlier start began, with which this one goes on."""
    return path.read_text(encoding="utf-8").strip() if path.exists() else ""
