"""The native step under the `ModelStep` seam: memory, weight destinations and calls into the compiled library."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import os
import weakref
from typing import Any

import numpy as np
import torch

from nemo_style_aligner.generation.embedded.native.arena import Arena
from nemo_style_aligner.generation.embedded.native.library import KERNELS, NativeUnavailable, load_library, usable_kernels
from nemo_style_aligner.generation.embedded.rotary import rotary_tables
from nemo_style_aligner.generation.embedded.shard import ModelShard
from nemo_style_aligner.generation.embedded.step import PAGE_TOKENS, EngineShape, ModelStep, StepInput
from nemo_style_aligner.generation.embedded.weight_table import Destination, ViewDestination, WeightTable
from nemo_style_aligner.generation.engine import SamplingParams
from nemo_style_aligner.generation.sampling import SamplingRows
from nemo_style_aligner.weights.layout import hf_tensors, weight_layout

logger = logging.getLogger(__name__)

_PANEL = 32  # output features per panel, as in panels.h
_MAX_STOP_IDS = 64  # as in sample.h
_WHOLE, _GATE, _UP = 0, 1, 2  # `Half` in panels.h

_Pointer = ctypes.c_void_p


# ---- the structures of step.cpp, field by field ------------------------------------------------------


class _Matrix(ctypes.Structure):
    _fields_ = [("data", _Pointer), ("scales", _Pointer)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *[(name, _Matrix) for name in ("qkv", "output", "fc1", "fc2")],
        *[(name, _Pointer) for name in ("qkv_bias", "output_bias", "fc1_bias", "fc2_bias")],
        *[(name, _Pointer) for name in ("input_norm", "input_norm_bias", "mlp_norm", "mlp_norm_bias")],
        *[(name, _Pointer) for name in ("query_norm", "key_norm", "keys", "values")],
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(_Layer)),
        *[(name, _Pointer) for name in ("final_norm", "final_norm_bias")],
        ("head", _Matrix),
        *[(name, _Pointer) for name in ("embedding", "cosines", "sines", "hidden", "qkv", "partial", "logits")],
        *[(name, _Pointer) for name in ("normed", "queries", "attended", "inner")],
        ("max_length", ctypes.c_int32),
        ("vocab_start", ctypes.c_int32),
    ]


class _Pass(ctypes.Structure):
    _fields_ = [
        *[(name, _Pointer) for name in ("token_ids", "positions", "slots", "segments", "output_rows", "block_table")],
        *[(name, ctypes.c_int32) for name in ("num_tokens", "num_segments", "num_outputs", "pages_per_sequence")],
    ]


class _PackArguments(ctypes.Structure):
    _fields_ = [
        *[(name, _Pointer) for name in ("data", "scales", "source")],
        ("source_stride", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("source_is_f32", "rows", "columns", "padded_columns", "first_row", "half")],
    ]


class _SampleArguments(ctypes.Structure):
    _fields_ = [
        *[(name, _Pointer) for name in ("logits", "keys", "positions", "suppress", "stop_ids", "tokens", "logprobs")],
        ("stride", ctypes.c_int64),
        *[(name, ctypes.c_int32) for name in ("rows", "vocab", "limit", "num_stop_ids", "greedy")],
        ("temperature", ctypes.c_float),
    ]


def _check_sizes(library: ctypes.CDLL) -> None:
    mirrored = [ctypes.sizeof(kind) for kind in (_Layer, _Model, _Pass, _PackArguments, _SampleArguments)]
    sizes = (ctypes.c_int32 * len(mirrored))()
    library.step_sizes(sizes)
    if list(sizes) != mirrored:
        raise NativeUnavailable(f"structures of step.cpp have sizes {list(sizes)}, native_step.py mirrors {mirrored}")


# ---- where weights go --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _PackedMatrix:
    """Panels of one matrix: ``data`` [panels, padded columns, 32] with pairs interleaved as in panels.h."""

    data: torch.Tensor
    scales: torch.Tensor | None  # fp32 [panels * 32], of int8 panels
    columns: int

    @property
    def pointers(self) -> _Matrix:
        return _Matrix(self.data.data_ptr(), None if self.scales is None else self.scales.data_ptr())


def _lane_places(num_rows: int, first_row: int, half: int) -> torch.Tensor:
    """int64 [num_rows]: panel * 32 + lane of features ``first_row``...; `place_of` in panels.h."""
    row = torch.arange(first_row, first_row + num_rows)
    if half == _WHOLE:
        return row
    return row // 16 * _PANEL + row % 16 + (16 if half == _UP else 0)


class _PackedDestination:
    """Rows ``first_row``... of a packed matrix."""

    def __init__(self, step: NativeStep, matrix: _PackedMatrix, rows: int, first_row: int = 0, half: int = _WHOLE) -> None:
        self._step = weakref.proxy(step)  # no cycle: the step's memory goes with its last reference
        self._matrix = matrix
        self._first_row, self._half = first_row, half
        self._places = _lane_places(rows, first_row, half)

    def write(self, part: torch.Tensor) -> None:
        """See `Destination.write`."""
        if part.dtype not in (torch.float32, torch.bfloat16) or part.stride(-1) != 1 or part.device.type != "cpu":
            part = part.to("cpu", torch.float32 if part.dtype != torch.bfloat16 else part.dtype).contiguous()
        matrix = self._matrix
        self._step.call(
            "step_pack",
            _PackArguments(
                data=matrix.data.data_ptr(),
                scales=None if matrix.scales is None else matrix.scales.data_ptr(),
                source=part.data_ptr(),
                source_stride=part.stride(0),
                source_is_f32=int(part.dtype == torch.float32),
                rows=part.shape[0],
                columns=part.shape[1],
                padded_columns=matrix.data.shape[1],
                first_row=self._first_row,
                half=self._half,
            ),
        )

    def read(self, rows: slice) -> torch.Tensor:
        """See `Destination.read`."""
        matrix, places = self._matrix, self._places[rows]
        panels, lanes = places // _PANEL, places % _PANEL
        if matrix.data.dtype == torch.float32:
            return matrix.data[panels, :, lanes][:, : matrix.columns]
        pairs = matrix.data.view(matrix.data.shape[0], -1, _PANEL, 2)
        values = pairs[panels, :, lanes].flatten(1)[:, : matrix.columns]
        return values if matrix.scales is None else values.float() * matrix.scales[places, None]

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """See `Destination.as_stored`."""
        if self._matrix.scales is None:
            return part.to("cpu", self._matrix.data.dtype)
        return quantize_rows(part.cpu())


def quantize_rows(part: torch.Tensor) -> torch.Tensor:
    """fp32 ``part`` [rows, columns] rounded to 255 levels per row (absmax / 127), as int8 panels hold it."""
    part = part.float()
    scale = part.abs().amax(1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, 1.0)
    return (part / scale).round() * scale + 0.0  # int8 has no negative zero


@dataclasses.dataclass(frozen=True)
class _LaneDestination:
    """Lanes of a vector that lies beside a packed matrix: a bias."""

    lanes: torch.Tensor  # fp32 [panels * 32]
    places: torch.Tensor

    def write(self, part: torch.Tensor) -> None:
        """See `Destination.write`."""
        self.lanes[self.places] = part.to("cpu", torch.float32)

    def read(self, rows: slice) -> torch.Tensor:
        """See `Destination.read`."""
        return self.lanes[self.places[rows]]

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """See `Destination.as_stored`."""
        return part.to("cpu", torch.float32)


@dataclasses.dataclass(frozen=True)
class _Both:
    """A tied embedding that is stored twice: int8 for the output layer, as it is for looking tokens up."""

    first: Destination
    second: Destination

    def write(self, part: torch.Tensor) -> None:
        """See `Destination.write`."""
        self.first.write(part)
        self.second.write(part)

    def read(self, rows: slice) -> torch.Tensor:
        """See `Destination.read`."""
        return self.first.read(rows)

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """See `Destination.as_stored`."""
        return self.first.as_stored(part)


# ---- the step ----------------------------------------------------------------------------------------


class NativeStep(ModelStep):
    """A forward pass in C++, one call per pass (two per layer and pass under tensor parallelism).

    On one kind of processor a token's logits have the same bits whatever else is in the pass, however prompts are
    cut into chunks and however many threads there are.

    Args:
        shape: what to compile for.
        kernel: a name of `library.KERNELS`; None: the best that the processor has.
        num_threads: None: as many as torch uses.
    """

    def __init__(self, shape: EngineShape, kernel: str | None = None, num_threads: int | None = None) -> None:
        """Raises NativeUnavailable where no kernel can run."""
        self._kernels = [kernel] if kernel else usable_kernels(shape.dtype)
        if not self._kernels:
            raise NativeUnavailable("the native generation step needs an x86-64 processor with AVX2 and FMA")
        self._shape = shape
        self._threads = num_threads or torch.get_num_threads()
        self._num_compilations = 0
        self._context: int | None = None

    def build(self) -> None:
        """See `ModelStep.build`. Raises NativeUnavailable."""
        self._load()
        self._library.step_create.restype = _Pointer
        _check_sizes(self._library)
        self._allocate()
        self._model = self._describe()
        # Addresses never change, so the context is made once.
        self._context = self._library.step_create(ctypes.byref(self._model), self._threads)
        weakref.finalize(self, self._library.step_destroy, _Pointer(self._context))
        self._pid = os.getpid()
        self.weights = WeightTable(self._shape.shard, self._destinations())
        self._num_compilations = 1

    def _load(self) -> None:
        """The best kernel that works here."""
        while True:
            self._kernel = self._kernels[0]
            try:
                self._library, self.was_compiled = load_library(self._shape, self._kernel)
                return
            except NativeUnavailable as error:
                self._kernels = self._kernels[1:]
                if not self._kernels:
                    raise
                logger.warning("native generation step: %s is no choice here, trying %s: %s", self._kernel, self._kernels[0], error)

    def call(self, function: str, arguments: ctypes.Structure, *more: int) -> None:
        """Call ``function`` of the library with the context and a structure."""
        if os.getpid() != self._pid:
            raise RuntimeError("the native step was built in another process: build the engine after forking")
        getattr(self._library, function)(_Pointer(self._context), ctypes.byref(arguments), *more)

    def forward(self, step: StepInput) -> torch.Tensor:
        """See `ModelStep.forward`; fp32."""
        arrays = (step.token_ids, step.positions, step.slots, step.segments, step.output_rows, step.block_table)
        arguments = _Pass(
            *(array.ctypes.data for array in arrays),
            num_tokens=len(step.token_ids),
            num_segments=len(step.segments),
            num_outputs=len(step.output_rows),
            pages_per_sequence=step.block_table.shape[1],
        )
        last = 2 * self._shape.architecture.num_layers + 1
        ranks = self._shape.tensor_parallel
        if ranks.size == 1:
            self.call("step_run", arguments, 0, last + 1)
            return self._logits[: len(step.output_rows), : self._shape.architecture.vocab_size]
        partial = self._activations["partial"][: len(step.token_ids)]
        for stage in range(last):
            self.call("step_run", arguments, stage, stage + 1)
            ranks.all_reduce(partial)
        self.call("step_run", arguments, last, last + 1)
        shards = ranks.all_gather(self._logits[: len(step.output_rows), : self._shape.shard.vocab_rows])
        return torch.cat(shards, dim=1)[:, : self._shape.architecture.vocab_size]

    def sample(
        self,
        logits: torch.Tensor,
        params: SamplingParams,
        rows: SamplingRows,
        stop_ids: torch.Tensor | None,
        vocab_limit: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ModelStep.sample`: natively unless a filter or penalty acts."""
        filtered = params.repetition_penalty != 1.0 or not (params.use_greedy or (not params.top_k and params.top_p == 1))
        num_stop_ids = 0 if stop_ids is None else len(stop_ids)
        if filtered or num_stop_ids > _MAX_STOP_IDS or logits.stride(1) != 1:
            return super().sample(logits, params, rows, stop_ids, vocab_limit)
        n = len(logits)
        tokens, logprobs = torch.empty(n, dtype=torch.int64), torch.empty(n)
        suppress = rows.suppress_stop if num_stop_ids else None
        self.call(
            "step_sample",
            _SampleArguments(
                logits=logits.data_ptr(),
                keys=rows.keys.data_ptr(),
                positions=rows.positions.data_ptr(),
                suppress=None if suppress is None else suppress.data_ptr(),
                stop_ids=None if stop_ids is None else stop_ids.data_ptr(),
                tokens=tokens.data_ptr(),
                logprobs=logprobs.data_ptr(),
                stride=logits.stride(0),
                rows=n,
                vocab=logits.shape[1],
                limit=vocab_limit,
                num_stop_ids=num_stop_ids,
                greedy=int(params.use_greedy),
                temperature=params.temperature,
            ),
        )
        return tokens, logprobs

    def clear_pages(self) -> None:
        """See `ModelStep.clear_pages`."""
        self._pages.release()

    def release(self) -> None:
        """See `ModelStep.release`."""
        self._weights.release()
        self._pages.release()
        self._activations.release()

    def acquire(self) -> None:
        """Nothing to do: memory comes back as it is touched."""

    @property
    def num_compilations(self) -> int:
        return self._num_compilations

    @property
    def description(self) -> str:
        return f"native step ({self._kernel}, {self._threads} threads)"

    # ---- memory ---------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        shape, shard, a = self._shape, self._shape.shard, self._shape.architecture
        heads = shard.query_size
        self._activations = Arena(_activation_regions(shape, self._is_bf16_activation()))
        self._logits = self._activations["logits"]
        channels = _round_up(a.kv_channels, 16)
        pages = (shape.num_pages, shard.num_groups, PAGE_TOKENS, channels)
        self._pages = Arena(
            {f"{kind}.{layer}": (pages, shape.dtype) for layer in range(a.num_layers) for kind in ("keys", "values")}
        )
        fc1_panels = -(-shard.ffn_size // 16) if a.gated else -(-shard.ffn_size // _PANEL)
        matrices = {}
        for layer in range(a.num_layers):
            matrices[f"{layer}.qkv"] = (-(-(heads + 2 * shard.group_size) // _PANEL), a.hidden_size)
            matrices[f"{layer}.output"] = (-(-a.hidden_size // _PANEL), heads)
            matrices[f"{layer}.fc1"] = (fc1_panels, a.hidden_size)
            matrices[f"{layer}.fc2"] = (-(-a.hidden_size // _PANEL), shard.ffn_size)
        matrices["head"] = (-(-shard.vocab_rows // _PANEL), a.hidden_size)
        quantized = shape.weight_format == "int8"
        regions: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (panels, columns) in matrices.items():
            regions[name] = ((panels, _round_up(columns, 32), _PANEL), torch.int8 if quantized else shape.dtype)
            if quantized:
                regions[f"{name}.scales"] = ((panels * _PANEL,), torch.float32)
            regions[f"{name}.bias"] = ((panels * _PANEL,), torch.float32)
        if quantized or not a.tied_embeddings:
            regions["embedding"] = ((shard.vocab_rows, a.hidden_size), shape.dtype)
        for layer in range(a.num_layers):
            for name in ("input_norm", "mlp_norm"):
                regions[f"{layer}.{name}"] = regions[f"{layer}.{name}_bias"] = ((a.hidden_size,), torch.float32)
            for name in ("query_norm", "key_norm"):
                regions[f"{layer}.{name}"] = ((a.kv_channels,), torch.float32)
        regions["final_norm"] = regions["final_norm_bias"] = ((a.hidden_size,), torch.float32)
        self._weights = Arena(regions, huge_pages=True)
        self._matrices = {
            name: _PackedMatrix(self._weights[name], self._weights[f"{name}.scales"] if quantized else None, columns)
            for name, (_, columns) in matrices.items()
        }
        cosines, sines = rotary_tables(a, shape.max_sequence_length, torch.device("cpu"))
        self._rotary = (cosines.contiguous(), sines.contiguous())

    def _is_bf16_activation(self) -> bool:
        return KERNELS[self._kernel].number != 0

    def _describe(self) -> _Model:
        """Every address the library needs."""
        a, weights = self._shape.architecture, self._weights

        def biased(name: str, exists: bool) -> int | None:
            return weights[f"{name}.bias"].data_ptr() if exists else None

        self._layers = (_Layer * a.num_layers)()
        has_norm_bias = a.normalization != "rmsnorm"
        for index, layer in enumerate(self._layers):
            for matrix in ("qkv", "output", "fc1", "fc2"):
                setattr(layer, matrix, self._matrices[f"{index}.{matrix}"].pointers)
                exists = a.bias or (a.qkv_bias and matrix == "qkv")
                setattr(layer, f"{matrix}_bias", biased(f"{index}.{matrix}", exists and self._adds_bias(matrix)))
            for norm in ("input_norm", "mlp_norm"):
                setattr(layer, norm, weights[f"{index}.{norm}"].data_ptr())
                if has_norm_bias:
                    setattr(layer, f"{norm}_bias", weights[f"{index}.{norm}_bias"].data_ptr())
            for norm in ("query_norm", "key_norm"):
                setattr(layer, norm, weights[f"{index}.{norm}"].data_ptr())
            layer.keys = self._pages[f"keys.{index}"].data_ptr()
            layer.values = self._pages[f"values.{index}"].data_ptr()
        activations: dict[str, Any] = {
            name: self._activations[name].data_ptr()
            for name in ("hidden", "qkv", "partial", "logits", "normed", "queries", "attended", "inner")
        }
        return _Model(
            layers=self._layers,
            final_norm=weights["final_norm"].data_ptr(),
            final_norm_bias=weights["final_norm_bias"].data_ptr() if has_norm_bias else None,
            head=self._matrices["head"].pointers,
            embedding=weights["embedding"].data_ptr() if "embedding" in weights else None,
            cosines=self._rotary[0].data_ptr(),
            sines=self._rotary[1].data_ptr(),
            **activations,
            max_length=self._shape.max_sequence_length,
            vocab_start=self._shape.shard.vocab_start,
        )

    def _adds_bias(self, matrix: str) -> bool:
        """Biases of row-parallel products are added once, by the first rank."""
        return matrix in ("qkv", "fc1") or self._shape.tensor_parallel.rank == 0

    def _destinations(self) -> dict[str, Destination]:
        """Hugging Face name -> where this rank's part of it goes."""
        shard, a = self._shape.shard, self._shape.architecture
        places: dict[str, Destination] = {}
        for name, tensor in hf_tensors(weight_layout(a)).items():
            part = shard.take(name, torch.empty(tensor.shape, device="meta"))
            places[name] = self._destination(name, part.shape[0], shard)
        return places

    def _destination(self, name: str, rows: int, shard: ModelShard) -> Destination:
        weights = self._weights
        module, _, kind = name.rpartition(".")
        last = module.rpartition(".")[2]
        if last == "embed_tokens":
            lookup = ViewDestination(weights["embedding"][:rows]) if "embedding" in weights else None
            output = _PackedDestination(self, self._matrices["head"], rows)
            if not self._shape.architecture.tied_embeddings:
                assert lookup is not None  # an untied embedding has its own region
                return lookup
            return output if lookup is None else _Both(output, lookup)
        if last == "lm_head":
            return _PackedDestination(self, self._matrices["head"], rows)
        if module == "model.norm":
            return ViewDestination(weights["final_norm" if kind == "weight" else "final_norm_bias"])
        layer = module.split(".")[2]
        norms = {
            "input_layernorm": "input_norm",
            "post_attention_layernorm": "mlp_norm",
            "q_norm": "query_norm",
            "k_norm": "key_norm",
        }
        if last in norms:
            return ViewDestination(weights[f"{layer}.{norms[last]}" + ("" if kind == "weight" else "_bias")])
        up_half = _UP if self._shape.architecture.gated else _WHOLE
        matrix, first_row, half = {
            "q_proj": ("qkv", 0, _WHOLE),
            "k_proj": ("qkv", shard.query_size, _WHOLE),
            "v_proj": ("qkv", shard.query_size + shard.group_size, _WHOLE),
            "o_proj": ("output", 0, _WHOLE),
            "gate_proj": ("fc1", 0, _GATE),
            "up_proj": ("fc1", 0, up_half),
            "down_proj": ("fc2", 0, _WHOLE),
        }[last]
        if kind == "bias":
            return _LaneDestination(weights[f"{layer}.{matrix}.bias"], _lane_places(rows, first_row, half))
        return _PackedDestination(self, self._matrices[f"{layer}.{matrix}"], rows, first_row, half)


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _activation_regions(shape: EngineShape, bf16: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Activations of one pass; rows in whole tiles, columns that weights are multiplied with in multiples of 32."""
    shard, a = shape.shard, shape.architecture
    rows = _round_up(shape.max_step_tokens, 32)
    multiplied = torch.bfloat16 if bf16 else torch.float32
    return {
        "hidden": ((rows, a.hidden_size), torch.float32),
        "qkv": ((rows, shard.query_size + 2 * shard.group_size), torch.float32),
        "partial": ((rows, a.hidden_size), torch.float32),
        "logits": ((_round_up(shape.num_slots, 32), _round_up(shard.vocab_rows, _PANEL)), torch.float32),
        "normed": ((rows, _round_up(a.hidden_size, 32)), multiplied),
        "queries": ((rows, shard.num_heads, _round_up(a.kv_channels, 16)), multiplied),
        "attended": ((rows, _round_up(shard.query_size, 32)), multiplied),
        "inner": ((rows, _round_up(shard.ffn_size, 32)), multiplied),
    }
