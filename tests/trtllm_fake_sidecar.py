"""A ``tensorrt_llm`` for sidecar tests: stand-ins of the PyTorch backend that behave, in a process of their own.

Its "model" counts: after token t comes (t + step) modulo the vocabulary, where ``step`` is the value that the latest
whole refit gave ``model.norm.weight``. Some first tokens of prompts make trouble, see `TROUBLE`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trtllm_standins import Standins

VOCAB = 96
HANG, DIE, REFUSE, INVALID, FALL_SHORT = TROUBLE = (90, 91, 92, 93, 94)

_PACKAGE = "import trtllm_fake_sidecar\ntrtllm_fake_sidecar.install({version!r})\n"


def make_package(folder: Path, version: str) -> None:
    """Write a package ``tensorrt_llm`` of this version into ``folder``."""
    (folder / "tensorrt_llm").mkdir(parents=True)
    (folder / "tensorrt_llm" / "__init__.py").write_text(_PACKAGE.format(version=version))


def encode_bucket(bucket: list[tuple[str, Any]]) -> str:
    """In place of IPC handles: each tensor's name, shape and first value."""
    values = {name: [list(tensor.shape), float(tensor.flatten()[0])] for name, tensor in bucket}
    return base64.b64encode(json.dumps(values).encode()).decode()


