"""TensorRT-LLM: its ``AsyncLLM`` in a sidecar process, with the weights handed over through CUDA IPC."""

from __future__ import annotations

import base64
import dataclasses
import json
import logging
import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch.multiprocessing.reductions import reduce_tensor

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import (
    FinishReason,
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
    StopCondition,
    WeightStream,
)
from nemo_style_aligner.engine.sampling import request_key
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.trtllm.sidecar.process import Sidecar, SidecarError
from nemo_style_aligner.engine.weights.huggingface_config import FAMILIES, hf_config, hf_family
from nemo_style_aligner.engine.weights.layout import checked_stream, hf_tensors, weight_layout
from nemo_style_aligner.errors import NonFiniteError

logger = logging.getLogger(__name__)

Bucket = list[tuple[str, torch.Tensor]]

_T = TypeVar("_T")
_HANDLE = 7  # which of the arguments of torch's `rebuild_cuda_tensor` is the memory's handle
_HANDLE_BYTES = 64  # of CUDA's own handle


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
    start_seconds: float
    refit_seconds: float
    request_seconds: float


class SidecarEngine(GenerationEngine):
    """Generates in a sidecar that belongs to the first rank of a tensor-parallel group.

    The ranks of the group call every method together and pass the same requests in the same order; each provides the
    handles of the weights on its own GPU. A sidecar that dies, hangs or reports an error is a SidecarError on each.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        settings: SidecarSettings,
        *,
        dtype: torch.dtype,
        group: EngineGroup | None = None,
        make_handles: Callable[[Bucket], str] | None = None,
        **options: Any,
    ) -> None:
        """Describe the engine; `build` starts it.

        Args:
            architecture: the model's shape.
            settings: of the sidecar.
            dtype: of the weights.
            group: the ranks that share the sidecar.
            make_handles: encodes a bucket for TensorRT-LLM's workers; None: `ipc_handles`.
            options: those common to all engines, see `GenerationEngine`.

        Raises:
            ValueError: Hugging Face, and so TensorRT-LLM, has no such model.
        """
        super().__init__(architecture.vocab_size, **options)
        self._architecture = architecture
        # Raises, if at all, on every rank alike.
        self._config = json.dumps(hf_config(_with_tensors_apart(architecture), dtype), indent=2)
        self._settings = settings
        self._dtype = dtype
        self._group = group or EngineGroup()
        self._make_handles = make_handles or ipc_handles
        self._shapes = {name: tensor.shape for name, tensor in hf_tensors(weight_layout(architecture)).items()}
        self._sidecar: Sidecar | None = None  # on the leader only
        self._cache_asleep = False

    # ---- life cycle -------------------------------------------------------------------------

    def _build(self) -> None:
        """Start the sidecar, with dummy weights, and let it compile and capture."""
        try:
            reply = self._on_leader(self._launch)
        except SidecarError:
            self.close()
            raise
        if sorted(reply["devices"]) != sorted(self._settings.device_uuids):
            raise RuntimeError(
                f"the TensorRT-LLM sidecar runs on {sorted(reply['devices'])}, the ranks of its group on "
                f"{sorted(self._settings.device_uuids)}: weights can be handed over on the same GPUs only"
            )
        logger.info("TensorRT-LLM %s runs in a sidecar on %s", reply["version"], reply["devices"])
        self._num_compilations = 1

    def _launch(self) -> dict[str, Any]:
        """The leader's work of `_build`."""
        settings, a = self._settings, self._architecture
        self._sidecar = sidecar = Sidecar(settings.python, settings.environment)
        model = sidecar.folder / "model"
        model.mkdir()
        (model / "config.json").write_text(self._config)
        return sidecar.call(
            "start",
            settings.start_seconds,
            model=str(model),
            dtype=str(self._dtype).removeprefix("torch."),
            tensor_parallel_size=self._group.tensor_parallel.size,
            max_batch_size=self._num_slots,
            max_seq_len=self.max_sequence_length,
            vocab_size=a.vocab_size,
            vocab_limit=self._vocab_limit,
            kv_cache_memory_fraction=settings.kv_cache_memory_fraction,
            sleep=settings.sleep,
        )

    def _refit(self, weights: WeightStream) -> None:
        """Send all buckets, then end the refit. A bucket lives until every worker has read it."""
        uuid = self._settings.device_uuids[self._group.tensor_parallel.rank]
        for bucket in buckets(checked_stream(weights, self._shapes), self._settings.bucket_bytes):
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # another process reads them
            handles = dict(self._group.gather((uuid, self._make_handles(bucket))))
            self._call("weights", handles=handles)
            del bucket  # before the next one is made
        self._call("finish_weights")
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        if self._cache_asleep:
            self._call("resume", what=["kv_cache"])
            self._cache_asleep = False

    def _unload(self) -> None:
        self._call("release", what=["weights", "kv_cache"])
        self._cache_asleep = True

    def _reload(self) -> None:
        """Allocate the weights' memory again; that of the KV cache follows after the refit."""
        self._call("resume", what=["weights"])

    def close(self) -> None:
        """End the sidecar. Without this it ends with this process."""
        if self._sidecar is not None:
            self._sidecar.stop()
            self._sidecar = None
        self._built = self._loaded = False

    def _check(self, request: GenerationRequest, sampling: SamplingParams) -> None:
        super()._check(request, sampling)
        if unknown := dict(sampling.filters).keys() - {"top_k", "top_p", "repetition_penalty"}:
            raise ValueError(
                f"{', '.join(sorted(unknown))}: not with TensorRT-LLM; leave it out, or use engine=embedded"
            )

    # ---- generation -------------------------------------------------------------------------

    def _generate(
        self, requests: Iterator[GenerationRequest], sampling: SamplingParams, stop: StopCondition
    ) -> Iterator[GenerationResult]:
        pending: dict[int, GenerationRequest] = {}  # by request id, the same on every rank of the group
        sent: dict[int, int] = {}  # message number -> request id; on the leader only
        while True:
            # Every rank of the group pulls when the leader does, so that their sources of requests stay in step.
            while len(pending) < self._num_slots and (request := next(requests, None)) is not None:
                self._check(request, sampling)
                pending[request.request_id] = request
            if not pending:
                return
            finished, reply = self._on_leader(lambda: self._next_reply(pending, sent, sampling, stop))
            yield self._result(pending.pop(finished), reply, sampling, stop)

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

    def _call(self, command: str, **arguments: Any) -> None:
        """Execute a command of a refit, `unload` or `reload` from the leader."""
        self._on_leader(lambda: self._running().call(command, self._settings.refit_seconds, **arguments))

    def _running(self) -> Sidecar:
        if self._sidecar is None:
            raise SidecarError("there is no TensorRT-LLM sidecar running")
        return self._sidecar

    def _on_leader(self, work: Callable[[], _T]) -> _T:
        """Do ``work`` on the leader; every rank of the group gets its result or raises its error."""
        result, error = None, None
        if self._group.is_leader:
            try:
                result = work()
            except SidecarError as failed:
                error = str(failed)
            except OSError as failed:  # a full disk, say
                error = f"TensorRT-LLM sidecar: {failed}"
        result, error = self._group.share((result, error))
        if error is not None:
            raise SidecarError(error)
        return cast(_T, result)


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


