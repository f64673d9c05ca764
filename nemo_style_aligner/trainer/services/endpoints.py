"""The models of a service on the wire: their tensors, the checks on a request, and what becomes of it.

Names and tensors are NeMo-Aligner's: ``critic_infer``, ``critic_train``, ``critic_save`` and
``reward_model``; ``critic_restore`` is this project's. An endpoint is a kind of request: it says what requests carry,
and which method of the service's backend answers them. Every check of a request happens here, before it is queued, so
that a bad one never reaches the batch it would share with others.
"""

from __future__ import annotations

import abc
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from nemo_style_aligner.guard.protocol import InferRequest, ProtocolError, is_int
from nemo_style_aligner.trainer.services.exactly_once.ledger import CriticPosition, TrainingLedger
from nemo_style_aligner.trainer.services.exactly_once.saves import Answer, Saves
from nemo_style_aligner.trainer.services.service_metrics import ServiceMetrics

MODEL_VERSION = "1"
MAX_RUN_ID_LENGTH = 128
# What Triton clients are told as the largest batch; the model cuts a batch into micro batches itself.
MAX_BATCH_SIZE = 9999999


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor on the wire. ``dims`` are without the batch dimension where the endpoint has one."""

    name: str
    datatype: str
    dims: tuple[int, ...] = (-1,)
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class ModelLimits:
    """What the model behind an endpoint can take; None: neither checked nor announced.

    ``tokenizer``: fingerprint of the model's tokenizer, which clients can compare with that of their own.
    """

    max_sequence_length: int | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None

    def parameters(self) -> dict[str, Any]:
        """The limits as the model metadata announce them."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclasses.dataclass(eq=False)
class QueuedRequest:
    """A request whose answer is awaited.

    Attributes:
        endpoint: its kind.
        arguments: what it asks for, checked; the endpoint says what.
        position: where the critic must be to answer; None: anywhere.
        rows: its sequences, as far as they may be merged with others'.
        taken: when work on it began, as ``arrived`` by the monotonic clock.
        batch_rows: rows of the batch that it was merged into.
    """

    endpoint: Endpoint
    arguments: dict[str, Any]
    position: CriticPosition | None = None
    rows: int = 1
    future: Answer = dataclasses.field(default_factory=Answer)
    arrived: float = dataclasses.field(default_factory=time.monotonic)
    request_id: str = ""
    taken: float = 0.0
    batch_rows: int = 1


class Service(Protocol):
    """What endpoints find where their requests are answered: a rank of a `model_server.ModelServer`.

    Attributes:
        backend: the models, with the method that an endpoint names.
        saves: checkpoints that this rank is writing.
    """

    backend: Any
    ledger: TrainingLedger
    metrics: ServiceMetrics
    saves: Saves

    def command(self, endpoint: Endpoint, **arguments: Any) -> Any:
        """On rank 0: have all ranks `Endpoint.act` with these arguments; returns what rank 0's gives."""


