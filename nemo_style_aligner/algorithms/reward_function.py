"""A service that answers as a reward model does, with the rewards of a Python function of the user's.

The function gets the prompt's whole line, with the right answer, say. The actor's job sends it (`PROMPT_LENGTHS`,
`LINES` of `servers.endpoints`). Requests of other clients have token ids and nothing else: for them the service reads
the actor's prompt files, and finds a sequence's prompt by the sequence's first tokens.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_style_aligner.checkpoints.nemo_archive import load_nemo_tokenizer
from nemo_style_aligner.data.datasets import PromptDataset
from nemo_style_aligner.data.jsonl import Record
from nemo_style_aligner.data.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.generation.stopping import text_before_end
from nemo_style_aligner.parallel.ending import fail_job
from nemo_style_aligner.rl.reward_functions import FunctionRewards
from nemo_style_aligner.rl.sample import Sample
from nemo_style_aligner.servers.dispatcher import DispatchSettings
from nemo_style_aligner.servers.endpoints import ModelLimits, reward_endpoint
from nemo_style_aligner.servers.jobs import InferJob, Job, JobQueue, QueueState
from nemo_style_aligner.servers.metrics import ServiceMetrics
from nemo_style_aligner.servers.protocol import ProtocolError
from nemo_style_aligner.servers.routes import HttpSettings, start_http_server
from nemo_style_aligner.wording import some_of

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25  # how soon a stop request is noticed
_DRAIN_SECONDS = 60.0  # after a stop request: requests not begun by then are refused
_MIN_LENGTH = 1  # model.ppo.length_params.min_length by default: so many tokens do not end a response
_NO_PROMPTS = (
    "it does not say which prompts its sequences are responses to, as the actor's job does ('lines' and "
    "'prompt_lengths'): start this service with --prompts, and it finds them by their tokens"
)


def open_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a ``.nemo`` archive (a file or a folder), a tokenizer directory or a ``.model`` file.

    Raises:
        FileNotFoundError: there is none in the archive.
        TokenizerError: there is nothing at ``path``, or nothing that can be read.
    """
    is_archive = (path / "model_config.yaml").is_file() or (path.is_file() and path.suffix != ".model")
    return load_nemo_tokenizer(path) if is_archive else load_tokenizer(path)


class PromptLines:
    """The lines of prompt files, looked up by the first tokens of a sequence.

    Args:
        paths: the actor's JSONL files, of training and of validation.
        tokenizer: the policy's.
        add_bos: whether the actor puts the BOS token before each prompt (``sampling_params.add_BOS``); None: as the
            model was trained, see `Tokenizer.begins_with_bos`.

    Raises:
        DataError: a file or a line is not as it should be, or two different lines have the same prompt.
        TokenizerError: there is no BOS token.
    """

    def __init__(self, paths: Sequence[Path], tokenizer: Tokenizer, *, add_bos: bool | None = None) -> None:
        self._add_bos = tokenizer.begins_with_bos(add_bos, "--add-bos")
        self._paths = [str(path) for path in paths]
        self._records: dict[bytes, Record] = {}
        prompts = PromptDataset(paths, tokenizer, sys.maxsize, add_bos=add_bos, bos_key="--add-bos")
        for i in range(len(prompts)):
            record = prompts.record(i)
            known = self._records.setdefault(_as_bytes(prompts[i].token_ids), record)
            if known.fields != record.fields:
                record.fail(
                    f"the prompt is the same as that of {known.path}:{known.line}, but the lines differ: there is no "
                    "telling which of them a response belongs to. Leave one of them out, or make them identical"
                )
        # In bytes, the longest first: the longest prompt that fits is the one.
        self._sizes = sorted({len(key) for key in self._records}, reverse=True)
        self._warn_of_ambiguity()

    def __len__(self) -> int:
        return len(self._records)

    def find(self, tokens: np.ndarray) -> tuple[Record, int]:
        """The line of the longest prompt that ``tokens`` [n] begin with, and that prompt's number of tokens.

        Raises:
            ProtocolError: (400) there is none.
        """
        sequence = _as_bytes(tokens)
        for size in self._sizes:
            record = self._records.get(sequence[:size])
            if record is not None and size <= len(sequence):
                return record, size // _TOKEN_BYTES
        option = "--no-add-bos" if self._add_bos else "--add-bos"
        raise ProtocolError(
            400,
            f"it begins with none of the {len(self)} prompts of {some_of(self._paths)}: give --prompts all files of "
            "the actor's model.data.data_prefix, those of validation included, and --tokenizer the policy's tokenizer; "
            f"start this service with {option} if the actor's sampling_params.add_BOS is {not self._add_bos}",
        )

    def _warn_of_ambiguity(self) -> None:
        """Warn of prompts with which others begin: sorted, such a prompt stands right before one of those others."""
        ordered = sorted(self._records)
        pairs = [(short, long) for short, long in itertools.pairwise(ordered) if long.startswith(short)]
        if pairs:
            short, long = (self._records[key] for key in pairs[0])
            logger.warning(
                "%d prompts are prefixes of others (%s:%d of %s:%d): a response that continues like the longer prompt "
                "is taken for a response to the longer one",
                len(pairs),
                *(short.path, short.line, long.path, long.line),
            )


