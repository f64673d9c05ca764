"""The actor job's client of the critic and reward service.

It knows nothing of process groups: scores are asked for by the ranks that have responses, training and saves by rank 0.
Whoever calls it distributes the results.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.servers.exactly_once.journal import CriticJournal, JournalError
from nemo_style_aligner.servers.exactly_once.ledger import CriticPosition
from nemo_style_aligner.servers.exactly_once.session import (
    PROGRESS_SECONDS,
    CriticWatch,
    SequenceConflictError,
    TrainingSession,
    as_conflict,
    output,
)
from nemo_style_aligner.servers.http_client import (
    ClientLimits,
    HttpClient,
    RequestRefusedError,
    ServerUnavailableError,
)
from nemo_style_aligner.servers.http_connection import server_url
from nemo_style_aligner.servers.protocol import (
    HEADER_LENGTH_FIELD,
    READY_PATH,
    ProtocolError,
    decode_infer_response,
    encode_infer_request,
)
from nemo_style_aligner.servers.secret import HOW_TO_SHARE
from nemo_style_aligner.servers.signing import UnprovenServerError

logger = logging.getLogger(__name__)

_TRAINING_BYTES = 20  # per position of a training request: a token in int64, three numbers in fp32
# Polling is slow: every rank asks, and a service that is loading its model has other things to do.
_READY_LIMITS = ClientLimits(connect_s=3.0, read_s=3.0, total_s=3.0, first_backoff_s=1.0, max_backoff_s=2.0)
_REFUSED_POLL_SECONDS = 1.0  # between readiness probes that a third-party server refuses, with 400 or 500
_LEVEL_POLL_SECONDS = 0.5  # between tries of a scoring request while the critic is being brought level

__all__ = ["CriticClient", "Scores", "SequenceConflictError", "SequencesToScore"]


@dataclasses.dataclass(frozen=True)
class SequencesToScore:
    """What a job will send, to be compared with what a server can take.

    Attributes:
        max_length: tokens of the longest possible sequence, prompt and response.
        vocab_size: one more than the largest token id.
        tokenizer: fingerprint of the tokenizer that they are made with.
        training_tokens: upper bound of the tokens in one training request, padding included.
    """

    max_length: int
    vocab_size: int
    tokenizer: str
    training_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Scores:
    """rewards: float32 [b]; values: float32 [b, s-1]. CPU tensors."""

    rewards: torch.Tensor
    values: torch.Tensor


class UnfitServiceError(UserError, ValueError):
    """A server is no service of this kind, or does not fit this job; the message says why, and what to change."""

    exit_status = 1


class CriticClient:
    """Client of both services, built from the config section ``remote_critic_rm`` (with NeMo-Aligner's keys).

    To the critic, a client is a new run until `begin` or `follow` says which run it is: keep its `position` in the
    actor's checkpoint. Training requests and saves are sent one at a time, in the order of the calls; inference
    requests up to ``max_parallel`` at once to each server.

    By itself, a client makes sure that nothing is trained twice, and raises an error if the critic has lost training.
    After `begin` (on one rank) and `follow` (on the others) it waits for a lost critic, has it brought level, and
    accepts scores only from a critic that is level. ``on_lost`` is called if that is impossible, see `CriticWatch`.

    Attributes:
        last_progress: when a critic that is being brought level was last seen to have moved, by `time.monotonic()`.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        infer_limits: ClientLimits,
        train_limits: ClientLimits,
        token: str | None = None,
        max_parallel: int = 8,
        on_lost: Callable[[Exception], object] | None = None,
    ) -> None:
        critic, names = config["critic"], config["critic"]["name"]
        self._infer_model, self._train_model, self._save_model = names["infer"], names["train"], names["save"]
        self._pad_to_length: int | None = config.get("pad_to_length")
        self._critic = _http_client(critic, token)
        is_combined = bool(config["combine_rm_and_critic_server"])
        self._reward = None if is_combined else _http_client(config["reward_model"], token)
        self._reward_model = config["reward_model"]["name"]
        self._failure: str | None = None  # of training
        self._infer_limits = infer_limits
        self._train_limits = train_limits
        self._session = TrainingSession(
            self._command,
            self._train_model,
            self._save_model,
            CriticPosition(uuid.uuid4().hex, 1),
            self._critic.base_url,
        )
        self._watch: CriticWatch | None = None
        self._on_lost = on_lost
        self._closed = threading.Event()
        self.last_progress = -math.inf
        self._inference = concurrent.futures.ThreadPoolExecutor(max_parallel, "critic-infer")
        self._rewards = concurrent.futures.ThreadPoolExecutor(max_parallel, "reward-infer")
        self._command_thread = concurrent.futures.ThreadPoolExecutor(1, "critic-command")  # one thread keeps the order

    @property
    def position(self) -> CriticPosition:
        """Where the critic must be; read it when no training is under way."""
        return self._session.position

    # -------------------------------------------------------------- the run

    def begin(self, journal: CriticJournal, position: CriticPosition) -> None:
        """Continue the run of ``position``, and bring the critic to that position, now and whenever it is lost.

        ``journal`` holds the batches that the critic may need for that. Raises `SequenceConflictError` when the critic
        cannot be brought there.
        """
        self._session.begin(journal, position)
        self._watch = CriticWatch(self._critic, self._session, self._train_limits.away_s or 0.0, self._on_lost)

    def follow(self, position: CriticPosition) -> None:
        """Join the run of ``position`` without bringing the critic there, on a rank that does not train.

        From now on scores are accepted only from a critic at ``position``.
        """
        self._session.position = position

    # -------------------------------------------------------------- requests

    def infer_async(self, tokens: torch.Tensor, lengths: torch.Tensor) -> concurrent.futures.Future[Scores]:
        """Score sequences. tokens: int64 [b, s]; lengths: int64 [b], prompt and response together.

        ``values[:, t]`` belongs to the step that chooses token t+1; it is zero from t = length - 1 on. The future
        raises `ProtocolError` when an answer is malformed, or does not have one reward and s-1 values per sequence.
        """
        rows, width = tokens.shape
        if self._pad_to_length is not None:  # longer ones go as they are: nobody here needs the padding
            tokens = torch.nn.functional.pad(tokens, (0, max(0, self._pad_to_length - width)))
        inputs = {
            "tokens": _numpy(tokens, torch.int64),
            "sequence_lengths": _numpy(lengths, torch.int64).reshape(-1, 1),
        }
        needed, rewards = {"values": (rows, width - 1)}, None
        if self._reward is None:
            needed["rewards"] = (rows, 1)
        else:
            rewards = self._rewards.submit(
                self._call,
                self._reward,
                self._reward_model,
                inputs,
                self._infer_limits,
                needed={"rewards": (rows, 1)},
            )
        return self._inference.submit(self._score, inputs, needed, rewards, self.position)

    def train_async(
        self, tokens: torch.Tensor, returns: torch.Tensor, prev_values: torch.Tensor, mask: torch.Tensor
    ) -> concurrent.futures.Future[float]:
        """Train the critic on one batch, exactly once. tokens: int64 [b, s]; the others: float32 [b, s-1].

        The future gives the mean loss. It raises `SequenceConflictError` when the critic has lost or
        gained training requests and cannot be brought level, and RuntimeError when training has failed before.
        """
        inputs = {"tokens": _numpy(tokens, torch.int64)}
        for name, tensor in (("returns", returns), ("prev_values", prev_values), ("mask", mask)):
            inputs[name] = _numpy(tensor, torch.float32)
        return self._command_thread.submit(self._train, inputs)

    def save_async(self, keep_history: str | None = None) -> concurrent.futures.Future[None]:
        """Have the critic write a checkpoint, after all training asked for before.

        ``keep_history``: history of the checkpoint that this save must not prune.
        """
        return self._command_thread.submit(self._save, keep_history)

    # -------------------------------------------------------------- readiness

    def wait_until_ready(
        self,
        timeout_s: float,
        sequences: SequencesToScore | None = None,
    ) -> None:
        """Wait until every server is ready, and check that it is the one the config describes.

        The log gets a line every ten seconds.

        Raises:
            ServerUnavailableError: after ``timeout_s``.
            UnfitServiceError: a server is no service of this kind, does not have the models and outputs needed, or says
                that it cannot take the ``sequences``.
        """
        deadline = time.monotonic() + timeout_s
        infer_outputs = {"values", "rewards"} if self._reward is None else {"values"}
        needed = [(self._critic, {self._infer_model: infer_outputs, self._train_model: set(), self._save_model: set()})]
        if self._reward is not None:
            needed.append((self._reward, {self._reward_model: {"rewards"}}))
        for server, models in needed:
            _wait_for(server, deadline, timeout_s)
            for model, outputs in models.items():
                metadata = _model_metadata(server, model, outputs, max(deadline - time.monotonic(), 5.0))
                if sequences is not None:
                    limits = metadata.get("parameters", {})
                    _check_limits(server, model, limits, sequences)
                    if server is self._critic and model == self._train_model:
                        _warn_of_large_batches(limits, sequences)

    def close(self) -> None:
        """Abandon pending requests and close the connections."""
        if self._watch is not None:
            self._watch.stop()
        for http in (self._critic, self._reward):
            if http is not None:
                # NeMo-Aligner's words, which scripts look for.
                logger.info("Cleaning up communicator: %s", http.base_url)
                http.close()
        self._closed.set()
        for pool in (self._inference, self._rewards, self._command_thread):
            pool.shutdown(wait=False, cancel_futures=True)

    # -------------------------------------------------------------- in the pool's threads

    def _score(
        self,
        inputs: dict[str, np.ndarray],
        needed: Mapping[str, tuple[int, int]],
        rewards: concurrent.futures.Future[dict[str, np.ndarray]] | None,
        position: CriticPosition,
    ) -> Scores:
        answer = self._values(inputs, needed, position)
        if rewards is not None:
            answer["rewards"] = rewards.result()["rewards"]
        _, num_values = needed["values"]
        return Scores(
            torch.tensor(answer["rewards"][:, 0], dtype=torch.float32),
            torch.tensor(answer["values"][:, :num_values], dtype=torch.float32),  # without the padding
        )

    def _values(
        self, inputs: dict[str, np.ndarray], needed: Mapping[str, tuple[int, int]], position: CriticPosition
    ) -> dict[str, np.ndarray]:
        """The answer of a critic at ``position``; waits while it is being brought there, as long as it progresses."""
        if position.history is None:
            return self._call(self._critic, self._infer_model, inputs, self._infer_limits, needed=needed)
        expected, since = None, time.monotonic()
        patience = self._train_limits.total_s + (self._train_limits.away_s or 0.0)
        while True:
            try:
                return self._call(
                    self._critic, self._infer_model, inputs, self._infer_limits, position.parameters(), needed
                )
            except RequestRefusedError as error:
                conflict = as_conflict(error)
                if conflict is None:
                    raise
                if self._watch is not None:
                    if self._watch.failure is not None:
                        raise self._watch.failure from error
                    self._watch.wake()
                if conflict.expected != expected:
                    expected = conflict.expected
                    self.last_progress = since = time.monotonic()
                elapsed = time.monotonic() - since
                if elapsed > patience:
                    message = (
                        f"the critic has not been brought up to date, and has made no progress, for {elapsed:.0f} s: "
                        f"{conflict}"
                    )
                    raise SequenceConflictError(message, conflict.expected, conflict.history) from error
            if self._closed.wait(_LEVEL_POLL_SECONDS * random.uniform(0.5, 1.5)):
                raise ServerUnavailableError(f"{self._critic.base_url}: the client was closed")

    def _train(self, inputs: dict[str, np.ndarray]) -> float:
        if self._failure is not None:  # this batch would take the failed one's place
            raise RuntimeError(f"critic training has stopped because a request failed: {self._failure}")
        try:
            return self._session.train(inputs)
        except (
            RequestRefusedError,
            ServerUnavailableError,
            SequenceConflictError,
            ProtocolError,
            JournalError,
            OSError,
        ) as error:
            self._failure = str(error)
            raise

    def _save(self, keep_history: str | None) -> None:
        status = self._session.save(keep_history)
        if status != 0:
            raise RuntimeError(
                f"the critic at {self._critic.base_url} could not save its checkpoint (status {status}): see its log"
            )

    def _command(
        self, model: str, inputs: Mapping[str, np.ndarray], parameters: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        return self._call(self._critic, model, inputs, self._train_limits, parameters)

    def _call(
        self,
        server: HttpClient,
        model: str,
        inputs: Mapping[str, np.ndarray],
        limits: ClientLimits,
        parameters: Mapping[str, Any] | None = None,
        needed: Mapping[str, tuple[int, int]] | None = None,
    ) -> dict[str, np.ndarray]:
        """Send a request; returns its outputs by name. ``needed``: outputs that must be there; see `_check_shape`."""
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


def _http_client(section: Mapping[str, Any], token: str | None) -> HttpClient:
    return HttpClient(server_url(section["ip"], section["port"]), token=token)


def _numpy(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    return tensor.detach().to("cpu", dtype).contiguous().numpy()


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


def _wait_for(server: HttpClient, deadline: float, timeout_s: float) -> None:
    started = last_line = time.monotonic()
    logger.info("waiting for the server at %s (at most %g s)", server.base_url, timeout_s)
    while True:
        try:
            server.request("GET", READY_PATH, limits=_READY_LIMITS)
        except (ServerUnavailableError, RequestRefusedError) as error:
            if isinstance(error, RequestRefusedError) and error.status == 401:
                raise _other_secret(server, error) from error
            if isinstance(error, RequestRefusedError) and error.status == 404:
                raise UnfitServiceError(
                    f"the program listening at {server.base_url} is not a critic or reward service: correct its port "
                    f"(remote_critic_rm.critic.port, remote_critic_rm.reward_model.port). {error}"
                ) from error
            now = time.monotonic()
            if now >= deadline:
                raise ServerUnavailableError(
                    f"the server at {server.base_url} was not ready within {timeout_s:g} s: {error}"
                ) from None  # its message is in this one
            if now - last_line >= PROGRESS_SECONDS:
                waited = now - started
                logger.info("still waiting for the server at %s after %.0f s: %s", server.base_url, waited, error)
                last_line = now
            if isinstance(error, RequestRefusedError):  # it came at once, without a wait
                time.sleep(min(_REFUSED_POLL_SECONDS, deadline - now))
        else:
            logger.info("the server at %s is ready after %.1f s", server.base_url, time.monotonic() - started)
            return


def _model_metadata(server: HttpClient, model: str, outputs: set[str], total_s: float) -> dict[str, Any]:
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


def _other_secret(server: HttpClient, error: RequestRefusedError) -> UnfitServiceError:
    if isinstance(error.__cause__, UnprovenServerError):  # its message says what to do
        return UnfitServiceError(str(error))
    return UnfitServiceError(
        f"the server at {server.base_url} does not accept this run's token ({error}). {HOW_TO_SHARE}"
    )


def _warn_of_large_batches(limits: Mapping[str, Any], sequences: SequencesToScore) -> None:
    """Warn of training batches that the critic might refuse, which else shows only after a step's rollouts.

    It is no error: rollouts may well be shorter than allowed.
    """
    largest, allowed = sequences.training_tokens * _TRAINING_BYTES, limits.get("max_body_bytes")
    if allowed is not None and largest > allowed:
        logger.warning(
            "the critic's job accepts requests of at most %d bytes, but a step's training batch may need up to %d: "
            "raise its trainer.ppo.max_body_bytes, or lower model.ppo.num_rollout_samples of this job",
            allowed,
            largest,
        )


def _check_limits(server: HttpClient, model: str, limits: Mapping[str, Any], sequences: SequencesToScore) -> None:
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