_TOLD = ("normalization", "activation", "gated", "bias", "qkv_bias", "qk_layernorm")  # to TensorRT-LLM, of a model


def _with_tensors_apart(architecture: ModelArchitecture) -> ModelArchitecture:
    """The same model in a family that does not fuse tensors: refits bring them one by one.

    Raises:
        ValueError: there is no such family, or TensorRT-LLM is not told of a feature of the model, or has another
            formula for it.
    """
    a = architecture
    features = {
        f"rope_type={a.rope_scaling.rope_type}" if a.rope_scaling else "": a.rope_scaling is not None
        and a.rope_scaling.rope_type != "llama3",
    }
    if untold := [*(name for name, has in features.items() if has), *a.unknown(_TOLD)]:
        raise ValueError(
            f"TensorRT-LLM cannot be used for models with {' and '.join(untold)}: use "
            "trainer.ppo.generation.engine=embedded"
        )
    if not FAMILIES[hf_family(architecture)].fused:
        return architecture
    apart = dataclasses.replace(architecture, family="llama")
    if FAMILIES[hf_family(apart)].fused:
        raise ValueError(
            "TensorRT-LLM cannot be used for Phi models of which part of each head is rotated: use "
            "trainer.ppo.generation.engine=embedded"
        )
    return apart


# ---- weights for another process -----------------------------------------------------------------


def buckets(weights: WeightStream, most_bytes: int) -> Iterator[Bucket]:
    """Copy a stream, in order, in runs of at most ``most_bytes``; a larger tensor gets a bucket of its own."""
    bucket: Bucket = []
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.detach().clone()))
        size += tensor.nbytes
    if bucket:
        yield bucket


def ipc_handles(bucket: Bucket) -> str:
    """Encode, as TensorRT-LLM reads them, the handles by which another process on this GPU maps the bucket's tensors.

    The encoding is base64 of a pickled list of (name, (function, arguments)); TensorRT-LLM's workers unpickle it with
    a restricted unpickler. The tensors must stay alive until they have been read there.

    Pass copies, and drop them afterwards: each time a tensor is shared, torch wraps its storage once more, and it
    frees the wrappers only with the storage itself, which for a model's parameters is never.
    """
    handles = [(name, _of_any_version(*reduce_tensor(tensor.detach()))) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(handles)).decode("ascii")


def _of_any_version(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A tensor's handle in the form that all versions of torch read: CUDA's own, without torch's two bytes before it.

    The first of these is a version, the second the kind of memory. torch refuses versions that it does not know: the
    torch 2.11 of TensorRT-LLM 1.3 refuses torch 2.13's, whose handles are the same otherwise.
    """
    handle = arguments[_HANDLE]
    if len(handle) == 2 + _HANDLE_BYTES and handle[1:2] == b"c":  # by cudaMalloc
        arguments = (*arguments[:_HANDLE], handle[2:], *arguments[_HANDLE + 1 :])
    return function, arguments
