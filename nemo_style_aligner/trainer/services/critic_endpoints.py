"""The endpoints of a critic: it gives values, learns from training batches, saves and goes back."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from nemo_style_aligner.guard.protocol import InferRequest, ProtocolError
from nemo_style_aligner.trainer.services.endpoints import Endpoint, ModelLimits, QueuedRequest, Service, TensorSpec
from nemo_style_aligner.trainer.services.exactly_once.ledger import TrainingLedger, batch_digest
from nemo_style_aligner.trainer.services.exactly_once.saves import OpenSave
from nemo_style_aligner.trainer.services.scores import REWARDS, VALUES, ScoreEndpoint, ScoringBackend

MAX_HISTORIES = 100_000


class CriticBackend(ScoringBackend, Protocol):
    """Models of which one learns: behind the endpoints that train, save and restore."""

    def train(
        self, tokens: torch.Tensor, returns: torch.Tensor, prev_values: torch.Tensor, mask: torch.Tensor
    ) -> float:
        """Train on one batch: ``tokens`` int64 [b, s], the others float32 [b, s-1]. Returns the mean loss.

        The loss must be the same on every rank: each keeps it in its ledger.
        """
        ...

    def save(self, keep_history: str | None = None) -> concurrent.futures.Future[Any]:
        """Write a checkpoint of the present state. The newest checkpoint with history ``keep_history`` is not pruned.

        Returns a future that is done when the checkpoint is complete. A save waits for the previous one, and so does
        `restore`.
        """
        ...

    def restore(self, run_id: str, histories: Sequence[str]) -> int | None:
        """Go to one of ``histories``, ledger included; `RestoreEndpoint` says which.

        Returns its index, the same on every rank, or None if none can be reached.
        """
        ...


class TrainEndpoint(Endpoint):
    """One training batch of the critic, applied once however often it is sent (see `ledger`).

    Its jobs' arguments are ``batch`` (tokens, int64 [b, s]; returns, prev_values, mask, float32 [b, s-1]), its
    ``digest``, and ``position``, where the critic must be; None: anywhere, for a request without a number.
    """

    method = "train"

    def __init__(self, name: str, limits: ModelLimits | None = None) -> None:
        inputs = [TensorSpec("tokens", "INT64", (-1, -1))]
        inputs += [TensorSpec(other, "FP32", (-1, -1)) for other in ("returns", "prev_values", "mask")]
        super().__init__(name, inputs, [TensorSpec("loss_mean", "FP32", (1,))], limits=limits)

    def make_job(self, request: InferRequest) -> QueuedRequest:
        """See `Endpoint.make_job`."""
        arrays = self._arrays(request)
        rows, width = arrays["tokens"].shape
        self._check_length(width)
        self._check_tokens(arrays["tokens"])
        for name in ("returns", "prev_values", "mask"):
            if arrays[name].shape != (rows, width - 1):
                raise self._refuse(
                    f"'{name}' must be of shape {[rows, width - 1]}, one column less than 'tokens', "
                    f"got {list(arrays[name].shape)}"
                )
            if not np.isfinite(arrays[name]).all():
                raise self._refuse(f"'{name}' holds NaN or infinity")
        # The loss is divided by the mask's sum; a weight, or -1, would give another loss than its sender expects.
        if not np.isin(arrays["mask"], (0.0, 1.0)).all():
            raise self._refuse("'mask' must be 1 where a value is trained and 0 elsewhere, but holds other numbers")
        # Not as the job's position: to a repeat of the last request the ledger gives its answer.
        position = self._position(request.parameters)
        return QueuedRequest(self, {"batch": arrays, "digest": batch_digest(arrays), "position": position})

    def answer(self, jobs: Sequence[QueuedRequest], service: Service) -> None:
        """See `Endpoint.answer`."""
        (job,) = jobs
        position, digest, loss = job.arguments["position"], job.arguments["digest"], None
        applied: dict[str, Any] = {"run_id": None, "sequence_number": 0, "digest": digest}
        if position is not None:
            applied |= {"run_id": position.run_id, "sequence_number": position.next_number}
            loss = service.ledger.stored_answer(position, digest)
        if loss is None:
            batch = {name: torch.tensor(array) for name, array in job.arguments["batch"].items()}
            loss = service.command(self, batch=batch, applied=applied)
            service.metrics.training_steps.inc()
        else:
            service.metrics.training_repeats.inc()
        job.future.set_result({"loss_mean": np.array([loss], dtype=np.float32)})

    def act(self, service: Service, arguments: Mapping[str, Any]) -> float:
        """See `Endpoint.act`; every rank notes what was applied."""
        loss = float(super().act(service, arguments["batch"]))
        service.ledger.record(**arguments["applied"], loss=loss)
        return loss


class SaveEndpoint(Endpoint):
    """Writes a checkpoint; answers status 0 when it is on disk.

    Parameter ``keep_history``: history of the checkpoint that belongs to the actor's newest one: it is not pruned.
    """

    method = "save"

    def __init__(self, name: str) -> None:
        inputs, outputs = [TensorSpec("dummy_var", "INT64", (1,))], [TensorSpec("status", "INT64", (1,))]
        super().__init__(name, inputs, outputs)

    def make_job(self, request: InferRequest) -> QueuedRequest:
        """See `Endpoint.make_job`."""
        self._arrays(request)
        keep = self._name(request.parameters, "keep_history") if "keep_history" in request.parameters else None
        return QueuedRequest(self, {"keep_history": keep}, self._position(request.parameters))

    def answer(self, jobs: Sequence[QueuedRequest], service: Service) -> None:
        """See `Endpoint.answer`: later, when the checkpoint is complete."""
        (job,) = jobs
        asked = service.ledger.history, job.arguments["keep_history"]
        if not service.saves.join(asked, job.future):
            save = service.command(self, **job.arguments)
            save.asked, save.waiting = asked, [job.future]
        service.saves.poll()

    def act(self, service: Service, arguments: Mapping[str, Any]) -> OpenSave:
        """See `Endpoint.act`."""
        return service.saves.add(super().act(service, arguments))


class RestoreEndpoint(Endpoint):
    """Brings the critic to one of several points of a run's past from which the client can continue.

    Input ``histories``: the critic's history at each point, oldest first. A critic that is at one of the points stays;
    any other goes to the latest one of which it has a checkpoint, or to its initial weights if these are among them.
    Output ``position``: the index of the point where it is now. 409 if it can go to none of them, or would have to undo
    what another run trained.
    """

    method = "restore"

    def __init__(self, name: str) -> None:
        inputs, outputs = [TensorSpec("histories", "BYTES", (-1,))], [TensorSpec("position", "INT64", (1,))]
        super().__init__(name, inputs, outputs)

    def make_job(self, request: InferRequest) -> QueuedRequest:
        """See `Endpoint.make_job`."""
        histories = self._arrays(request)["histories"]
        if len(histories) > MAX_HISTORIES:
            raise self._refuse(f"{len(histories)} histories, the limit is {MAX_HISTORIES}")
        try:
            names = [item.decode("ascii") for item in histories]
        except UnicodeDecodeError as error:
            raise self._refuse("'histories' must be ASCII") from error
        return QueuedRequest(self, {"run_id": self._name(request.parameters, "run_id"), "histories": names})

    def answer(self, jobs: Sequence[QueuedRequest], service: Service) -> None:
        """See `Endpoint.answer`."""
        (job,) = jobs
        service.saves.forget_newest()  # a damaged checkpoint may be put aside now
        position = service.command(self, **job.arguments)
        if position is None:
            raise self._unreachable(job.arguments["run_id"], len(job.arguments["histories"]), service.ledger)
        job.future.set_result({"position": np.array([position], dtype=np.int64)})

    def _unreachable(self, run_id: str, num_points: int, ledger: TrainingLedger) -> ProtocolError:
        return ProtocolError(
            409,
            f"{self.name}: run '{run_id}' cannot continue from any of the {num_points} points it gave: the critic has "
            "no checkpoint there, or going back would undo what other runs have trained since. The critic has made "
            f"{ledger.steps} training steps and expects number {ledger.expected(run_id)} of this run",
            ledger.where(run_id),
        )


def critic_endpoints(
    limits: ModelLimits | None = None,
    *,
    combined: bool,
    tokenize: Callable[[str], Sequence[int]] | None = None,
    length_multiple: int = 1,
) -> list[Endpoint]:
    """The critic's four endpoints; ``critic_infer`` gives ``rewards`` too when ``combined``."""
    scores = [VALUES, REWARDS] if combined else [VALUES]
    return [
        ScoreEndpoint("critic_infer", scores, limits, tokenize, length_multiple=length_multiple),
        TrainEndpoint("critic_train", limits),
        SaveEndpoint("critic_save"),
        RestoreEndpoint("critic_restore"),
    ]
