"""The actor job's client of a service of one frozen model, and what it has in common with the critic's client."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.services.endpoints import LINES, PROMPT_LENGTHS, STEPS
from nemo_style_aligner.services.http_client import (
    ClientLimits,
    HttpClient,
    RequestRefusedError,
    ServerUnavailableError,
)
from nemo_style_aligner.services.protocol import (
    HEADER_LENGTH_FIELD,
    READY_PATH,
    ProtocolError,
    decode_infer_response,
    encode_infer_request,
)
from nemo_style_aligner.services.secret import HOW_TO_SHARE
from nemo_style_aligner.services.signing import UnprovenServerError

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0
"""Between log lines about the same wait."""

# Polling is slow: every rank asks, and a service that is loading its model has other things to do.
_READY_LIMITS = ClientLimits(connect_s=3.0, read_s=3.0, first_backoff_s=1.0, max_backoff_s=2.0)
_REFUSED_POLL_SECONDS = 1.0


class UnfitServiceError(UserError, ValueError):
    """A server is no service of this kind, or does not fit this job; the message says why, and what to change."""

    exit_status = 1


class OtherSecretError(UnfitServiceError):
    """A server has another secret than this job; another start of either would not change that."""

    exit_status = 2


_STARTED_BY = {
    "remote_critic_rm.critic.port": "serve_ppo_critic.py",
    "remote_critic_rm.reward_model.port": "serve_reward_model.py or serve_reward_function.py",
}


@dataclasses.dataclass(frozen=True)
class SequencesToScore:
    """What a job will send, to be compared with what a server can take.

    Attributes:
        max_length: tokens of the longest possible sequence, prompt and response.
        vocab_size: one more than the largest token id.
        tokenizer: fingerprint of the tokenizer that they are made with.
    """

    max_length: int
    vocab_size: int
    tokenizer: str


@dataclasses.dataclass(frozen=True)
class PromptsOfSequences:
    """What the sequences of a request are responses to, for services that ask for it.

    Attributes:
        lines: each sequence's prompt with all the keys of its line, to which ``text`` belongs.
        lengths: int64 [b], tokens of the prompts.
        steps: int64 [b], the run's; for services that ask for these, too.
    """

    lines: Sequence[Mapping[str, Any]]
    lengths: torch.Tensor
    steps: torch.Tensor | None = None

    def inputs(self) -> dict[str, np.ndarray]:
        """The inputs of a request: a JSON text for each line, BYTES [b, 1], and the lengths, INT64 [b, 1]."""
        texts = np.array([json.dumps(dict(line)).encode() for line in self.lines], dtype=object)
        return {LINES.name: texts.reshape(-1, 1), PROMPT_LENGTHS.name: as_array(self.lengths).reshape(-1, 1)}


class RewardClient:
    """Client of a model that gives one reward per sequence, or log-probs: a model's service, a function's, anybody's.

    Args:
        url: of the service, without a path.
        model: its name there.
        limits: of a request.
        token: the shared secret; None: no authentication.
        max_parallel: requests that are under way at once.
        pad_to_length: shorter sequences are padded to this many tokens; None: to the longest of a request.
        setting: config key that says where the service is, for messages.
        output: what the model gives: ``rewards`` or ``logprobs``.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        limits: ClientLimits,
        token: str | None = None,
        max_parallel: int = 8,
        pad_to_length: int | None = None,
        setting: str = "remote_critic_rm.reward_model.port",
        output: Literal["rewards", "logprobs"] = "rewards",
    ) -> None:
        self._http = HttpClient(url, token=token)
        self._model = model
        self._limits = limits
        self._pad_to_length = pad_to_length
        self._setting = setting
        self._output = output
        self._takes_prompts = self._takes_steps = False
        self._threads = concurrent.futures.ThreadPoolExecutor(max_parallel, "reward-infer")

    @property
    def base_url(self) -> str:
        """The service's URL."""
        return self._http.base_url

    def wait_until_ready(self, timeout_s: float, sequences: SequencesToScore | None = None) -> None:
        """Wait until the service is ready, and check that it gives what is wanted, and takes ``sequences``.

        Raises:
            ServerUnavailableError: after ``timeout_s``.
            UnfitServiceError: it is no such service, or does not fit.
        """
        deadline = time.monotonic() + timeout_s
        wait_for_server(self._http, timeout_s, self._setting)
        metadata = model_metadata(self._http, self._model, {self._output}, max(deadline - time.monotonic(), 5.0))
        if sequences is not None:
            check_limits(self._http, self._model, metadata.get("parameters", {}), sequences)
        described = metadata.get("inputs")
        inputs = {entry.get("name") for entry in described} if isinstance(described, list) else set()
        self._takes_prompts = {LINES.name, PROMPT_LENGTHS.name} <= inputs
        self._takes_steps = STEPS.name in inputs

    def infer_async(
        self, tokens: torch.Tensor, lengths: torch.Tensor, prompts: PromptsOfSequences | None = None
    ) -> concurrent.futures.Future[torch.Tensor]:
        """Rewards, fp32 [b], or log-probs, fp32 [b, s-1]: of token t + 1 at t, zero where there is none.

        tokens: int64 [b, s]; lengths: int64 [b], prompt and response together. ``prompts`` are sent to services that
        announce the inputs for them, once `wait_until_ready` has been called. The future raises `ProtocolError` when
        an answer is malformed, or does not have these shapes.
        """
        inputs = scoring_inputs(tokens, lengths, self._pad_to_length)
        if prompts is not None and self._takes_prompts:
            inputs |= prompts.inputs()
            if self._takes_steps and prompts.steps is not None:
                inputs[STEPS.name] = as_array(prompts.steps).reshape(-1, 1)
        rows, width = tokens.shape
        return self._threads.submit(self._infer, inputs, (rows, 1 if self._output == "rewards" else width - 1))

    def _infer(self, inputs: Mapping[str, np.ndarray], shape: tuple[int, int]) -> torch.Tensor:
        answer = call_model(self._http, self._model, inputs, self._limits, needed={self._output: shape})
        scores = torch.tensor(answer[self._output][:, : shape[1]], dtype=torch.float32)
        return scores[:, 0] if self._output == "rewards" else scores

    def close(self) -> None:
        """Abandon pending requests and close the connections."""
        close_connections(self._http)
        self._threads.shutdown(wait=False, cancel_futures=True)