class Endpoint(abc.ABC):
    """One named model of the service: a kind of request. The same on every rank.

    Attributes:
        method: of the backend, collective, which answers the requests.
        merges: requests that arrive one after another may share a batch. They change nothing: a service that is still
            computing one at its time limit goes on.
    """

    method: ClassVar[str]
    merges: ClassVar[bool] = False

    def __init__(
        self,
        name: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        batched: bool = False,
        limits: ModelLimits | None = None,
    ) -> None:
        self.name = name
        self.inputs = {spec.name: spec for spec in inputs}
        self.outputs = {spec.name: spec for spec in outputs}
        self.batched = batched
        self.limits = limits or ModelLimits()

    @abc.abstractmethod
    def make_job(self, request: InferRequest) -> QueuedRequest:
        """Check the request. Raises `ProtocolError` (400)."""

    @abc.abstractmethod
    def answer(self, jobs: Sequence[QueuedRequest], service: Service) -> None:
        """On rank 0: do what jobs ask for, of which there is one unless the endpoint ``merges``.

        Sets the jobs' futures, now or later. Raises `ProtocolError` to refuse them.
        """

    def act(self, service: Service, arguments: Mapping[str, Any]) -> Any:
        """On every rank: what `Service.command` was given is what the backend's method takes."""
        return getattr(service.backend, self.method)(**arguments)

    def metadata(self) -> dict[str, Any]:
        """The protocol's model metadata; shapes with the batch dimension, limits as ``parameters``."""

        def describe(spec: TensorSpec) -> dict[str, Any]:
            return {"name": spec.name, "datatype": spec.datatype, "shape": self.full_shape(spec)}

        return {
            "name": self.name,
            "versions": [MODEL_VERSION],
            "platform": "nemo_style_aligner",
            "inputs": [describe(spec) for spec in self.inputs.values()],
            "outputs": [describe(spec) for spec in self.outputs.values()],
            "parameters": self.limits.parameters(),
        }

    def config(self) -> dict[str, Any]:
        """Triton's model configuration, which Triton's and PyTriton's clients ask for."""

        def describe(spec: TensorSpec) -> dict[str, Any]:
            data_type = "TYPE_STRING" if spec.datatype == "BYTES" else f"TYPE_{spec.datatype}"
            return {"name": spec.name, "data_type": data_type, "dims": list(spec.dims)}

        return {
            "name": self.name,
            "platform": "",
            "backend": "python",
            "max_batch_size": MAX_BATCH_SIZE if self.batched else 0,
            "input": [{**describe(spec), "optional": spec.optional} for spec in self.inputs.values()],
            "output": [describe(spec) for spec in self.outputs.values()],
            "instance_group": [],
            "parameters": {},
        }

    def full_shape(self, spec: TensorSpec) -> list[int]:
        """The shape of one of the endpoint's tensors, with the batch dimension if there is one; -1 for any size."""
        return [-1, *spec.dims] if self.batched else list(spec.dims)

    def _arrays(self, request: InferRequest) -> dict[str, np.ndarray]:
        """The request's tensors, checked for name, datatype and shape against the endpoint's."""
        for name in request.inputs:
            if name not in self.inputs:
                raise self._refuse(f"unknown input '{name}', known inputs are {', '.join(self.inputs)}")
        for name in request.outputs or ():
            if name not in self.outputs:
                raise self._refuse(f"unknown output '{name}', known outputs are {', '.join(self.outputs)}")
        arrays: dict[str, np.ndarray] = {}
        for spec in self.inputs.values():
            tensor = request.inputs.get(spec.name)
            if tensor is None:
                if spec.optional:
                    continue
                raise self._refuse(f"input '{spec.name}' is missing")
            if tensor.datatype != spec.datatype:
                raise self._refuse(f"input '{spec.name}' must be {spec.datatype}, got {tensor.datatype}")
            expected, shape = self.full_shape(spec), tensor.array.shape
            if len(shape) != len(expected) or any(e not in (-1, size) for e, size in zip(expected, shape, strict=True)):
                raise self._refuse(f"input '{spec.name}' must be of shape {expected}, got {list(shape)}")
            if tensor.array.size == 0 and tensor.array.shape[0] == 0:
                raise self._refuse(f"input '{spec.name}' has no rows")
            arrays[spec.name] = tensor.array
        return arrays

    def _check_tokens(self, tokens: np.ndarray) -> None:
        """Refuse ids outside the vocabulary: they would crash the embedding for a whole batch."""
        if tokens.size == 0:
            raise self._refuse("input 'tokens' is empty")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or (self.limits.vocab_size is not None and high >= self.limits.vocab_size):
            raise self._refuse(
                f"input 'tokens' has a token id outside the vocabulary: its ids are from {low} to {high}, but the "
                "model's begin with 0"
                + (f" and end with {self.limits.vocab_size - 1}" if self.limits.vocab_size is not None else "")
            )

    def _check_length(self, longest: int) -> None:
        limit = self.limits.max_sequence_length
        if limit is not None and longest > limit:
            raise self._refuse(f"a sequence of {longest} tokens is longer than the model's limit of {limit}")

    def _position(self, parameters: Mapping[str, Any]) -> CriticPosition | None:
        """Where ``run_id``, ``sequence_number`` and ``history`` say that the critic is; None if none is given."""
        if not {"run_id", "sequence_number", "history"} & parameters.keys():
            return None
        number = parameters.get("sequence_number")
        if not is_int(number) or not 0 < number < 2**63:
            raise self._refuse("parameter 'sequence_number' must be a whole number of 1 or more")
        history = self._name(parameters, "history") if "history" in parameters else None
        return CriticPosition(self._name(parameters, "run_id"), number, history)

    def _name(self, parameters: Mapping[str, Any], key: str) -> str:
        value = parameters.get(key)
        if not isinstance(value, str) or not 0 < len(value) <= MAX_RUN_ID_LENGTH or not value.isprintable():
            raise self._refuse(f"parameter '{key}' must be a string of 1 to {MAX_RUN_ID_LENGTH} printable characters")
        return value

    def _refuse(self, message: str) -> ProtocolError:
        return ProtocolError(400, f"{self.name}: {message}")