class Backend:
    """What the stand-ins answer. Calls are noted in ``calls.jsonl`` of the directory STANDIN_DIR."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["STANDIN_DIR"])
        self.arriving: dict[str, float] = {}
        self.weights: dict[str, float] | None = None
        self.asleep: set[str] = set()
        self.paused = False
        documented, older = "tensorrt_llm.llmapi:AsyncLLM", "tensorrt_llm._torch.async_llm:AsyncLLM"
        self.standins = Standins(
            {
                **self.engine(documented),
                **self.engine(older),
                f"{documented}.get_memory_status": self.memory_status,
                "tensorrt_llm.llmapi.rlhf_utils:WorkerExtension.update_weights": self.update_weights,
                "tensorrt_llm.executor.ray.gpu_worker:RayGPUWorker.report_device_id": lambda instance: os.environ[
                    "STANDIN_DEVICES"
                ],
            },
        )

    def engine(self, prefix: str) -> dict[str, Any]:
        """What an ``AsyncLLM`` answers."""
        return {
            f"{prefix}": lambda **options: self.note("AsyncLLM", options | {"class": prefix}),
            f"{prefix}.collective_rpc": self.collective_rpc,
            f"{prefix}.release": self.release,
            f"{prefix}.resume": self.resume,
            f"{prefix}.generate_async": self.generate,
            f"{prefix}.pause_generation": lambda instance: self.pause(True),
            f"{prefix}.resume_generation": lambda instance: self.pause(False),
            f"{prefix}.shutdown": lambda instance: self.note("shutdown", {}),
        }

    def note(self, what: str, arguments: dict[str, Any]) -> None:
        plain = {name: value if _is_plain(value) else vars_of(value) for name, value in arguments.items()}
        plain.pop("instance", None)
        with (self.folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps([what, plain]) + "\n")

    async def collective_rpc(self, instance: Any, method: str, args: tuple[Any, ...] = (), **others: Any) -> list[Any]:
        modules = self.standins.modules
        worker: Any = modules["tensorrt_llm.llmapi.rlhf_utils"].WorkerExtension  # type: ignore[attr-defined]
        if method == "report_device_id":
            worker = modules["tensorrt_llm.executor.ray.gpu_worker"].RayGPUWorker  # type: ignore[attr-defined]
        result = getattr(worker, method)(object(), *args)
        return result.split(",") if isinstance(result, str) else [result]

    def update_weights(self, instance: Any, ipc_handles: dict[str, str] | None) -> None:
        if ipc_handles is None:
            self.note("finish", {"names": sorted(self.arriving)})
            self.weights, self.arriving = self.arriving, {}
            return
        if sorted(ipc_handles) != sorted(os.environ["STANDIN_DEVICES"].split(",")):
            raise ValueError(f"Device UUIDs {sorted(ipc_handles)}")
        decoded = [json.loads(base64.b64decode(text)) for text in ipc_handles.values()]
        assert all(bucket == decoded[0] for bucket in decoded)
        self.note("bucket", {"names": list(decoded[0])})
        self.arriving |= {name: value for name, (_, value) in decoded[0].items()}

    async def release(self, instance: Any, tags: list[str]) -> None:
        self.note("release", {"tags": tags})
        self.asleep |= set(tags)
        self.weights = None

    async def resume(self, instance: Any, tags: list[str]) -> None:
        self.note("resume", {"tags": tags})
        self.asleep -= set(tags)

    def pause(self, paused: bool) -> None:
        self.note("pause" if paused else "resume_generation", {})
        self.paused = paused

    async def memory_status(self, instance: Any) -> Any:
        """Of a version that forgets to release, where STANDIN_RELEASES is 0."""
        parked = self.asleep if os.environ.get("STANDIN_RELEASES") != "0" else set()
        tags = [SimpleNamespace(value=tag) for tag in sorted(parked)]
        return SimpleNamespace(state="parked" if parked else "running", parked_tags=tags)

    async def generate(self, instance: Any, inputs: list[int], sampling_params: Any) -> Any:
        self.note("generate", {"inputs": inputs, "sampling": sampling_params})
        if self.paused:
            raise RuntimeError("AsyncLLM is paused")
        # Responses overtake each other.
        await asyncio.sleep(0.002 * (inputs[0] % 7))
        self.trouble(inputs[0])
        if self.weights is None or self.asleep:
            raise RuntimeError(f"generation without weights, asleep: {self.asleep}")
        step, tokens, last = round(self.weights["model.norm.weight"]), [], inputs[-1]
        length = 1 if inputs[0] == FALL_SHORT else sampling_params.max_tokens
        while len(tokens) < length:
            last = (last + step) % VOCAB
            while sampling_params.embedding_bias is not None and sampling_params.embedding_bias[last] < -1e8:
                last = (last + 1) % VOCAB
            tokens.append(5000 if inputs[0] == INVALID else last)
            if last in (sampling_params.stop_token_ids or ()):
                break
        logprobs = [{token: SimpleNamespace(logprob=-0.5), 0: SimpleNamespace(logprob=-9.0)} for token in tokens]
        for entry, token in zip(logprobs, tokens):  # noqa: B905 (the sidecar's python may be older)
            entry[token] = SimpleNamespace(logprob=-token / 100)
        reason = "stop" if last in (sampling_params.stop_token_ids or ()) else "length"
        completion = SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)
        return SimpleNamespace(outputs=[completion])

    def trouble(self, first: int) -> None:
        if first == HANG:
            time.sleep(3600)  # the event loop is blocked
        if first == DIE:
            print("about to die", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if first == REFUSE:
            raise ValueError("no such prompt, please")


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | list | dict | tuple | None)


def vars_of(value: Any) -> Any:
    """An object's attributes, where JSON can have them."""
    if not hasattr(value, "__dict__"):
        return repr(value)
    return {
        name: inner if _is_plain(inner) and not isinstance(inner, dict) else str(inner)
        for name, inner in vars(value).items()
    }


def install(version: str) -> None:
    """Become ``tensorrt_llm``."""
    backend = Backend()
    module: Any = backend.standins.modules["tensorrt_llm"]
    module.__version__ = version
    if version.startswith("1.4"):
        del module._torch
        backend.standins.modules.pop("tensorrt_llm._torch.async_llm")
    else:
        del module.llmapi.AsyncLLM
    if version.startswith(("1.2", "1.3.0rc5")):
        del module.llmapi.llm_args.ExecutorMemoryType  # it was elsewhere
        del module.llmapi.SleepConfig
        del module._torch.async_llm.AsyncLLM.pause_generation
        del module._torch.async_llm.AsyncLLM.resume_generation
    for name in filter(None, os.environ.get("STANDIN_LACKS", "").split(",")):
        delattr(module.llmapi.AsyncLLM if version.startswith("1.4") else module._torch.async_llm.AsyncLLM, name)
    sys.modules.update(backend.standins.modules)
