"""The models on the wire: their tensors, the checks on a request, and the job a request becomes.

Names and tensors are NeMo-Aligner's: ``critic_infer``, ``critic_train``, ``critic_save`` and
``reward_model``; ``critic_restore`` is this project's. Every check happens here, before a job is
queued, so that a bad request never reaches the batch it would share with others.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nemo_style_aligner.parsing import parse_json
from nemo_style_aligner.services.exactly_once.ledger import CriticPosition, batch_digest
from nemo_style_aligner.services.jobs import InferJob, Job, RestoreJob, SaveJob, TrainJob
from nemo_style_aligner.services.protocol import InferRequest, ProtocolError, is_int

MODEL_VERSION = "1"
MAX_RUN_ID_LENGTH = 128
MAX_HISTORIES = 100_000
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


class Endpoint(abc.ABC):
    """One named model of the service."""

    def __init__(
        self,
        name: str,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        *,
        batched: bool,
        limits: ModelLimits,
    ) -> None:
        self.name = name
        self.inputs = {spec.name: spec for spec in inputs}
        self.outputs = {spec.name: spec for spec in outputs}
        self.batched = batched
        self.limits = limits

    @abc.abstractmethod
    def make_job(self, request: InferRequest) -> Job:
        """Check the request and turn it into a job. Raises `ProtocolError` (400)."""

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


class InferEndpoint(Endpoint):
    """Values, rewards, both, or log-probs for a batch of sequences, given as token ids or as text.

    With ``takes_prompts`` a request must also say what each sequence is a response to.
    """

    def __init__(
        self,
        name: str,
        outputs: Sequence[TensorSpec],
        limits: ModelLimits,
        tokenize: Callable[[str], Sequence[int]] | None = None,
        *,
        takes_prompts: bool = False,
    ) -> None:
        inputs = [
            TensorSpec("tokens", "INT64", (-1,), optional=True),
            TensorSpec("sequence_lengths", "INT64", (1,), optional=True),
        ]
        if tokenize is not None:
            inputs.insert(0, TensorSpec("sentences", "BYTES", (1,), optional=True))
        if takes_prompts:
            inputs += [LINES, PROMPT_LENGTHS, STEPS]
        super().__init__(name, inputs, outputs, batched=True, limits=limits)
        self._tokenize = tokenize

    def make_job(self, request: InferRequest) -> InferJob:
        """See `Endpoint.make_job`."""
        arrays = self._arrays(request)
        if "sentences" in arrays:
            if "tokens" in arrays or "sequence_lengths" in arrays:
                raise self._refuse("give either 'sentences', or 'tokens' and 'sequence_lengths'")
            tokens, lengths = self._from_sentences(arrays["sentences"])
        elif "tokens" in arrays and "sequence_lengths" in arrays:
            tokens, lengths = arrays["tokens"], arrays["sequence_lengths"][:, 0]
        else:
            raise self._refuse(
                "both 'tokens' and 'sequence_lengths' are needed" + (" (or 'sentences')" if self._tokenize else "")
            )
        rows, width = tokens.shape
        if len(lengths) != rows:
            raise self._refuse(f"{rows} rows of 'tokens', but {len(lengths)} of 'sequence_lengths'")
        if lengths.min() < 1 or lengths.max() > width:
            raise self._refuse(f"'sequence_lengths' must be from 1 to {width}, the width of 'tokens'")
        self._check_length(int(lengths.max()))
        # What lies behind a row's true length is padding of the caller's choice and never reaches the model.
        self._check_tokens(np.where(np.arange(width) < lengths[:, None], tokens, 0))
        job = InferJob(tokens=tokens, lengths=lengths, position=self._position(request.parameters))
        if LINES.name in arrays:
            self._add_prompts(job, arrays)
        return job

    def _add_prompts(self, job: InferJob, arrays: Mapping[str, np.ndarray]) -> None:
        lines, job.prompt_lengths = arrays[LINES.name][:, 0], arrays[PROMPT_LENGTHS.name][:, 0]
        if not len(lines) == len(job.prompt_lengths) == job.rows:
            raise self._refuse(f"{job.rows} rows of 'tokens', but not as many of 'lines' and 'prompt_lengths'")
        if (job.prompt_lengths < 1).any() or (job.prompt_lengths > job.lengths).any():
            raise self._refuse("'prompt_lengths' must be from 1 to the row's 'sequence_lengths'")
        job.lines = [self._line(row, text) for row, text in enumerate(lines)]
        job.steps = arrays[STEPS.name][:, 0] if STEPS.name in arrays else np.zeros(job.rows, dtype=np.int64)
        if len(job.steps) != job.rows:
            raise self._refuse(f"{job.rows} rows of 'tokens', but {len(job.steps)} of 'steps'")

    def _line(self, row: int, text: bytes) -> dict[str, Any]:
        try:
            line = parse_json(text.decode())
        except ValueError as error:
            raise self._refuse(f"'lines' row {row} is not JSON: {error}") from error
        if not isinstance(line, dict) or not isinstance(line.get("text"), str):
            raise self._refuse(f"'lines' row {row} must be an object whose 'text' is the prompt")
        return line

    def _from_sentences(self, sentences: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self._tokenize is not None  # the input exists only with a tokenizer
        rows: list[Sequence[int]] = []
        for index, item in enumerate(sentences[:, 0]):
            try:
                text = item.decode()
            except UnicodeDecodeError as error:
                raise self._refuse(f"'sentences' row {index} is not UTF-8") from error
            rows.append(self._tokenize(text))
            if not rows[-1]:
                raise self._refuse(f"'sentences' row {index} has no tokens")
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        tokens = np.zeros((len(rows), int(lengths.max())), dtype=np.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = row
        return tokens, lengths


class TrainEndpoint(Endpoint):
    """One training batch of the critic, applied once however often it is sent (see `ledger`)."""

    def __init__(self, name: str, limits: ModelLimits) -> None:
        inputs = [TensorSpec("tokens", "INT64", (-1, -1))]
        inputs += [TensorSpec(other, "FP32", (-1, -1)) for other in ("returns", "prev_values", "mask")]
        super().__init__(name, inputs, [TensorSpec("loss_mean", "FP32", (1,))], batched=False, limits=limits)

    def make_job(self, request: InferRequest) -> TrainJob:
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
        position = self._position(request.parameters)
        return TrainJob(batch=arrays, digest=batch_digest(arrays), position=position)


class SaveEndpoint(Endpoint):
    """Writes a checkpoint; answers status 0 when it is on disk.

    Parameter ``keep_history``: history of the checkpoint that belongs to the actor's newest one: it is not pruned.
    """

    def __init__(self, name: str) -> None:
        inputs, outputs = [TensorSpec("dummy_var", "INT64", (1,))], [TensorSpec("status", "INT64", (1,))]
        super().__init__(name, inputs, outputs, batched=False, limits=ModelLimits())

    def make_job(self, request: InferRequest) -> SaveJob:
        """See `Endpoint.make_job`."""
        self._arrays(request)
        keep = self._name(request.parameters, "keep_history") if "keep_history" in request.parameters else None
        return SaveJob(position=self._position(request.parameters), keep_history=keep)


class RestoreEndpoint(Endpoint):
    """Brings the critic to one of several points of a run's past from which the client can continue.

    Input ``histories``: the critic's history at each point, oldest first. A critic that is at one of the points stays;
    any other goes to the latest one of which it has a checkpoint, or to its initial weights if these are among them.
    Output ``position``: the index of the point where it is now. 409 if it can go to none of them, or would have to undo
    what another run trained.
    """

    def __init__(self, name: str) -> None:
        inputs, outputs = [TensorSpec("histories", "BYTES", (-1,))], [TensorSpec("position", "INT64", (1,))]
        super().__init__(name, inputs, outputs, batched=False, limits=ModelLimits())

    def make_job(self, request: InferRequest) -> RestoreJob:
        """See `Endpoint.make_job`."""
        histories = self._arrays(request)["histories"]
        if len(histories) > MAX_HISTORIES:
            raise self._refuse(f"{len(histories)} histories, the limit is {MAX_HISTORIES}")
        try:
            names = [item.decode("ascii") for item in histories]
        except UnicodeDecodeError as error:
            raise self._refuse("'histories' must be ASCII") from error
        return RestoreJob(run_id=self._name(request.parameters, "run_id"), histories=names)


VALUES = TensorSpec("values", "FP32", (-1,))
LOGPROBS = TensorSpec("logprobs", "FP32", (-1,))
LINES = TensorSpec("lines", "BYTES", (1,))
PROMPT_LENGTHS = TensorSpec("prompt_lengths", "INT64", (1,))
STEPS = TensorSpec("steps", "INT64", (1,), optional=True)


def rewards_spec(num_attributes: int = 1) -> TensorSpec:
    """``rewards`` float32 [b, num_attributes]; 1 unless a regression model's attributes are kept apart."""
    return TensorSpec("rewards", "FP32", (num_attributes,))


def critic_endpoints(
    limits: ModelLimits,
    *,
    combined: bool,
    tokenize: Callable[[str], Sequence[int]] | None = None,
) -> list[Endpoint]:
    """The critic's four endpoints; ``critic_infer`` gives ``rewards`` too when ``combined``."""
    outputs = [VALUES, rewards_spec()] if combined else [VALUES]
    return [
        InferEndpoint("critic_infer", outputs, limits, tokenize),
        TrainEndpoint("critic_train", limits),
        SaveEndpoint("critic_save"),
        RestoreEndpoint("critic_restore"),
    ]


def reward_endpoint(
    limits: ModelLimits, *, name: str = "reward_model", num_attributes: int = 1, takes_prompts: bool = False
) -> list[Endpoint]:
    """The endpoint of a separate reward service."""
    return [InferEndpoint(name, [rewards_spec(num_attributes)], limits, takes_prompts=takes_prompts)]
