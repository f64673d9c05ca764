"""The ``pytorch`` backend: TensorRT-LLM's ``AsyncLLM`` in a sidecar process, refitted through CUDA IPC."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.generation.engine import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    WeightStream,
)
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.generation.lifecycle import NO_WEIGHTS, EngineLifecycle
from nemo_style_aligner.generation.sampling import request_key
from nemo_style_aligner.generation.stopping import StopCondition
from nemo_style_aligner.generation.trtllm.engine_weights import require_told
from nemo_style_aligner.generation.trtllm.sidecar.process import Sidecar, SidecarError, SidecarLost
from nemo_style_aligner.generation.trtllm.streams import Bucket, buckets, ipc_handles
from nemo_style_aligner.weights.checked import checked
from nemo_style_aligner.weights.huggingface_config import FAMILIES, hf_config, hf_family
from nemo_style_aligner.weights.layout import hf_tensors, weight_layout

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SidecarSettings:
    """How to run a sidecar. What is not listed here is explained in the config, under ``trainer.ppo.trt_llm``.

    Attributes:
        python: interpreter of TensorRT-LLM's environment.
        environment: environment variables of the sidecar.
        device_uuids: UUIDs of the group's GPUs, in rank order.
        sleep: whether `unload` and `reload` will be called.
    """

    python: str
    environment: Mapping[str, str]
    device_uuids: tuple[str, ...]
    sleep: bool
    kv_cache_memory_fraction: float
    bucket_bytes: int
    max_restarts: int
    start_seconds: float
    refit_seconds: float
    request_seconds: float
    ping_seconds: float


class SidecarEngine(EngineLifecycle):
    """Generates in a sidecar that belongs to the first rank of a tensor-parallel group.

    The ranks of the group call every method together and pass the same requests in the same order; each provides the
    handles of the weights on its own GPU. A sidecar that died or hung is replaced, a bounded number of times. The new
    one has no weights: where ``recover_weights`` is given, an interrupted refit starts over with it, and an interrupted
    `generate` loads the current weights again and goes on; otherwise both raise SidecarLost.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        settings: SidecarSettings,
        *,
        dtype: torch.dtype,
        group: EngineGroup | None = None,
        recover_weights: Callable[[], WeightStream] | None = None,
        make_handles: Callable[[Bucket], str] = ipc_handles,
        **options: Any,
    ) -> None:
        """Describe the engine; `build` starts it.

        Args:
            architecture: the model's shape.
            settings: of the sidecar.
            dtype: of the weights.
            group: the ranks that share the sidecar.
            recover_weights: streams the weights of the latest refit again; collective over ``group`` only.
            make_handles: encodes a bucket for TensorRT-LLM's workers.
            options: those common to all engines, see `EngineLifecycle`.

        Raises:
            ValueError: Hugging Face, and so TensorRT-LLM, has no such model.
        """
        super().__init__(architecture.vocab_size, **options)
        self._architecture = architecture
        require_told(architecture)  # raises, if at all, on every rank alike; so does the next line
        self._config = json.dumps(hf_config(_with_tensors_apart(architecture), dtype), indent=2)
        self._settings = settings
        self._dtype = dtype
        self._group = group or EngineGroup()
        self._recover_weights = recover_weights
        self._make_handles = make_handles
        self._shapes = {name: tensor.shape for name, tensor in hf_tensors(weight_layout(architecture)).items()}
        self._sidecar: Sidecar | None = None  # on the leader only
        self._cache_asleep = False
        self._restarts = 0

    # ---- life cycle -------------------------------------------------------------------------

    def _build(self) -> None:
        """Start the sidecar and let it compile and capture."""
        self._start()

    def _refit(self, weights: WeightStream) -> None:
        if not self._on_leader(lambda: self._sidecar is not None and self._sidecar.is_alive()):
            self._restart("the health check before the refit failed")
        try:
            self._push(weights)
        except SidecarLost as lost:
            if self._recover_weights is None:
                raise
            self._restart(lost)
            self._push(self._recover_weights())

    def _unload(self) -> None:
        try:
            self._call("release", what=["weights", "kv_cache"])
        except SidecarLost as lost:
            # Its memory is released either way; `reload` starts another sidecar.
            logger.warning("%s", lost)
            self._end()
        self._cache_asleep = True

    def _reload(self) -> None:
        """Allocate the weights' memory again; that of the KV cache follows after the refit."""
        try:
            self._call("resume", what=["weights"])
        except SidecarLost as lost:
            self._restart(lost)

    def close(self) -> None:
        """End the sidecar. Without this it ends with this process."""
        self._end()
        self._built = self._loaded = False

    # ---- generation -------------------------------------------------------------------------

    def _generate(
        self, requests: Iterator[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        pending: dict[int, GenerationRequest] = {}  # by request id, the same on every rank of the group
        sent: dict[int, int] = {}  # message number -> request id; on the leader only
        try:
            while True:
                # Every rank of the group pulls when the leader does, so that their sources of requests stay in step.
                while len(pending) < self._num_slots and (request := next(requests, None)) is not None:
                    self._check(request, sampling)
                    pending[request.request_id] = request
                if not pending:
                    return
                try:
                    finished, reply = self._on_leader(lambda: self._next_reply(pending, sent, sampling, stop))
                except SidecarLost as lost:
                    sent.clear()  # numbers of a process that is gone
                    self._recover(lost)
                    continue
                yield self._result(pending.pop(finished), reply, sampling, stop)
        finally:
            if self._sidecar is not None:
                self._sidecar.forget(list(sent))

    def _next_reply(
        self,
        pending: Mapping[int, GenerationRequest],
        sent: dict[int, int],
        sampling: SamplingParams,
        stop: StopCondition,
    ) -> tuple[int, dict[str, Any]]:
        """The leader's work: send the requests not sent yet, and wait for the next response."""
        sidecar = self._running()
        underway = set(sent.values())
        for request in pending.values():
            if request.request_id not in underway:
                number = sidecar.send("generate", **_generate_arguments(request, sampling, stop))
                sent[number] = request.request_id
        number, reply = sidecar.wait(list(sent), self._settings.request_seconds)
        return sent.pop(number), reply

    def _result(
        self, request: GenerationRequest, reply: dict[str, Any], sampling: SamplingParams, stop: StopCondition
    ) -> GenerationResult:
        """Turn a reply into a `GenerationResult`.

        TensorRT-LLM knows only the stop tokens: a response is cut after a stop string here.
        """
        tokens, logprobs = reply["token_ids"], reply["logprobs"]
        invalid = [token for token in tokens if not 0 <= token < self._vocab_limit]
        if invalid:
            raise RuntimeError(
                f"request {request.request_id}: TensorRT-LLM generated token id {invalid[0]}, outside the vocabulary "
                f"of {self._vocab_limit}"
            )
        length, reason = _end_of_response(tokens, stop, request.limit(sampling))
        if reason is None:
            raise RuntimeError(
                f"request {request.request_id}: TensorRT-LLM stopped after {len(tokens)} of max_new_tokens="
                f"{request.limit(sampling)} tokens without a stop token or string"
            )
        if not all(map(math.isfinite, logprobs[:length])):
            raise NonFiniteError(f"request {request.request_id}: TensorRT-LLM gave log-probs that are not finite")
        self._statistics.generated_tokens += length
        self._statistics.prefill_tokens += len(request.prompt_token_ids)
        return GenerationResult(
            request.request_id,
            request.prompt_token_ids,
            tokens[:length],
            logprobs[:length],
            reason,
            self._weight_version,
        )

    # ---- the sidecar ------------------------------------------------------------------------

    def _start(self) -> None:
        """Start a sidecar, with dummy weights."""
        try:
            reply = self._on_leader(self._launch)
        except (SidecarLost, SidecarError):
            self._end(grace_seconds=0.0)
            raise
        if sorted(reply["devices"]) != sorted(self._settings.device_uuids):
            raise RuntimeError(
                f"the TensorRT-LLM sidecar runs on {sorted(reply['devices'])}, the ranks of its group on "
                f"{sorted(self._settings.device_uuids)}: weights can be handed over on the same GPUs only"
            )
        logger.info("TensorRT-LLM %s runs in a sidecar on %s", reply["version"], reply["devices"])
        self._num_compilations += 1  # one for `build`, and one for each restart
        self._cache_asleep = False

    def _launch(self) -> dict[str, Any]:
        """The leader's work of `_start`."""
        settings, a = self._settings, self._architecture
        self._sidecar = sidecar = Sidecar(settings.python, settings.environment, settings.ping_seconds)
        model = sidecar.folder / "model"
        model.mkdir()
        (model / "config.json").write_text(self._config)
        return sidecar.call(
            "start",
            settings.start_seconds,
            check_health=False,
            model=str(model),
            dtype=str(self._dtype).removeprefix("torch."),
            tensor_parallel_size=self._group.tensor_parallel.size,
            max_batch_size=self._num_slots,
            max_seq_len=self._max_sequence_length,
            vocab_size=a.vocab_size,
            vocab_limit=self._vocab_limit,
            kv_cache_memory_fraction=settings.kv_cache_memory_fraction,
            sleep=settings.sleep,
        )

    def _push(self, weights: WeightStream) -> None:
        """Send all buckets, then end the refit. A bucket lives until every worker has read it."""
        uuid = self._settings.device_uuids[self._group.tensor_parallel.rank]
        for bucket in buckets(checked(weights, self._shapes), self._settings.bucket_bytes):
            copies = [(name, tensor.detach().clone()) for name, tensor in bucket]  # see `ipc_handles`
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # another process reads them
            handles = dict(self._group.gather((uuid, self._make_handles(copies))))
            self._call("weights", handles=handles)
            del copies
        self._call("finish_weights")
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        if self._cache_asleep:
            self._call("resume", what=["kv_cache"])
            self._cache_asleep = False

    def _recover(self, lost: SidecarLost) -> None:
        """Replace a sidecar lost during generation by another one with the same weights, or raise ``lost``."""
        version, self._weight_version = self._weight_version, NO_WEIGHTS
        if self._recover_weights is None:
            raise lost
        self._restart(lost)
        self._push(self._recover_weights())
        self._weight_version = version

    def _restart(self, why: SidecarLost | str) -> None:
        """Start another sidecar, without weights. Raises SidecarLost after ``max_restarts`` restarts."""
        self._weight_version = NO_WEIGHTS
        self._end(grace_seconds=0.0)
        if self._restarts >= self._settings.max_restarts:
            raise SidecarLost(
                f"{why}\nThe TensorRT-LLM sidecar has been restarted {self._restarts} times, which is "
                "trainer.ppo.trt_llm.max_restarts: find out why it fails, then continue from the last checkpoint"
            )
        self._restarts += 1
        logger.warning("%s\nRestarting the sidecar (%d of %d)", why, self._restarts, self._settings.max_restarts)
        self._start()

    def _end(self, **options: float) -> None:
        if self._sidecar is not None:
            self._sidecar.stop(**options)
            self._sidecar = None

    def _call(self, command: str, **arguments: Any) -> None:
        """Execute a command of a refit, `unload` or `reload` from the leader."""
        self._on_leader(lambda: self._running().call(command, self._settings.refit_seconds, **arguments))

    def _running(self) -> Sidecar:
        if self._sidecar is None:
            raise SidecarLost("there is no TensorRT-LLM sidecar running")
        return self._sidecar

    def _on_leader(self, work: Callable[[], _T]) -> _T:
        """Do ``work`` on the leader; every rank of the group gets its result or raises its error."""
        outcome: tuple[str, Any] | None = None
        if self._group.is_leader:
            try:
                outcome = ("result", work())
            except SidecarLost as error:
                outcome = ("lost", str(error))
            except SidecarError as error:
                outcome = ("error", str(error))
            except OSError as error:  # a full disk, say
                outcome = ("error", f"TensorRT-LLM sidecar: {error}")
        kind, value = self._group.share(outcome)
        if kind == "lost":
            raise SidecarLost(value)
        if kind == "error":
            raise SidecarError(value)
        result: _T = value
        return result


def _generate_arguments(request: GenerationRequest, sampling: SamplingParams, stop: StopCondition) -> dict[str, Any]:
    return {
        "prompt_token_ids": request.prompt_token_ids,
        "max_new_tokens": request.limit(sampling),
        "min_new_tokens": sampling.min_new_tokens,
        "stop_ids": list(stop.stop_ids),
        "greedy": sampling.use_greedy,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": request_key(sampling.seed, request.seed) & ((1 << 62) - 1),
    }


def _end_of_response(tokens: list[int], stop: StopCondition, limit: int) -> tuple[int, FinishReason | None]:
    """Number of tokens up to the one that ends the response, included, and why it does; all and None if none does."""
    grown: list[int] = []
    for token in tokens:
        grown.append(token)
        if reason := stop.check(grown, limit):
            return len(grown), reason
    return len(grown), None


def _with_tensors_apart(architecture: ModelArchitecture) -> ModelArchitecture:
    """The same model in a family that does not fuse tensors: refits bring them one by one.

    Raises:
        ValueError: there is no such family.
    """
    if not FAMILIES[hf_family(architecture)].fused:
        return architecture
    apart = dataclasses.replace(architecture, family="llama")
    if FAMILIES[hf_family(apart)].fused:
        raise ValueError(
            "TensorRT-LLM cannot be used for Phi models of which part of each head is rotated: use "
            "trainer.ppo.generation.engine=embedded"
        )
    return apart
