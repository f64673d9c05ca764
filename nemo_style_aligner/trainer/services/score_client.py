"""The client of scores: of any service that gives them, in this job or elsewhere. The critic's is built on it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.http_client import (
    ClientLimits,
    HttpClient,
    RequestRefusedError,
    ServerUnavailableError,
)
from nemo_style_aligner.guard.protocol import (
    HEADER_LENGTH_FIELD,
    READY_PATH,
    ProtocolError,
    decode_infer_response,
    encode_infer_request,
)
from nemo_style_aligner.guard.secret import HOW_TO_SHARE
from nemo_style_aligner.guard.signing import UnprovenServerError
from nemo_style_aligner.trainer.services.scores import LINES, PROMPT_LENGTHS, REWARDS, STEPS, Score

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
    "remote_critic_rm.reward_model.port": "serve_reward_model.py or serve_reward_function.py, name other sources in "
    "trainer.ppo.rewards",
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
        steps: int64 [b], the run's.
    """

    lines: Sequence[Mapping[str, Any]]
    lengths: torch.Tensor
    steps: torch.Tensor

    def inputs(self) -> dict[str, np.ndarray]:
        """The inputs of a request: a JSON text for each line, BYTES [b, 1], lengths and steps, INT64 [b, 1]."""
        texts = np.array([json.dumps(dict(line)).encode() for line in self.lines], dtype=object)
        inputs = {LINES: texts, PROMPT_LENGTHS: as_array(self.lengths), STEPS: as_array(self.steps)}
        return {spec.name: array.reshape(-1, 1) for spec, array in inputs.items()}


Scores = dict[str, torch.Tensor]
"""Scores by name, fp32: [b], or [b, s-1] where they are per token."""

Ask = Callable[..., dict[str, np.ndarray]]  # inputs, and what is ``needed``, as `call_model` takes them


class ScoreClient:
    """Client of a model that scores sequences: a model's service, a function's, anybody's.

    Args:
        url: of the service, without a path.
        model: its name there.
        scores: what it gives, and is asked for; one number where they are per sequence.
        limits: of a request.
        token: the shared secret; None: no authentication.
        max_parallel: requests that are under way at once.
        pad_to_length: shorter sequences are padded to this many tokens; None: to the longest of a request.
        setting: config key that says where the service is, for messages.
    """

    def __init__(
        self,
        url: str,
        model: str,
        scores: Sequence[Score] = (REWARDS,),
        *,
        limits: ClientLimits,
        token: str | None = None,
        max_parallel: int = 8,
        pad_to_length: int | None = None,
        setting: str = "remote_critic_rm.reward_model.port",
    ) -> None:
        self.scores = scores
        self._http = HttpClient(url, token=token)
        self._model = model
        self._limits = limits
        self._pad_to_length = pad_to_length
        self._setting = setting
        self._announced: set[str] = set()  # the model's inputs
        self._threads = concurrent.futures.ThreadPoolExecutor(max_parallel, f"{model}-scores")

    @property
    def base_url(self) -> str:
        """The service's URL."""
        return self._http.base_url

    def wait_until_ready(self, timeout_s: float, sequences: SequencesToScore | None = None) -> None:
        """Wait until the service is ready, and check that it gives what is wanted, and takes ``sequences``.

        Raises:
            ServerUnavailableError: after ``timeout_s``.
            UnfitServiceError: it is no such service, does not have the models and scores needed, or says that it cannot
                take the sequences.
        """
        deadline = time.monotonic() + timeout_s
        wait_for_server(self._http, timeout_s, self._setting)
        for model, scores in self._needed().items():
            metadata = model_metadata(self._http, model, scores, max(deadline - time.monotonic(), 5.0))
            if sequences is not None:
                check_limits(self._http, model, metadata.get("parameters", {}), sequences)
            if model == self._model:
                described = metadata.get("inputs")
                self._announced = {entry.get("name") for entry in described} if isinstance(described, list) else set()

    def _needed(self) -> dict[str, Sequence[Score]]:
        """The models that the service must have, and what they must give."""
        return {self._model: self.scores}

    def infer_async(
        self, tokens: torch.Tensor, lengths: torch.Tensor, prompts: PromptsOfSequences | None = None
    ) -> concurrent.futures.Future[Scores]:
        """Score sequences. tokens: int64 [b, s]; lengths: int64 [b], prompt and response together.

        What is per token has at t what belongs to token t + 1, zero where there is none. Of ``prompts`` those inputs
        are sent that the service announces, once `wait_until_ready` has been called. The future raises `ProtocolError`
        when an answer is malformed, or does not have the scores' shapes.
        """
        rows, width = tokens.shape
        padding = max(0, (self._pad_to_length or 0) - width)  # longer ones go as they are: nobody here needs it
        inputs = {"tokens": as_array(torch.nn.functional.pad(tokens, (0, padding)))}
        inputs["sequence_lengths"] = as_array(lengths).reshape(-1, 1)
        if prompts is not None and LINES.name in self._announced:
            inputs |= {name: array for name, array in prompts.inputs().items() if name in self._announced}
        return self._threads.submit(self._scores, self._asking(), inputs, rows, width)

    def _asking(self) -> Ask:
        """What sends a request that is made now, and returns its answer."""
        return functools.partial(call_model, self._http, self._model, limits=self._limits)

    def _scores(self, ask: Ask, inputs: Mapping[str, np.ndarray], rows: int, width: int) -> Scores:
        answer = ask(inputs, needed={score: score.shape(rows, width) for score in self.scores})
        given = {score: torch.tensor(answer[score.name], dtype=torch.float32) for score in self.scores}
        return {score.name: x[:, : width - 1] if score.per_token else x[:, 0] for score, x in given.items()}

    def close(self) -> None:
        """Abandon pending requests and close the connections."""
        # In NeMo-Aligner's words, which scripts look for.
        logger.info("Cleaning up communicator: %s", self.base_url)
        self._http.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def as_array(tensor: torch.Tensor, dtype: torch.dtype = torch.int64) -> np.ndarray:
    """A tensor as an array of the wire."""
    return tensor.detach().to("cpu", dtype).contiguous().numpy()


