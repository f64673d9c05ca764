"""TensorRT-LLM's PyTorch backend in a process of its own: the program that the sidecar's python runs.

It stands alone: beside the standard library it needs TensorRT-LLM and its torch, nothing of this project. The parent
talks to it over an inherited socket, one frame per message: four bytes of length (big endian), then JSON. Requests
are ``{"id", "do", ...}``, replies ``{"id", "ok"}`` or ``{"id", "error"}``, in any order. When the socket closes,
because the parent wants it or is gone, the process ends.

usage: python trtllm_sidecar.py FILE_DESCRIPTOR
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import signal
import socket
import struct
import sys
from typing import Any

LENGTH = struct.Struct(">I")
MOST_BYTES = 1 << 30  # of one frame; weight handles are kilobytes per tensor

_PR_SET_PDEATHSIG = 1
_SHUTDOWN_SECONDS = 30.0
_NEVER = -1e9  # added to a logit: as good as minus infinity, and finite in every dtype that holds logits
_DISABLED_ID = -1
_LEAST_NUM_TOKENS = 8192  # TensorRT-LLM's default
_METHODS = ("setup_async", "collective_rpc", "generate_async", "shutdown")  # of AsyncLLM, called in every run
_SLEEP_METHODS = ("release", "resume")


def encode(message: dict[str, Any]) -> bytes:
    """A message as a frame. Raises ValueError if it is too large."""
    body = json.dumps(message).encode()
    if len(body) > MOST_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is above the limit of {MOST_BYTES}")
    return LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Bytes of the JSON that follows ``header``. Raises ValueError if that is above the limit."""
    (length,) = LENGTH.unpack(header)
    if length > MOST_BYTES:
        raise ValueError(f"a frame of {length} bytes is above the limit of {MOST_BYTES}: the stream is broken")
    return int(length)


