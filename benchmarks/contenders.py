"""The engines that `generation.py` compares, each behind the same three methods.

Each runs in a process of its own, so an import that fails, a crash or a thread pool stays there. All decode
greedily and all produce exactly the tokens asked for: end-of-sequence tokens end nothing.
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import importlib.util
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import torch
from common import computes_in_bf16, versions
from model_files import ModelFiles

from nemo_style_aligner.engine.contract import GenerationEngine, GenerationRequest, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.groups import set_up_cuda_arithmetic


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests that arrive together.

    Attributes:
        name: for the tables.
        prompts: their tokens.
        lengths: how many tokens to generate for each.
    """

    name: str
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def is_uniform(self) -> bool:
        """Whether all responses have the same length."""
        return len(set(self.lengths)) == 1

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together, at most."""
        return max(map(len, self.prompts)) + max(self.lengths)

    def cut(self, new_tokens: int, prompt_tokens: int | None = None) -> Workload:
        """The same requests with responses, and prompts, of at most so many tokens."""
        return dataclasses.replace(
            self,
            prompts=[prompt[:prompt_tokens] for prompt in self.prompts],
            lengths=[min(new_tokens, n) for n in self.lengths],
        )


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a contender runs: a torch device ("cpu" or "cuda") and how many threads it may use."""

    device: str
    threads: int


def faster_dtype(setting: Setting) -> torch.dtype:
    """bf16 where the device computes in it, else fp32: torch would emulate bf16 there."""
    native = setting.device == "cuda" or computes_in_bf16()
    return torch.bfloat16 if native else torch.float32


class Contender(abc.ABC):
    """An engine under test.

    Attributes:
        name: on the command line and in the tables.
        devices: where it can run.
        package: what must be installed for it, by pip's name; None: nothing but this project.
        ragged_only: it differs from another contender on ragged workloads only.
    """

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    package: ClassVar[str | None] = None
    ragged_only: ClassVar[bool] = False

    def __init__(self, files: ModelFiles, setting: Setting) -> None:
        self.files = files
        self.setting = setting
        self.device = torch.device(setting.device)

    @classmethod
    def obstacle(cls, files: ModelFiles, device: str) -> str | None:
        """Why this contender cannot take part, and what would help; None if it can."""
        if device not in cls.devices:
            return f"runs on {' and '.join(cls.devices)} only here"
        if cls.package is not None and importlib.util.find_spec(cls.package.replace("-", "_")) is None:
            # llama-cpp-python is imported as llama_cpp.
            if cls.package == "llama-cpp-python" and importlib.util.find_spec("llama_cpp") is not None:
                return None
            return f"not installed: pip install {cls.package}"
        return None

    @abc.abstractmethod
    def load(self) -> None:
        """Read the model. Not timed."""

    def prepare(self, workload: Workload) -> None:  # noqa: B027 (most have nothing to do here)
        """Do beforehand what depends on the workload's sizes. Not timed."""

    def forget(self) -> None:  # noqa: B027
        """Drop what could be reused from the round before, which had the same prompts. Not timed."""

    @abc.abstractmethod
    def run(self, workload: Workload) -> list[list[int]]:
        """The responses' tokens, in the order of the requests. Timed."""

    def facts(self) -> dict[str, Any]:
        """Versions and settings worth reporting, once the model is there; asked again after each `prepare`."""
        return {}


# ---- this project -------------------------------------------------------------------------------


class OwnEngine(Contender):
    """An engine of this project, with a slot for each request."""

    dtype: torch.dtype = torch.bfloat16
    _engine: GenerationEngine | None = None

    def prepare(self, workload: Workload) -> None:
        """Build an engine of the workload's size: what is built is the same for all rounds, as in training."""
        if self._engine is not None:
            self._engine.unload()
        self._engine = self.make_engine(
            num_slots=len(workload.prompts), max_sequence_length=workload.longest, eos_id=self.files.eos_id
        )
        self._engine.build()
        self.forget()

    def forget(self) -> None:
        """A refit, as before every rollout phase: nothing computed with the weights before it is used again."""
        assert self._engine is not None
        self._engine.refit(self.files.weights(), 0)

    def run(self, workload: Workload) -> list[list[int]]:
        assert self._engine is not None
        sampling = SamplingParams(max_new_tokens=max(workload.lengths), use_greedy=True, ignore_eos=True)
        pairs = zip(workload.prompts, workload.lengths, strict=True)
        requests = [GenerationRequest(i, prompt, max_new_tokens=n) for i, (prompt, n) in enumerate(pairs)]
        responses: list[list[int]] = [[] for _ in requests]
        for result in self._engine.generate(requests, sampling):
            responses[result.request_id] = result.token_ids
        return responses

    @abc.abstractmethod
    def make_engine(self, **options: int) -> GenerationEngine:
        """An engine that is not built yet."""