def call_model(
    server: HttpClient,
    model: str,
    inputs: Mapping[str, np.ndarray],
    limits: ClientLimits,
    parameters: Mapping[str, Any] | None = None,
    needed: Mapping[Score, Sequence[int]] | None = None,
) -> dict[str, np.ndarray]:
    """Send a request; returns its outputs by name.

    Args:
        needed: scores that must be there, each with its rows and columns; those per token may have more columns.

    Raises:
        ProtocolError: the answer is malformed, or has not what is ``needed``.
        RequestRefusedError, ServerUnavailableError: see `HttpClient.request`.
    """
    body, headers = encode_infer_request(inputs, parameters=parameters)
    response = server.request("POST", f"/v2/models/{model}/infer", limits=limits, body=body, headers=headers)
    try:
        answer = decode_infer_response(response.content, response.headers.get(HEADER_LENGTH_FIELD))
        arrays = {name: tensor.array for name, tensor in answer.items()}
        for score, shape in (needed or {}).items():
            _check_shape(score, output(arrays, score.name, model), shape)
    except ProtocolError as error:
        raise ProtocolError(500, f"the answer to {response.request} cannot be used: {error}") from error
    return arrays


def output(answer: Mapping[str, np.ndarray], name: str, model: str) -> np.ndarray:
    """One of the answer's outputs. Raises `ProtocolError` if it is not there."""
    if name not in answer:
        raise ProtocolError(500, f"the answer of '{model}' has no output '{name}', only {', '.join(answer)}")
    return answer[name]


def _check_shape(score: Score, array: np.ndarray, shape: Sequence[int]) -> None:
    """Raise `ProtocolError` if an output does not fit: scores would go to the wrong sequences."""
    # What is per token may have more columns: those of the padding. NaN and infinity are left to on_nonfinite.
    rows, columns = shape
    fits = array.ndim == 2 and len(array) == rows and array.shape[1] >= columns
    if not fits or (not score.per_token and array.shape[1] > columns):
        message = f"'{score.name}' has the shape {list(array.shape)}, and should have {shape} for {rows} sequences"
        raise ProtocolError(500, message)
    if array.dtype.kind not in "fiub":
        raise ProtocolError(500, f"'{score.name}' holds strings, and should hold numbers (FP32)")


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


def model_metadata(server: HttpClient, model: str, scores: Sequence[Score], total_s: float) -> dict[str, Any]:
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
    missing = {score.name for score in scores} - shapes.keys()
    if missing:
        raise UnfitServiceError(
            f"model '{model}' at {server.base_url} has no output {', '.join(sorted(missing))}: "
            "combine_rm_and_critic_server must be the same in the critic's and the actor's config"
        )
    for score in scores:
        if not score.per_token and shapes[score.name][-1:] not in ([score.columns], [-1]):
            raise UnfitServiceError(
                f"model '{model}' at {server.base_url} returns {score.name} of shape {shapes[score.name]}, but this "
                "job needs one per sequence: start that service with model.regression.merge_attributes=True"
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