class Service:
    """The sidecar's commands, one method each, on one ``AsyncLLM``."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._sleep = False
        self._paused = False
        self._vocab_size = 0
        self._vocab_limit = 0

    async def start(
        self,
        *,
        model: str,
        dtype: str,
        tensor_parallel_size: int,
        max_batch_size: int,
        max_seq_len: int,
        vocab_size: int,
        vocab_limit: int,
        kv_cache_memory_fraction: float,
        sleep: bool,
    ) -> dict[str, Any]:
        """Load, compile and capture, with dummy weights.

        Args:
            model: directory with a Hugging Face config.json.
            dtype: of weights and KV cache.
            tensor_parallel_size: number of GPUs; the visible ones are used, in their order.
            max_batch_size, max_seq_len: the most sequences at a time, and the most tokens of each.
            vocab_size, vocab_limit: the model's vocabulary; ids from the limit on are never sampled.
            kv_cache_memory_fraction: of the free GPU memory.
            sleep: whether memory will be released and taken again.

        Returns:
            TensorRT-LLM's version and the UUIDs of its GPUs.

        Raises:
            RuntimeError: this version lacks a method that will be called.
        """
        import tensorrt_llm
        from tensorrt_llm.llmapi import KvCacheConfig

        engine = async_llm()
        needed = (*_METHODS, *(_SLEEP_METHODS if sleep else ()))
        if lacking := [name for name in needed if not callable(getattr(engine, name, None))]:
            raise RuntimeError(
                f"AsyncLLM of TensorRT-LLM {tensorrt_llm.__version__} has no {', '.join(lacking)}: install a version "
                "that docs/tensorrt_llm.md names"
            )
        options = _sleep_options() if sleep else {}
        self._llm = engine(
            model=model,
            backend="pytorch",
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=dtype,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=1,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            max_num_tokens=max(_LEAST_NUM_TOKENS, max_seq_len),  # in one forward pass: any prompt fits
            # Prefixes are not reused between steps: a refit resets the cache.
            kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=kv_cache_memory_fraction),
            ray_worker_extension_cls="tensorrt_llm.llmapi.rlhf_utils.WorkerExtension",
            allreduce_strategy="NCCL",
            **options,
        )
        await self._llm.setup_async()
        self._sleep = sleep
        self._vocab_size = vocab_size
        self._vocab_limit = vocab_limit
        devices = await self._llm.collective_rpc("report_device_id")
        return {"version": str(tensorrt_llm.__version__), "devices": [str(device) for device in devices]}

    async def weights(self, *, handles: dict[str, str]) -> dict[str, Any]:
        """Load a bucket. ``handles``: by GPU UUID, those of the same full tensors, in TensorRT-LLM's encoding."""
        await self._pause()
        await self._llm.collective_rpc("update_weights", args=(handles,))
        return {}

    async def finish_weights(self) -> dict[str, Any]:
        """After the last bucket, renew what TensorRT-LLM derives from weights and empty the prefix cache."""
        await self._llm.collective_rpc("update_weights", args=(None,))
        if self._paused:
            await self._llm.resume_generation()
            self._paused = False
        return {}

    async def release(self, *, what: list[str]) -> dict[str, Any]:
        """Release GPU memory: ``weights``, ``kv_cache`` or both.

        The prefix cache is emptied by `finish_weights`, which must follow before the next request. To empty it here,
        too, would take an RPC that TensorRT-LLM 1.2 does not have.
        """
        await self._pause()
        tags = self._tags(what)
        await self._llm.release(tags)
        await self._check_parked(tags, True)
        return {}

    async def resume(self, *, what: list[str]) -> dict[str, Any]:
        """Allocate the memory again. Weights come back without their values."""
        tags = self._tags(what)
        await self._llm.resume(tags)
        await self._check_parked(tags, False)
        return {}

    async def generate(
        self,
        *,
        prompt_token_ids: list[int],
        max_new_tokens: int,
        min_new_tokens: int,
        stop_ids: list[int],
        greedy: bool,
        temperature: float,
        top_k: int,
        top_p: float,
        repetition_penalty: float,
        seed: int,
    ) -> dict[str, Any]:
        """One response: its tokens with the stop token, and their log-probs.

        Up to the minimum length the stop tokens are held back by a bias on their logits: TensorRT-LLM's own minimum
        length applies only to the end id, which is disabled because it would not be counted as a token.
        """
        from tensorrt_llm.llmapi import SamplingParams

        tokens: list[int] = []
        logprobs: list[float] = []
        phases = [(min_new_tokens, True), (max_new_tokens - min_new_tokens, False)]
        for length, hold_back in phases:
            if length == 0:
                continue
            sampling = SamplingParams(
                end_id=_DISABLED_ID,
                pad_id=_DISABLED_ID,
                max_tokens=length,
                stop_token_ids=stop_ids if stop_ids and not hold_back else None,
                include_stop_str_in_output=True,
                detokenize=False,
                # Always given: without temperature, top_k and top_p TensorRT-LLM decodes greedily.
                temperature=1.0 if greedy else temperature,
                top_k=1 if greedy else top_k,
                top_p=1.0 if greedy else top_p,
                repetition_penalty=repetition_penalty,
                seed=seed,
                embedding_bias=self._bias(stop_ids if hold_back else []),
                logprobs=1,
            )
            output = await self._llm.generate_async(inputs=prompt_token_ids + tokens, sampling_params=sampling)
            completion = output.outputs[0]
            if completion.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"TensorRT-LLM ended a response with finish_reason={completion.finish_reason!r}")
            new = list(completion.token_ids)
            logprobs += _logprobs(new, completion.logprobs)
            tokens += new
            seed += 1  # the second phase must not repeat the first one's draws
        return {"token_ids": tokens, "logprobs": logprobs}

    def shutdown(self) -> None:
        """End the workers."""
        if self._llm is not None:
            self._llm.shutdown()

    async def _pause(self) -> None:
        """End what abandoned requests still compute, before weights change or go, until `finish_weights`.

        Versions that cannot pause finish such requests beside the refit, and nobody waits for their answers.
        """
        if not self._paused and hasattr(self._llm, "pause_generation"):
            await self._llm.pause_generation()
            self._paused = True

    async def _check_parked(self, tags: list[str], parked: bool) -> None:
        """Compare with what TensorRT-LLM reports of its memory, in versions that report it."""
        if not hasattr(self._llm, "get_memory_status"):
            return
        status = await self._llm.get_memory_status()
        found = {str(tag.value) for tag in status.parked_tags}
        if status.state == "failed" or any((tag in found) != parked for tag in tags):
            raise RuntimeError(
                f"TensorRT-LLM was to {'release' if parked else 'resume'} the memory of {tags}, and reports the state "
                f"{status.state!r} with {sorted(found)} released"
            )

    def _bias(self, held_back: list[int]) -> Any:
        """Bias on the logits, float32 [vocabulary], that rules ids out; None if every id is possible."""
        if not held_back and self._vocab_limit >= self._vocab_size:
            return None
        import torch

        bias = torch.zeros(self._vocab_size, dtype=torch.float32)
        bias[self._vocab_limit :] = _NEVER
        bias[torch.tensor(held_back, dtype=torch.int64)] = _NEVER
        return bias

    def _tags(self, what: list[str]) -> list[str]:
        """TensorRT-LLM's memory tags for ``what``; which tags exist depends on its version."""
        if not self._sleep:
            raise RuntimeError("the sidecar was started without trainer.ppo.trt_llm.unload_engine_train")
        known = {tag.value for tag in _memory_types()}
        wanted = {"weights": ("model", "model_weights"), "kv_cache": ("kv_cache",)}
        return [tag for group in what for tag in wanted[group] if tag in known]