class RewardFunctionService:
    """Serves a function as the reward model ``reward_model``. Listens once it is made, and answers during `run`.

    If the function raises, or returns anything but finite numbers, the answer is 500: the actor's job repeats such a
    request a few times, then ends with an error that names function and sample.

    Args:
        rewards: calls the function; `run` closes it.
        prompts: the actor's, for clients that do not send them; None: they are refused.
        tokenizer: the policy's.
        http: where to listen.
        end_strings: a response's text ends before the first of them, unless its first token completes it; so do those
            that the policy has learnt (`Tokenizer.format`).
    """

    def __init__(
        self,
        rewards: FunctionRewards,
        prompts: PromptLines | None,
        tokenizer: Tokenizer,
        http: HttpSettings,
        *,
        end_strings: Sequence[str] = (),
    ) -> None:
        self._rewards = rewards
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._end_strings = tokenizer.end_strings(end_strings)
        self._stop_requested = False  # a plain bool: set from a signal handler, where no lock may be taken
        self._is_closed = False
        self._queue = JobQueue(http.max_outstanding_requests)
        self._metrics = ServiceMetrics()
        limits = ModelLimits(
            vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.fingerprint(), max_body_bytes=http.max_body_bytes
        )
        endpoints = reward_endpoint(limits, tokenize=tokenizer.text_to_ids, takes_prompts=True)
        # One row: requests are not merged, so that an error fails one request only.
        self._http = start_http_server(endpoints, self._queue, http, DispatchSettings((1,)), self._metrics)

    @property
    def port(self) -> int:
        """The port that the service listens on."""
        return self._http.port

    def request_stop(self) -> None:
        """Let `run` finish the accepted requests, then return. Call it from any thread or a signal handler."""
        self._stop_requested = True

    def run(self) -> None:
        """Serve until `request_stop`."""
        threads = [
            threading.Thread(target=self._work, name=f"reward-{number}", daemon=True)
            for number in range(self._rewards.max_parallel)
        ]
        for thread in threads:
            thread.start()
        self._queue.set_state(QueueState.SERVING)
        while not self._stop_requested:
            time.sleep(_POLL_SECONDS)
        self._queue.set_state(QueueState.DRAINING)
        deadline = time.monotonic() + _DRAIN_SECONDS
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._queue.refuse_waiting(ProtocolError(503, QueueState.DRAINING.value, {"Retry-After": "5"}))
        self._is_closed = True
        self._rewards.close()
        self._http.stop()

    def _work(self) -> None:
        """A thread's loop: answer one request after the other. An unexpected error ends the whole service."""
        try:
            while self._queue.state is not QueueState.DRAINING or self._queue.waiting:
                for job in self._queue.take(_POLL_SECONDS, 1, (1,), 0.0):
                    self._do(job)
        except BaseException as error:
            if self._is_closed:  # it was time to end, whatever this thread still waited for
                return
            fail_job(error)
            raise

    def _do(self, job: Job) -> None:
        try:
            job.future.set_result(self._answer(job))
        except ProtocolError as error:
            job.future.set_exception(error)

    def _answer(self, job: Job) -> dict[str, np.ndarray]:
        assert isinstance(job, InferJob)  # there is no other endpoint
        job.taken, job.batch_rows = time.monotonic(), job.rows
        self._metrics.queue_time.observe(job.taken - job.arrived)
        self._metrics.batch_rows.observe(job.rows)
        rewards = self._rewards.score([self._sample(job, row) for row in range(job.rows)]).result()
        for row, reward in enumerate(rewards):
            if reward.problem is not None:
                raise _of_row(row, ProtocolError(500, reward.problem))
        job.finished = time.monotonic()
        return {"rewards": np.array([reward.value for reward in rewards], dtype=np.float32).reshape(-1, 1)}

    def _sample(self, job: InferJob, row: int) -> Sample:
        """A sequence of a request. Raises `ProtocolError` if its prompt is not known."""
        tokens, place = job.tokens[row, : job.lengths[row]], ""
        line: Mapping[str, Any]
        if job.lines is not None and job.prompt_lengths is not None:
            line, prompt_length = job.lines[row], int(job.prompt_lengths[row])
        elif self._prompts is not None:
            try:
                record, prompt_length = self._prompts.find(tokens)
            except ProtocolError as error:
                raise _of_row(row, error) from error
            line, place = record.fields, f"{record.path}:{record.line}"
        else:
            raise ProtocolError(400, _NO_PROMPTS)
        return Sample(row, row, line, tokens.tolist(), prompt_length, True, self._decode, place)

    def _decode(self, token_ids: Sequence[int]) -> str:
        response_ids = self._tokenizer.without_end(list(token_ids))
        return text_before_end(response_ids, self._tokenizer.ids_to_text, self._end_strings, _MIN_LENGTH)


def _of_row(row: int, error: ProtocolError) -> ProtocolError:
    return ProtocolError(error.status, f"sequence {row} of the request: {error.message}")


_TOKEN_BYTES = 4


def _as_bytes(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as a key of a dict, a fraction of the size of a tuple."""
    return np.asarray(tokens, dtype=np.uint32).tobytes()