class Embedded(OwnEngine):
    """The embedded engine."""

    name = "embedded"

    def load(self) -> None:
        """Set CUDA's arithmetic and attention as jobs do; weights come with the refit."""
        set_up_cuda_arithmetic()

    def make_engine(self, **options: int) -> GenerationEngine:
        return EmbeddedEngine(
            self.files.architecture,
            dtype=self.dtype,
            device=self.device,
            lookup_decoding=False,  # every round has the same prompts, and greedily the same responses
            **options,  # type: ignore[arg-type]
        )

    def run(self, workload: Workload) -> list[list[int]]:
        responses = super().run(workload)
        assert self._engine is not None
        computed, expected = self._engine.statistics.prefill_tokens, sum(map(len, workload.prompts))
        if computed < expected:
            raise RuntimeError(f"only {computed} of {expected} prompt tokens were computed: the rest was remembered")
        return responses

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self.dtype).removeprefix("torch.")}


class EmbeddedFp32(Embedded):
    """The embedded engine in fp32: twice the bytes, for processors without bf16 arithmetic."""

    name = "embedded-fp32"
    dtype = torch.float32


# ---- Hugging Face -------------------------------------------------------------------------------


class HuggingFace(Contender):
    """`generate` on a batch padded on the left, with PyTorch's fused attention.

    A batch is as long as its longest response; what the others produce meanwhile is thrown away.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    cache_implementation: ClassVar[str | None] = None

    def load(self) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            self.files.hf, dtype=self.dtype, attn_implementation="sdpa"
        ).to(self.device)
        self.model.eval()

    def run(self, workload: Workload) -> list[list[int]]:
        responses: list[list[int]] = [[] for _ in workload.prompts]
        for rows in self.batches(workload):
            new_tokens = self._generate([workload.prompts[row] for row in rows], max(workload.lengths[r] for r in rows))
            for row, tokens in zip(rows, new_tokens, strict=True):
                responses[row] = tokens[: workload.lengths[row]]
        return responses

    def batches(self, workload: Workload) -> list[list[int]]:
        """Which requests are generated together: all."""
        return [list(range(len(workload.prompts)))]

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        options = {"cache_implementation": self.cache_implementation} if self.cache_implementation else {}
        self.model.generation_config.eos_token_id = None  # nothing ends before its length
        out = self.model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0, **options
        )
        return out[:, width:].tolist()

    def facts(self) -> dict[str, Any]:
        return {"dtype": str(self.dtype).removeprefix("torch."), "attention": "sdpa", **versions("transformers")}


class HuggingFaceBf16(HuggingFace):
    """In bf16."""

    name = "hf-bf16"


class HuggingFaceFp32(HuggingFace):
    """In fp32: faster where the processor has no bf16 arithmetic."""

    name = "hf-fp32"
    devices = ("cpu",)
    dtype = torch.float32


class _InTheBetterDtype(HuggingFace):
    """In bf16 where the device computes in it, else in fp32."""

    def __init__(self, files: ModelFiles, setting: Setting) -> None:
        super().__init__(files, setting)
        self.dtype = faster_dtype(setting)  # type: ignore[misc]


class HuggingFaceSorted(_InTheBetterDtype):
    """Batches of responses of about the same length: an upper bound, since lengths are not known beforehand."""

    name = "hf-sorted"
    ragged_only = True
    batch_size = 16

    def batches(self, workload: Workload) -> list[list[int]]:
        order = sorted(range(len(workload.lengths)), key=lambda row: workload.lengths[row])
        return [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]


class HuggingFaceContinuous(_InTheBetterDtype):
    """transformers' continuous batching, with a manager that stays alive from round to round."""

    name = "hf-continuous"
    page_size = 32
    _manager: Any = None

    @torch.no_grad()
    def prepare(self, workload: Workload) -> None:
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        if self._manager is not None:
            self._manager.stop(block=True)
            self._manager.destroy()
            self.model.destroy_cached_continuous_batching_manager()
        pages = [-(-(len(p) + n) // self.page_size) for p, n in zip(workload.prompts, workload.lengths, strict=True)]
        self._manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(
                max_new_tokens=max(workload.lengths), do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=self.page_size,
                num_blocks=sum(pages) + len(pages),
                max_batch_tokens=2048,
                allow_block_sharing=False,  # the same prompts come in every round: no gain from the round before
            ),
        )
        self._manager.warmup()
        self._manager.start()

    def run(self, workload: Workload) -> list[list[int]]:
        for row, (prompt, length) in enumerate(zip(workload.prompts, workload.lengths, strict=True)):
            self._manager.add_request(prompt, request_id=str(row), max_new_tokens=length, eos_token_id=-1)
        responses: list[list[int]] = [[] for _ in workload.prompts]
        finished = 0
        while finished < len(responses):
            result = self._manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                responses[int(result.request_id)] = list(result.generated_tokens)
                finished += 1
            elif result is None and not self._manager.is_running():
                raise RuntimeError("the generation thread ended")
        return responses

    def facts(self) -> dict[str, Any]:
        """Also what the manager, once there, has chosen: it changes the attention if flash-attn is installed.

        ``cuda_graphs``: for passes with prompts, and for passes that only decode; None if this version does not tell.
        """
        facts = super().facts()
        if self._manager is not None:
            facts["attention"] = getattr(self.model.config, "_attn_implementation", None)
            config = getattr(self._manager, "continuous_batching_config", None)
            facts["cuda_graphs"] = getattr(config, "use_cuda_graph", None)
        return facts


class HuggingFaceCompiled(HuggingFace):
    """`generate` with a static KV cache, for which it compiles the decoding pass (CUDA graphs)."""

    name = "hf-compiled"
    devices = ("cuda",)
    cache_implementation = "static"


# ---- OpenVINO GenAI -----------------------------------------------------------------------------


class OpenVino(Contender):
    """OpenVINO GenAI's continuous batching on a GGUF file; KV cache and arithmetic as it chooses for the processor."""

    devices = ("cpu",)
    package = "openvino-genai"
    quantization: ClassVar[str]
    _pipeline: Any = None

    @classmethod
    def obstacle(cls, files: ModelFiles, device: str) -> str | None:
        if not files.gguf:
            return super().obstacle(files, device) or "the model has no GGUF form (only plain Llama shapes have one)"
        return super().obstacle(files, device)

    def load(self) -> None:
        """The pipeline is made for each workload's size."""

    def prepare(self, workload: Workload) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB: more than any workload here fills on a model of this size
        scheduler.max_num_seqs = len(workload.prompts)
        scheduler.enable_prefix_caching = False  # the same prompts come in every round
        self._pipeline = None
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(self.files.gguf[self.quantization]),
            scheduler,
            "CPU",
            {"INFERENCE_NUM_THREADS": self.setting.threads},
        )

    def run(self, workload: Workload) -> list[list[int]]:
        import openvino

        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in workload.prompts]
        results = self._pipeline.generate(prompts, [self._generation_config(n) for n in workload.lengths])
        return [list(result.m_generation_ids[0]) for result in results]

    def facts(self) -> dict[str, Any]:
        return {"weights": self.quantization, **versions("openvino-genai")}

    @staticmethod
    def _generation_config(new_tokens: int) -> Any:
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        return config