def async_llm() -> Any:
    """The class ``AsyncLLM``, where its documentation has it, or where versions before 1.4 have it."""
    try:
        from tensorrt_llm.llmapi import AsyncLLM
    except ImportError:
        from tensorrt_llm._torch.async_llm import AsyncLLM
    return AsyncLLM


def _memory_types() -> Any:
    """TensorRT-LLM's ``ExecutorMemoryType``, which has moved between versions."""
    try:
        from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType
    except ImportError:
        from tensorrt_llm._torch.virtual_memory import ExecutorMemoryType
    return ExecutorMemoryType


def _sleep_options() -> dict[str, Any]:
    """The `AsyncLLM` options by which TensorRT-LLM learns that its memory will be released."""
    try:
        from tensorrt_llm.llmapi import SleepConfig
    except ImportError:  # 1.2 and the first release candidates of 1.3, which cannot have both sleep and CUDA graphs
        return {"enable_sleep": True, "cuda_graph_config": None}

    types = _memory_types()
    # No copies on the host: a refit follows every `resume`.
    modes = {types.MODEL_WEIGHTS_MAIN: "NONE", types.KV_CACHE: "NONE"}
    return {"sleep_config": SleepConfig(restore_modes=modes)}


def _logprobs(tokens: list[int], found: Any) -> list[float]:
    """One log-prob per token, from TensorRT-LLM's list of floats or of dicts by token id (sampled and best token)."""
    if found is None or len(found) != len(tokens):
        raise RuntimeError(f"TensorRT-LLM gave {0 if found is None else len(found)} log-probs for {len(tokens)} tokens")
    values = []
    for token, at in zip(tokens, found):  # noqa: B905 (this python may be older than zip's strict)
        if isinstance(at, dict) and token not in at:
            raise RuntimeError(f"TensorRT-LLM gave log-probs of {sorted(at)}, and not of {token}, which it sampled")
        values.append(float(at[token].logprob if isinstance(at, dict) else at))
    return values


async def serve(connection: socket.socket) -> None:
    """Answer until the parent closes the connection."""
    reader, writer = await asyncio.open_connection(sock=connection)
    service = Service()
    running: set[asyncio.Task[None]] = set()
    try:
        while True:
            try:
                length = frame_length(await reader.readexactly(LENGTH.size))
                message = json.loads(await reader.readexactly(length))
            except asyncio.IncompleteReadError:
                return
            task = asyncio.ensure_future(_answer(service, message, writer))
            running.add(task)
            task.add_done_callback(running.discard)
    finally:
        for task in running:
            task.cancel()
        signal.alarm(int(_SHUTDOWN_SECONDS))  # ends the process if the shutdown hangs
        service.shutdown()


async def _answer(service: Service, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    number, command = message.pop("id"), message.pop("do")
    try:
        if command not in ("start", "weights", "finish_weights", "release", "resume", "generate"):
            raise ValueError(f"no such command: {command!r}")
        reply = {"id": number, "ok": await getattr(service, command)(**message)}
    except Exception as error:  # noqa: BLE001 (of whatever kind, the parent is told, and raises it)
        reply = {"id": number, "error": f"{type(error).__name__}: {error}"}
    writer.write(encode(reply))
    await writer.drain()


def main() -> None:
    """Entry point."""
    if sys.platform.startswith("linux"):  # end with the parent even if the event loop is blocked
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # the workers must not inherit it
    asyncio.run(serve(connection))


if __name__ == "__main__":
    main()