def close_connections(http: HttpClient) -> None:
    """Close a client's connections, and say so in NeMo-Aligner's words, which scripts look for."""
    logger.info("Cleaning up communicator: %s", http.base_url)
    http.close()


def as_array(tensor: torch.Tensor, dtype: torch.dtype = torch.int64) -> np.ndarray:
    """A tensor as an array of the wire."""
    return tensor.detach().to("cpu", dtype).contiguous().numpy()


def scoring_inputs(
    tokens: torch.Tensor, lengths: torch.Tensor, pad_to_length: int | None = None
) -> dict[str, np.ndarray]:
    """The inputs of a request that asks for scores. tokens: int64 [b, s]; lengths: int64 [b].

    Sequences longer than ``pad_to_length`` go as they are: nobody here needs the padding.
    """
    if pad_to_length is not None:
        tokens = torch.nn.functional.pad(tokens, (0, max(0, pad_to_length - tokens.shape[1])))
    return {"tokens": as_array(tokens), "sequence_lengths": as_array(lengths).reshape(-1, 1)}


def call_model(
    server: HttpClient,
    model: str,
    inputs: Mapping[str, np.ndarray],
    limits: ClientLimits,
    parameters: Mapping[str, Any] | None = None,
    needed: Mapping[str, tuple[int, int]] | None = None,
) -> dict[str, np.ndarray]:
    """Send a request; returns its outputs by name.

    Args:
        needed: outputs that must be there, each with its rows and columns; values may have more columns.

    Raises:
        ProtocolError: the answer is malformed, or has not what is ``needed``.
        RequestRefusedError, ServerUnavailableError: see `HttpClient.request`.
    """
    body, headers = encode_infer_request(inputs, parameters=parameters)
    response = server.request("POST", f"/v2/models/{model}/infer", limits=limits, body=body, headers=headers)
    try:
        answer = decode_infer_response(response.content, response.headers.get(HEADER_LENGTH_FIELD))
        arrays = {name: tensor.array for name, tensor in answer.items()}
        for name, (rows, columns) in (needed or {}).items():
            _check_shape(name, output(arrays, name, model), rows, columns)
    except ProtocolError as error:
        raise ProtocolError(500, f"the answer to {response.request} cannot be used: {error}") from error
    return arrays


def output(answer: Mapping[str, np.ndarray], name: str, model: str) -> np.ndarray:
    """One of the answer's outputs. Raises `ProtocolError` if it is not there."""
    if name not in answer:
        raise ProtocolError(500, f"the answer of '{model}' has no output '{name}', only {', '.join(answer)}")
    return answer[name]


def _check_shape(name: str, array: np.ndarray, rows: int, columns: int) -> None:
    """Raise `ProtocolError` if an output does not fit: scores would go to the wrong sequences."""
    # Values may have more columns: those of the padding. NaN and infinity are left to trainer.ppo.on_nonfinite.
    is_fitting = array.ndim == 2 and len(array) == rows and array.shape[1] >= columns
    if name == "rewards":
        is_fitting = is_fitting and array.shape[1] == columns
    if not is_fitting:
        raise ProtocolError(
            500, f"'{name}' has the shape {list(array.shape)}, and should have {[rows, columns]} for {rows} sequences"
        )
    if array.dtype.kind not in "fiub":
        raise ProtocolError(500, f"'{name}' holds strings, and should hold numbers (FP32)")


