"""The native `ModelStep`: memory, weight destinations and calls into the compiled library."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
from collections.abc import Iterator
from typing import Any

import torch

from nemo_style_aligner.engine.architecture import ENDS, EVERY_FEATURE, ModelArchitecture
from nemo_style_aligner.engine.contract import SamplingParams
from nemo_style_aligner.engine.embedded.arena import Arena
from nemo_style_aligner.engine.embedded.native.library import load_library
from nemo_style_aligner.engine.embedded.native.structures import (
    Context,
    Layer,
    Model,
    PackArguments,
    Pass,
    SampleArguments,
)
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS, SCORED_ROWS, EngineShape, ModelStep, StepInput
from nemo_style_aligner.engine.embedded.trainer_weights import TrainerWeights
from nemo_style_aligner.engine.embedded.weight_table import Rows, WeightTable, Write, layer_rows, mlp_rows
from nemo_style_aligner.engine.native.compilation import KERNELS, NativeUnavailable, NothingCompiles, usable_kernels
from nemo_style_aligner.engine.sampling import SamplingRows
from nemo_style_aligner.engine.shard import ModelShard
from nemo_style_aligner.engine.weights.layout import LAYER_NORMS, ROUTER_BIAS
from nemo_style_aligner.wording import counted

logger = logging.getLogger(__name__)

_MAX_STOP_IDS = 64  # as in sample.h
_KNOWN = EVERY_FEATURE | {*ENDS}
_HEAD_NORMS = {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}  # in a layer -> Hugging Face's names
_PANEL = 32  # output features per panel, as in panels.h
_WHOLE, _GATE, _UP = 0, 1, 2  # `Half` in panels.h
_SOURCE_DTYPES = (torch.float32, torch.bfloat16)  # that can be packed


class NativeStep(ModelStep):
    """A forward pass in C++: one library call (2 * num_layers + 2 under tensor parallelism).

    On one kind of processor a token's logits have the same bits whatever else is in the pass, however prompts are
    cut into chunks and however many threads there are. (Not so with three or more ranks: gloo adds up their results in
    an order that depends on the number of tokens in the pass.)

    Args:
        shape: what to compile for.
        trainer: its weights, to pack from.
        kernel: a name of `compilation.KERNELS`; None: the best that the processor has.
        num_threads: None: as many as torch uses.
    """

    def __init__(
        self,
        shape: EngineShape,
        trainer: TrainerWeights,
        kernel: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Raises NativeUnavailable where no kernel can run, or the step does not know a feature of the model."""
        several = shape.tensor_parallel.size > 1  # between which the step has no sums over heads
        if unknown := shape.architecture.unknown(_KNOWN - {"qk_norm_over_heads"} if several else _KNOWN):
            over = " over several ranks" if several else ""
            raise NativeUnavailable(f"the native generation step does not know the model's {', '.join(unknown)}{over}")
        self._kernels = [kernel] if kernel else usable_kernels(shape.dtype)
        if not self._kernels:
            raise NativeUnavailable("the native generation step needs an x86-64 processor with AVX2 and FMA")
        self._shape = shape
        self._threads = num_threads or torch.get_num_threads()
        self._trainer = trainer

    def build(self) -> None:
        """See `ModelStep.build`. Raises NativeUnavailable."""
        self.load()
        self._allocate()
        self._context = Context(self._library, self._describe(), self._threads)
        self.weights = self._weight_table()

    def load(self) -> None:
        """Load the library of the best kernel that works here. Raises NativeUnavailable."""
        while True:
            self._kernel = self._kernels[0]
            try:
                self._library = load_library(self._shape, self._kernel)
                return
            except NothingCompiles:
                raise
            except NativeUnavailable as error:
                self._kernels = self._kernels[1:]
                if not self._kernels:
                    raise
                logger.warning(
                    "native generation step: %s cannot run here, trying %s: %s", self._kernel, self._kernels[0], error
                )

    def forward(self, step: StepInput) -> torch.Tensor:
        """See `ModelStep.forward`; logits are fp32."""
        arrays = (step.token_ids, step.positions, step.slots, step.segments, step.output_rows, step.block_table)
        arguments = Pass(
            *(array.ctypes.data for array in arrays),
            routes=None if step.routes is None else step.routes.ctypes.data,
            num_tokens=len(step.token_ids),
            num_segments=len(step.segments),
            num_outputs=len(step.output_rows),
            pages_per_sequence=step.block_table.shape[1],
        )
        last = 2 * self._shape.architecture.num_layers + 1
        ranks = self._shape.tensor_parallel
        if ranks.size == 1:
            self._context.call("step_run", arguments, 0, last + 1)
            return self._logits[: len(step.output_rows), : self._shape.architecture.vocab_size]
        partial = self._activations["partial"][: len(step.token_ids)]
        for stage in range(last):
            self._context.call("step_run", arguments, stage, stage + 1)
            ranks.all_reduce(partial)
        self._context.call("step_run", arguments, last, last + 1)
        shards = ranks.all_gather(self._logits[: len(step.output_rows), : self._shape.shard.vocab_rows])
        return torch.cat(shards, dim=1)[:, : self._shape.architecture.vocab_size]

    def sample(
        self,
        logits: torch.Tensor,
        params: SamplingParams,
        rows: SamplingRows,
        stop_ids: torch.Tensor,
        vocab_limit: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ModelStep.sample`: in C++, unless a filter or penalty acts or there are too many stop ids."""
        filters = [name for name, _ in params.filters if name != "grammar"]
        if filters or len(stop_ids) > _MAX_STOP_IDS or logits.stride(1) != 1:
            return super().sample(logits, params, rows, stop_ids, vocab_limit)
        n = len(logits)
        tokens, logprobs = torch.empty(n, dtype=torch.int64), torch.empty(n)
        self._context.call(
            "step_sample",
            SampleArguments(
                logits=logits.data_ptr(),
                keys=rows.keys.data_ptr(),
                positions=rows.positions.data_ptr(),
                suppress=None if rows.suppress_stop is None else rows.suppress_stop.data_ptr(),
                stop_ids=stop_ids.data_ptr(),
                allowed=None if rows.allowed is None else rows.allowed.data_ptr(),
                tokens=tokens.data_ptr(),
                logprobs=logprobs.data_ptr(),
                stride=logits.stride(0),
                allowed_stride=0 if rows.allowed is None else rows.allowed.stride(0),
                rows=n,
                vocab=logits.shape[1],
                limit=vocab_limit,
                num_stop_ids=len(stop_ids),
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
        """The library, loaded by `build`."""
        return 1

    @property
    def description(self) -> str:
        """See `ModelStep.description`."""
        return f"native step ({self._kernel}, {counted(self._threads, 'threads')})"

    # ---- memory ---------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        shape, shard, a = self._shape, self._shape.shard, self._shape.architecture
        self._activations = Arena(_activation_regions(shape, KERNELS[self._kernel].bf16_activations))
        self._logits = self._activations["logits"]
        channels = _round_up(a.kv_channels, 16)
        pages = (shape.num_pages, shard.num_groups, PAGE_TOKENS, channels)
        self._pages = Arena(
            {f"{kind}.{layer}": (pages, shape.dtype) for layer in range(a.num_layers) for kind in ("keys", "values")}
        )
        regions: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for index in range(a.num_layers):
            for kind, (outputs, columns) in _sizes(shard, index).items():
                panels = -(-outputs // _PANEL), _round_up(columns, 32), _PANEL
                experts = (a.experts.number,) if a.experts is not None and kind.startswith("expert") else ()
                regions[f"{index}.{kind}"] = ((*experts, *panels), shape.dtype)
                regions[f"{index}.{kind}_bias"] = ((*experts, panels[0] * _PANEL), torch.float32)
        panels = -(-shard.vocab_rows // _PANEL), _round_up(a.hidden_size, 32), _PANEL
        regions["head"], regions["head_bias"] = (panels, shape.dtype), ((panels[0] * _PANEL,), torch.float32)
        if not a.tied_embeddings:
            regions["embedding"] = ((shard.vocab_rows, a.hidden_size), shape.dtype)
        for index, layer in enumerate(a.layers):
            if layer.experts is not None and layer.experts.has_bias:
                regions[f"{index}.choice_bias"] = ((layer.experts.number,), torch.float32)
            for name in LAYER_NORMS[layer.layer_norms]:
                regions[f"{index}.{name}"] = regions[f"{index}.{name}_bias"] = ((a.hidden_size,), torch.float32)
            for name, size in zip(_HEAD_NORMS, shard.qk_norm_sizes, strict=False):  # there may be none
                regions[f"{index}.{name}"] = ((size,), torch.float32)
            if layer.attention_sinks:
                regions[f"{index}.sinks"] = ((shard.num_heads,), torch.float32)
        regions["final_norm"] = regions["final_norm_bias"] = ((a.hidden_size,), torch.float32)
        self._weights = Arena(regions, huge_pages=True)
        self._rotary = [table.contiguous() for table in shape.rotary_tables()]
        self._local_rotary = [table.contiguous() for table in shape.rotary_tables(local=True)]

    def _describe(self) -> Model:
        """Every address the library needs."""
        a, weights = self._shape.architecture, self._weights

        self._layers = (Layer * a.num_layers)()
        for index, (layer, features) in enumerate(zip(self._layers, a.layers, strict=True)):
            norms = list(LAYER_NORMS[features.layer_norms])
            biases = [f"{norm}_bias" for norm in norms if a.norm_has_bias]
            matrices = list(_sizes(self._shape.shard, index))
            biases += [f"{matrix}_bias" for matrix in matrices if _has_bias(a, matrix) and self._adds_bias(matrix)]
            biases += ["choice_bias"] if features.experts is not None and features.experts.has_bias else []
            heads = [*(_HEAD_NORMS if features.qk_layernorm else ()), *(["sinks"] if features.attention_sinks else ())]
            for name in (*matrices, *norms, *biases, *heads):
                setattr(layer, name, weights[f"{index}.{name}"].data_ptr())
            if features.rotates:
                tables = self._local_rotary if features.local_rope else self._rotary
                layer.cosines, layer.sines = (table.data_ptr() for table in tables)
            layer.window = features.window or 0
            layer.keys = self._pages[f"keys.{index}"].data_ptr()
            layer.values = self._pages[f"values.{index}"].data_ptr()
        activations: dict[str, Any] = {
            name: self._activations[name].data_ptr() for name in _activation_regions(self._shape, bf16=False)
        }
        return Model(
            layers=self._layers,
            final_norm=weights["final_norm"].data_ptr(),
            final_norm_bias=weights["final_norm_bias"].data_ptr() if a.norm_has_bias else None,
            head=weights["head"].data_ptr(),
            embedding=weights["embedding"].data_ptr() if "embedding" in weights else None,
            **activations,
            max_length=self._shape.max_sequence_length,
            vocab_start=self._shape.shard.vocab_start,
        )

    def _adds_bias(self, matrix: str) -> bool:
        """Biases of row-parallel products are added once, by the first rank."""
        return matrix not in ("output", "fc2", "expert_fc2") or self._shape.tensor_parallel.rank == 0

    def _weight_table(self) -> WeightTable:
        """Where each tensor goes, from a refit's stream or from the trainer's memory."""
        shard, a, weights = self._shape.shard, self._shape.architecture, self._weights
        packed = _PackedFromTrainer(self._context)
        writes: dict[str, Write] = {}

        def pack(matrix: str, parts: dict[str, Rows], num_rows: int, columns: int, expert: int | None = None) -> None:
            data = weights[matrix] if expert is None else weights[matrix][expert]
            names = tuple(f"{module}.weight" for module in parts)
            size = (num_rows, columns)
            source = self._trainer.find(names, size, _SOURCE_DTYPES, torch.device("cpu"))
            if source is not None:
                self._trainer.copied[names] = source
            halves = (_GATE, _UP) if matrix.endswith("fc1") and len(parts) == 2 else (_WHOLE,) * len(parts)
            first_row = 0
            for (module, rows), half in zip(parts.items(), halves, strict=True):
                to = _PackedRows(self._context, data, first_row, half)
                writes[f"{module}.weight"] = to.write
                if source is not None:
                    packed.add(f"{module}.weight", to, source, rows)
                count = rows.count * rows.groups
                if _has_bias(a, matrix.rpartition(".")[2]):
                    lanes = weights[f"{matrix}_bias"] if expert is None else weights[f"{matrix}_bias"][expert]
                    writes[f"{module}.bias"] = _into(lanes, _lane_places(count, first_row, half))
                first_row += count if half == _WHOLE else 0

        for layer in range(a.num_layers):
            prefix = f"model.layers.{layer}."
            for kind, parts, expert in _matrices(shard, layer):
                pack(f"{layer}.{kind}", parts, Rows.total(parts), _sizes(shard, layer)[kind][1], expert)
            if (experts := a.layers[layer].experts) is not None and experts.has_bias:
                writes[f"{prefix}mlp.gate.{ROUTER_BIAS}"] = weights[f"{layer}.choice_bias"].copy_
            norms = LAYER_NORMS[a.layers[layer].layer_norms]
            for region, module in {**norms, **(_HEAD_NORMS if a.qk_layernorm else {})}.items():
                writes[f"{prefix}{module}.weight"] = weights[f"{layer}.{region}"].copy_
            if a.attention_sinks:
                writes[f"{prefix}self_attn.sinks"] = weights[f"{layer}.sinks"].copy_
            for region, module in norms.items() if a.norm_has_bias else ():
                writes[f"{prefix}{module}.bias"] = weights[f"{layer}.{region}_bias"].copy_
        writes["model.norm.weight"] = weights["final_norm"].copy_
        if a.norm_has_bias:
            writes["model.norm.bias"] = weights["final_norm_bias"].copy_
        if not a.tied_embeddings:
            writes["model.embed_tokens.weight"] = weights["embedding"][: shard.held_vocab_rows].copy_
        head = "model.embed_tokens" if a.tied_embeddings else "lm_head"
        pack("head", {head: Rows(0, shard.held_vocab_rows)}, shard.vocab_rows, a.hidden_size)
        return WeightTable(shard, writes, copied=packed.names, copy=packed.write if packed.names else None)


def _sizes(shard: ModelShard, layer: int) -> dict[str, tuple[int, int]]:
    """A layer's matrices on this rank, and one expert's: lanes of panels, and columns. fc1 and fc2 are an MLP's."""
    a, experts = shard.architecture, shard.architecture.layers[layer].experts
    h, size = a.hidden_size, shard.ffn_size
    sizes = {"qkv": (shard.query_size + 2 * shard.group_size, h), "output": (h, shard.query_size)}
    if experts is not None:
        size = experts.shared_ffn_hidden_size // shard.size
        sizes |= {"router": (experts.number, h), "expert_fc1": (2 * _round_up(shard.expert_size, 16), h)}
        sizes["expert_fc2"] = (h, shard.expert_size)
    if size:
        sizes |= {"fc1": (2 * _round_up(size, 16) if a.gated else size, h), "fc2": (h, size)}
    return sizes


def _matrices(shard: ModelShard, layer: int) -> Iterator[tuple[str, dict[str, Rows], int | None]]:
    """A layer's matrices by their names in `_sizes`, the rows of each, and the expert that it is of."""
    prefix, experts = f"model.layers.{layer}.", shard.architecture.layers[layer].experts
    rows = layer_rows(shard, prefix)
    if experts is not None:
        rows |= mlp_rows(shard, f"{prefix}mlp.shared_experts.", experts.shared_ffn_hidden_size // shard.size)
        yield "router", {f"{prefix}mlp.gate": Rows(0, experts.number)}, None
    for number in range(experts.number if experts is not None else 0):
        for kind, parts in mlp_rows(shard, f"{prefix}mlp.experts.{number}.", shard.expert_size).items():
            yield f"expert_{kind}", parts, number
    yield from ((kind, parts, None) for kind, parts in rows.items() if kind in _sizes(shard, layer))


def _has_bias(a: ModelArchitecture, matrix: str) -> bool:
    return matrix != "head" and (a.bias or (a.qkv_bias and matrix == "qkv"))


def _into(lanes: torch.Tensor, places: torch.Tensor) -> Write:
    """Stores a bias, which is laid out like the panels of its matrix, in ``lanes``, fp32 [panels * 32]."""
    return lambda part: lanes.index_copy_(0, places, part.to("cpu", torch.float32))


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def _activation_regions(shape: EngineShape, bf16: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Buffers of one pass: rows in whole tiles of 32; columns that are multiplied with weights in multiples of 32."""
    shard, a = shape.shard, shape.architecture
    rows = _round_up(shape.max_step_tokens, 32)
    multiplied = torch.bfloat16 if bf16 else torch.float32
    experts, inner = a.experts, shard.ffn_size
    routed: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if experts is not None:
        inner, places = max(inner, experts.shared_ffn_hidden_size // shard.size), rows * experts.per_token + 32
        routed["routing"] = ((rows, _round_up(experts.number, _PANEL)), torch.float32)
        routed["gathered"] = ((places, _round_up(a.hidden_size, 32)), multiplied)
        routed["expert_inner"] = ((places, _round_up(shard.expert_size, 32)), multiplied)
    return routed | {
        "hidden": ((rows, a.hidden_size), torch.float32),
        "qkv": ((rows, shard.query_size + 2 * shard.group_size), torch.float32),
        "partial": ((rows, a.hidden_size), torch.float32),
        "logits": ((_round_up(shape.num_slots + SCORED_ROWS, 32), _round_up(shard.vocab_rows, _PANEL)), torch.float32),
        "normed": ((rows, _round_up(a.hidden_size, 32)), multiplied),
        "queries": ((rows, shard.num_heads, _round_up(a.kv_channels, 16)), multiplied),
        "attended": ((rows, _round_up(shard.query_size, 32)), multiplied),
        "inner": ((rows, _round_up(inner, 32)), multiplied),
    }


# ---- where a refit's tensors go: panels of matrices, lanes of biases ----------------------------------


def _lane_places(num_rows: int, first_row: int, half: int) -> torch.Tensor:
    """panel * 32 + lane of each of ``num_rows`` features from ``first_row`` on, int64; as `place_of` in panels.h."""
    row = torch.arange(first_row, first_row + num_rows)
    if half == _WHOLE:
        return row
    return row // 16 * _PANEL + row % 16 + (16 if half == _UP else 0)


@dataclasses.dataclass(frozen=True)
class _PackedRows:
    """Some rows of a packed matrix from ``first_row`` on, filled by the library.

    Attributes:
        data: the matrix, [panels, padded columns, 32] with pairs interleaved as in panels.h.
    """

    context: Context
    data: torch.Tensor
    first_row: int = 0
    half: int = _WHOLE

    def write(self, part: torch.Tensor) -> None:
        """See `weight_table.Write`."""
        if part.dtype not in _SOURCE_DTYPES or part.stride(-1) != 1 or part.device.type != "cpu":
            part = part.to("cpu", torch.float32 if part.dtype != torch.bfloat16 else part.dtype).contiguous()
        self.context.call("step_pack", self.arguments(part, Rows(0, len(part))), 1)

    def arguments(self, source: torch.Tensor, rows: Rows) -> PackArguments:
        """Arguments to pack ``rows`` of ``source`` [all rows, columns], float32 or bfloat16, columns contiguous."""
        stride = source.stride(0)
        return PackArguments(
            data=self.data.data_ptr(),
            source=source.data_ptr() + rows.start * stride * source.itemsize,
            source_stride=stride,
            run_stride=len(source) // rows.groups * stride,
            run_rows=rows.count,
            source_is_f32=int(source.dtype == torch.float32),
            rows=rows.count * rows.groups,
            columns=source.shape[1],
            padded_columns=self.data.shape[1],
            first_row=self.first_row,
            half=self.half,
        )


class _PackedFromTrainer:
    """Tensors that a refit's stream leaves out: `write` packs them all in one call of the library."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._parts: dict[str, tuple[_PackedRows, torch.Tensor, Rows]] = {}

    def add(self, name: str, to: _PackedRows, source: torch.Tensor, rows: Rows) -> None:
        """Have ``rows`` of the trainer's ``source``, which never moves, packed as tensor ``name``."""
        self._parts[name] = (to, source, rows)

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names of these tensors."""
        return frozenset(self._parts)

    def write(self) -> None:
        """Pack all of them."""
        self._context.call("step_pack", self._arguments, len(self._arguments))

    @functools.cached_property
    def _arguments(self) -> ctypes.Array[PackArguments]:
        arguments = [to.arguments(source, rows) for to, source, rows in self._parts.values()]
        return (PackArguments * len(arguments))(*arguments)