class OpenVinoQ8(OpenVino):
    """8-bit weights: the peer to beat."""

    name = "openvino-q8_0"
    quantization = "Q8_0"


class OpenVinoF16(OpenVino):
    """16-bit weights, computed in bf16 where the processor can, else in fp32."""

    name = "openvino-f16"
    quantization = "F16"


# ---- llama.cpp ----------------------------------------------------------------------------------


class LlamaCpp(Contender):
    """llama.cpp through llama-cpp-python's low-level calls: one batch per pass over all sequences in flight."""

    devices = ("cpu",)
    package = "llama-cpp-python"
    quantization: ClassVar[str]
    prefill_tokens: ClassVar[int] = 2048
    _context: Any = None
    _batch: Any = None

    @classmethod
    def obstacle(cls, files: ModelFiles, device: str) -> str | None:
        if not files.gguf:
            return super().obstacle(files, device) or "the model has no GGUF form (only plain Llama shapes have one)"
        return super().obstacle(files, device)

    def load(self) -> None:
        import llama_cpp

        self._api = llama_cpp
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        path = str(self.files.gguf[self.quantization]).encode()
        self._model = llama_cpp.llama_model_load_from_file(path, parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path.decode()}")

    def prepare(self, workload: Workload) -> None:
        if self._context is not None:
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(self._context)
        parameters = self._api.llama_context_default_params()
        # A KV buffer for each sequence: with one for all, every token would be masked against everybody's cache.
        parameters.kv_unified = False
        parameters.n_seq_max = len(workload.prompts)
        parameters.n_ctx = len(workload.prompts) * (-(-workload.longest // 256) * 256)
        parameters.n_batch = self.prefill_tokens
        parameters.n_threads = parameters.n_threads_batch = self.setting.threads
        self._context = self._api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context of this size")
        self._batch = self._api.llama_batch_init(self.prefill_tokens, 0, 1)

    def run(self, workload: Workload) -> list[list[int]]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        responses: list[list[int]] = [[] for _ in workload.prompts]
        # Sequence numbers by length, longest first: those in flight are then always neighbours in the KV cache.
        order = sorted(range(len(responses)), key=lambda row: -workload.lengths[row])
        for group in self._prefill_groups(workload, order):
            tokens = [
                (token, position, number, position == len(workload.prompts[row]) - 1)
                for number, row in group
                for position, token in enumerate(workload.prompts[row])
            ]
            for (_, row), token in zip(group, self._decode(tokens), strict=True):
                responses[row].append(token)
        while active := [(k, row) for k, row in enumerate(order) if len(responses[row]) < workload.lengths[row]]:
            tokens = [
                (responses[row][-1], len(workload.prompts[row]) + len(responses[row]) - 1, number, True)
                for number, row in active
            ]
            for (_, row), token in zip(active, self._decode(tokens), strict=True):
                responses[row].append(token)
        return responses

    def _prefill_groups(self, workload: Workload, order: list[int]) -> Iterator[list[tuple[int, int]]]:
        """(sequence number, request) of whole prompts that fit into a batch together."""
        group: list[tuple[int, int]] = []
        size = 0
        for number, row in enumerate(order):
            length = len(workload.prompts[row])
            if group and size + length > self.prefill_tokens:
                yield group
                group, size = [], 0
            group.append((number, row))
            size += length
        yield group

    def _decode(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """One pass over (token, position, sequence, whether its logits are wanted); the likeliest next tokens."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        if status := self._api.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode: status {status}")
        size = self.files.architecture.vocab_size
        rows = (self._api.llama_get_logits_ith(self._context, i) for i, t in enumerate(tokens) if t[3])
        return [
            int(np.ctypeslib.as_array(ctypes.cast(r, ctypes.POINTER(ctypes.c_float)), (size,)).argmax()) for r in rows
        ]

    def facts(self) -> dict[str, Any]:
        return {"weights": self.quantization, **versions("llama-cpp-python")}


class LlamaCppQ8(LlamaCpp):
    """8-bit weights."""

    name = "llama.cpp-q8_0"
    quantization = "Q8_0"


class LlamaCppF16(LlamaCpp):
    """16-bit weights."""

    name = "llama.cpp-f16"
    quantization = "F16"


CONTENDERS: dict[str, type[Contender]] = {
    kind.name: kind
    for kind in (
        Embedded,
        EmbeddedFp32,
        HuggingFaceBf16,
        HuggingFaceFp32,
        HuggingFaceSorted,
        HuggingFaceContinuous,
        HuggingFaceCompiled,
        OpenVinoQ8,
        OpenVinoF16,
        LlamaCppQ8,
        LlamaCppF16,
    )
}