def wait_for_server(server: HttpClient, timeout_s: float, setting: str) -> None:
    """Wait until a service is ready; ``setting`` says where it is. The log hears of it every half a minute.

    Raises:
        ServerUnavailableError: after ``timeout_s``.
        OtherSecretError: it has another secret.
        UnfitServiceError: it is no such service.
    """
    started = time.monotonic()
    remedy = f"start {_STARTED_BY[setting]}, or correct {setting}" if setting in _STARTED_BY else f"see {setting}"
    logger.info("waiting for the server at %s (at most %g s); %s", server.base_url, timeout_s, remedy)
    limits = dataclasses.replace(_READY_LIMITS, total_s=timeout_s)
    while True:
        try:
            server.request("GET", READY_PATH, limits=limits)
        except ServerUnavailableError as error:
            raise ServerUnavailableError(
                f"the server at {server.base_url} was not ready within {timeout_s:g} s: {remedy}. {error}"
            ) from None  # its message is in this one
        except RequestRefusedError as error:
            if error.status == 401:
                raise _other_secret(server, error) from error
            if error.status == 404:
                raise UnfitServiceError(
                    f"the program listening at {server.base_url} is not a critic or reward service: correct {setting}. "
                    f"{error}"
                ) from error
            limits = dataclasses.replace(limits, total_s=started + timeout_s - time.monotonic())
            if limits.total_s <= 0:
                raise ServerUnavailableError(f"the server at {server.base_url} was never ready: {error}") from error
            time.sleep(_REFUSED_POLL_SECONDS)  # Triton's servers say "not ready" with 400, others with 500
        else:
            logger.info("the server at %s is ready after %.1f s", server.base_url, time.monotonic() - started)
            return


def model_metadata(server: HttpClient, model: str, outputs: set[str], total_s: float) -> dict[str, Any]:
    """A model's metadata; UnfitServiceError if the server does not have it with these outputs."""
    limits = ClientLimits(read_s=10.0, total_s=total_s)
    try:
        answer = server.request("GET", f"/v2/models/{model}", limits=limits)
    except RequestRefusedError as error:
        if error.status == 401:
            raise _other_secret(server, error) from error
        raise UnfitServiceError(f"the server at {server.base_url} has no model '{model}': {error}") from error
    try:
        metadata: dict[str, Any] = answer.json()
        shapes = {str(described["name"]): list(described["shape"]) for described in metadata["outputs"]}
    except (ValueError, KeyError, TypeError) as error:
        raise UnfitServiceError(
            f"the answer to {answer.request} is not a model's metadata, an object whose 'outputs' each have 'name' and "
            f"'shape': {answer.content[:200].decode('utf-8', 'replace')}"
        ) from error
    missing = outputs - shapes.keys()
    if missing:
        raise UnfitServiceError(
            f"model '{model}' at {server.base_url} has no output {', '.join(sorted(missing))}: "
            "combine_rm_and_critic_server must be the same in the critic's and the actor's config"
        )
    if "rewards" in outputs and shapes["rewards"][-1:] not in ([1], [-1]):
        raise UnfitServiceError(
            f"model '{model}' at {server.base_url} returns rewards of shape {shapes['rewards']}, but this job needs "
            "one per sequence: start that service with model.regression.merge_attributes=True"
        )
    return metadata


def _other_secret(server: HttpClient, error: RequestRefusedError) -> OtherSecretError:
    if isinstance(error.__cause__, UnprovenServerError):  # its message says what to do
        return OtherSecretError(str(error))
    return OtherSecretError(
        f"the server at {server.base_url} does not accept this run's token ({error}). {HOW_TO_SHARE}"
    )


def check_limits(server: HttpClient, model: str, limits: Mapping[str, Any], sequences: SequencesToScore) -> None:
    """Raise UnfitServiceError if the sequences do not fit the server's limits, as far as it announces them."""
    length, vocab_size = limits.get("max_sequence_length"), limits.get("vocab_size")
    problems = []
    if length is not None and sequences.max_length > length:
        problems.append(
            f"it accepts sequences of at most {length} tokens, but this job's longest prompt and response may have "
            f"{sequences.max_length} together: raise model.encoder_seq_length of the server's job, or lower "
            "model.ppo.length_params.max_length or trainer.ppo.trt_llm.max_input_len of this one"
        )
    if vocab_size is not None and sequences.vocab_size > vocab_size:
        problems.append(
            f"its token ids end at {vocab_size - 1}, those of this job's tokenizer at {sequences.vocab_size - 1}: "
            "policy and reward model must have the same tokenizer"
        )
    elif limits.get("tokenizer") not in (None, sequences.tokenizer):
        problems.append(
            "its tokenizer gives other token ids than this job's: policy and reward model must have the same tokenizer"
        )
    if problems:
        raise UnfitServiceError(f"model '{model}' at {server.base_url} does not fit this job: {'; '.join(problems)}")
