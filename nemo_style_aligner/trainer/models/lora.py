"""LoRA (arXiv:2106.09685): trained adapters beside the linear layers of a model that is frozen.

A layer with weight W [n, k] computes W x + alpha / rank * B A x, with A [rank, k] and B [n, rank]. Each matrix of the
Hugging Face model has an adapter of its own, as in PEFT, also where Megatron has several in one: then the A's are
stacked, and each row of the common B belongs to one of them. So an adapter can be read from PEFT and written for it
whatever the layout, and trains as it would there.

Ranks divide an adapter as they divide its layer. Of a column-parallel layer (attention_qkv, mlp_fc1) every rank has A,
and its rows of B; of a row-parallel one (attention_dense, mlp_fc2) its columns of A, and B.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import ParallelLayout
from nemo_style_aligner.engine.weights.layout import LayoutEntry, weight_layout
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import ADAPTER_PREFIX, Part
from nemo_style_aligner.trainer.config.schema import Peft
from nemo_style_aligner.trainer.models.attention import LayerConfig
from nemo_style_aligner.trainer.models.linear import linear
from nemo_style_aligner.trainer.models.recompute import not_keeping

TARGETS: Mapping[str, tuple[str, ...]] = {
    "attention_qkv": ("self_attention.linear_qkv",),
    "attention_dense": ("self_attention.linear_proj",),
    "mlp_fc1": ("mlp.linear_fc1",),
    "mlp_fc2": ("mlp.linear_fc2",),
    "attention": ("self_attention.linear_qkv", "self_attention.linear_proj"),
    "mlp": ("mlp.linear_fc1", "mlp.linear_fc2"),
    "all": ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"),
}
"""NeMo's names of linear layers, and of groups of them, and the modules of a transformer layer that they mean."""

A_WEIGHT, B_WEIGHT = ".lora_A.weight", ".lora_B.weight"
"""How PEFT's names of an adapter's two matrices end."""

_INITS: Mapping[str, Callable[..., torch.Tensor]] = {
    "xavier": torch.nn.init.xavier_normal_,
    "kaiming": lambda weight, generator: torch.nn.init.kaiming_uniform_(weight, math.sqrt(5), generator=generator),
    "normal": lambda weight, generator: torch.nn.init.normal_(weight, 0.0, 0.2, generator=generator),
    "zero": lambda weight, generator: torch.nn.init.zeros_(weight),
}
"""As NeMo has them."""


@dataclasses.dataclass(frozen=True)
class LoraSettings:
    """Which layers have adapters, and what kind.

    Attributes:
        targets: keys of `TARGETS`.
        rank, alpha: see the module.
        dropout: of an adapter's input.
        init_a, init_b: how A and B begin: names of `_INITS`.
        layers: the layers that have adapters, counted from 1; None: all.
        seed: of the first values.
    """

    targets: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float = 0.0
    init_a: str = "xavier"
    init_b: str = "zero"
    layers: tuple[int, ...] | None = None
    seed: int = 0

    @classmethod
    def from_config(cls, model: Mapping[str, Any]) -> LoraSettings | None:
        """Those of an archive's config, or of a job's ``model`` section; None: every weight is trained."""
        return cls.of(Peft.among(model.get("peft") or {}), model.get("seed") or 0)

    @classmethod
    def of(cls, peft: Peft, seed: int) -> LoraSettings | None:
        """Those of ``model.peft`` and ``model.seed``; None: every weight is trained."""
        if peft.peft_scheme != "lora":
            return None
        tuning = peft.lora_tuning
        return cls(
            targets=tuple(tuning.target_modules),
            rank=tuning.adapter_dim,
            alpha=tuning.adapter_dim if tuning.alpha is None else tuning.alpha,
            dropout=tuning.adapter_dropout,
            init_a=tuning.column_init_method,
            init_b=tuning.row_init_method,
            layers=None if tuning.layer_selection is None else tuple(tuning.layer_selection),
            seed=seed,
        )

    def entries(self, architecture: ModelArchitecture) -> list[LayoutEntry]:
        """The parameters of the layout table that have adapters."""
        modules = {module for target in self.targets for module in TARGETS[target]}
        return [
            entry
            for entry in weight_layout(architecture)
            if isinstance(entry.place, int)
            and (self.layers is None or entry.place + 1 in self.layers)
            and _module_of(entry) in modules
        ]

    def num_parameters(self, architecture: ModelArchitecture) -> int:
        """Numbers in all adapters."""
        parts = (part for entry in self.entries(architecture) for part in entry.parts)
        return sum(self.rank * sum(part.shape) for part in parts)

    def problems(self, architecture: ModelArchitecture, pp_size: int) -> Iterator[str]:
        """Why a model cannot have these adapters: ``key=value``, why, what to do."""
        tuning = "model.peft.lora_tuning"
        if unknown := [target for target in self.targets if target not in TARGETS] or not self.targets:
            yield f"{tuning}.target_modules={list(self.targets)}: choose among {', '.join(TARGETS)}"
        if (self.init_a, self.init_b) == ("zero", "zero"):
            yield f"{tuning}.column_init_method=zero, row_init_method=zero: this never learns; use xavier and zero"
        numbers = range(1, architecture.num_layers + 1)
        if unknown or any(layer not in numbers for layer in self.layers or ()):
            if not unknown:
                yield f"{tuning}.layer_selection={list(self.layers or ())}: the model has layers 1 to {numbers[-1]}"
            return
        modules = {module for target in self.targets for module in TARGETS[target] if module.startswith("mlp.")}
        if architecture.experts is not None and modules:
            yield (
                f"{tuning}.target_modules={list(self.targets)}: experts have no adapters; choose among attention, "
                "attention_qkv, attention_dense"
            )
        entries = self.entries(architecture)
        smallest = min((min(part.shape) for entry in entries for part in entry.parts), default=self.rank)
        if self.rank > smallest:
            yield f"{tuning}.adapter_dim={self.rank}: a matrix of the model has only {smallest} rows or columns"
        stages = {entry.stage(architecture.num_layers, pp_size) for entry in entries}
        if len(stages) < pp_size:
            yield (
                f"{tuning}.layer_selection={list(self.layers or ())}, model.pipeline_model_parallel_size={pp_size}: "
                "every pipeline stage needs a layer with an adapter; select more, or use fewer stages"
            )


def _module_of(entry: LayoutEntry) -> str | None:
    """The linear layer, within its transformer layer, that a parameter is the weight of; None if it is no matrix."""
    module, _, kind = entry.megatron_names[0].split(".", 3)[-1].rpartition(".")
    return module if kind == "weight" else None


class Adapter(torch.nn.Module):
    """The adapters of one linear layer.

    Args:
        entry: the layer's weight in the layout table.
        lora: what kind of adapters.
        config: of the model's layers.
        tp_rank: this rank's number among those that share the layer.
    """

    _owner: torch.Tensor

    def __init__(self, entry: LayoutEntry, lora: LoraSettings, config: LayerConfig, tp_rank: int) -> None:
        super().__init__()
        self.names = [part.name.removesuffix(".weight") for part in entry.parts]
        self.scale, self.rank, self.dropout = lora.alpha / lora.rank, lora.rank, lora.dropout
        self._entry, self._tp_rank, self._is_row_parallel = entry, tp_rank, entry.split_dim == 1
        self._is_split = config.tensor_model_parallel_size > 1
        self._sequence_parallel = config.sequence_parallel
        rows, columns = entry.shard_shape(config.tensor_model_parallel_size)
        self._pieces = [piece for piece in entry.pieces(config.tensor_model_parallel_size) if piece.rank == tp_rank]
        # Under sequence parallelism a rank's gradient of what all ranks have is from its share of the tokens.
        self.a = self._parameter(len(self.names) * lora.rank, columns, self._is_row_parallel, 1, config.params_dtype)
        self.b = self._parameter(rows, lora.rank, not self._is_row_parallel, 0, config.params_dtype)
        owner = torch.zeros(rows, len(self.names), dtype=config.params_dtype)
        for piece in () if self._is_row_parallel else self._pieces:
            owner[piece.offset : piece.offset + piece.length, piece.part] = 1
        self.register_buffer("_owner", owner, persistent=False)  # whether a row of B belongs to an A
        self._initialize(lora)

    def _parameter(self, rows: int, columns: int, is_split: bool, dim: int, dtype: torch.dtype) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.empty(rows, columns, dtype=dtype))
        set_tensor_model_parallel_attributes(parameter, is_split, dim, 1)
        parameter.sequence_parallel = self._sequence_parallel and not is_split  # type: ignore[attr-defined]
        return parameter

    def _initialize(self, lora: LoraSettings) -> None:
        """Draw the first values: the same whatever the layout."""
        whole: dict[str, torch.Tensor] = {}

        def first(part: Part) -> torch.Tensor:
            if part.key not in whole:
                generator = torch.Generator().manual_seed(derive_seed(lora.seed, part.key))
                init = _INITS[lora.init_a if part.key.endswith(A_WEIGHT) else lora.init_b]
                whole[part.key] = init(torch.empty(part.shape), generator=generator)
            return whole[part.key]

        for _, parts in self.parameter_parts():
            fill(parts, first)

    def parameter_parts(self) -> list[tuple[torch.Tensor, list[Part]]]:
        """What this rank has of the adapters, by parameter, for checkpoints."""
        shapes = [part.shape for part in self._entry.parts]
        rank, is_row, is_first = self.rank, self._is_row_parallel, self._tp_rank == 0
        of_a = [
            Part(
                ADAPTER_PREFIX + name + A_WEIGHT,
                (rank, shape[1]),
                (0, self._tp_rank * self.a.shape[1] if is_row else 0),
                self.a.detach()[i * rank : (i + 1) * rank],
                is_main=is_row or is_first,
            )
            for i, (name, shape) in enumerate(zip(self.names, shapes, strict=True))
        ]
        if is_row:
            key, b = ADAPTER_PREFIX + self.names[0] + B_WEIGHT, self.b.detach()
            return [(self.a, of_a), (self.b, [Part(key, (shapes[0][0], rank), (0, 0), b, is_first)])]
        of_b = [
            Part(
                ADAPTER_PREFIX + self.names[piece.part] + B_WEIGHT,
                (shapes[piece.part][0], rank),
                (piece.start, 0),
                self.b.detach()[piece.offset : piece.offset + piece.length],
            )
            for piece in self._pieces
        ]
        return [(self.a, of_a), (self.b, of_b)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the adapters add to the result of the layer whose input is x."""
        group = parallel_state.get_tensor_model_parallel_group() if self._is_split else None
        with not_keeping(x):
            low = linear(self._dropped(x), self.a) * self.scale
        if not self._is_row_parallel:
            shares = self._sequence_parallel
            sums = self._is_split and not shares
            return linear(low, self._own_b(), group, allreduce_dgrad=sums, sequence_parallel=shares)
        if self._sequence_parallel:
            low = reduce_scatter_to_sequence_parallel_region(low)
        elif self._is_split:
            low = reduce_from_tensor_model_parallel_region(low)
        return linear(low, self.b)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.dropout:
            return x
        # What every rank has must be dropped alike on all of them, what each has a part of by streams of their own.
        is_shared = not (self._is_row_parallel or self._sequence_parallel)
        with contextlib.nullcontext() if is_shared else get_cuda_rng_tracker().fork():
            return F.dropout(x, self.dropout)

    def _own_b(self) -> torch.Tensor:
        """B [n, number of A's * rank], with zeros where a row belongs to another A."""
        if len(self.names) == 1:
            return self.b
        return (self.b[:, None, :] * self._owner[..., None]).flatten(1)

    @torch.no_grad()
    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """This rank's part of W + alpha / rank * B A, of W's dtype, in new memory; summed in fp32."""
        whole = torch.addmm(weight.float(), self._own_b().float(), self.a.float(), alpha=self.scale)
        return whole.to(weight.dtype)


def fill(parts: list[Part], whole: Callable[[Part], torch.Tensor]) -> None:
    """Copy to each part its box of the tensor that ``whole`` returns for it."""
    for part in parts:
        box = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.data.shape, strict=True))
        part.data.copy_(whole(part)[box])


def add_adapters(
    gpt: GPTModel, architecture: ModelArchitecture, layout: ParallelLayout, lora: LoraSettings
) -> dict[torch.nn.Parameter, Adapter]:
    """Give this stage's layers their adapters, and freeze everything else but a reward head.

    Returns:
        The adapters by the weights beside which they are.
    """
    for name, parameter in gpt.named_parameters():
        parameter.requires_grad_(name.startswith("rm_head."))
    found = {}
    first = layout.pp_rank * (architecture.num_layers // layout.pp_size)
    for entry in lora.entries(architecture):
        if entry.stage(architecture.num_layers, layout.pp_size) != layout.pp_rank:
            continue
        layer = gpt.decoder.layers[int(entry.place) - first]
        module = layer.get_submodule(_module_of(entry))
        module.adapter = Adapter(entry, lora, gpt.config, layout.tp_rank).to(module.weight.device)
        module.register_forward_hook(_add_adapter)
        layer.is_one_function = False
        found[module.weight] = module.adapter
    if gpt.pre_process and gpt.config.recompute_granularity:
        gpt.embedding.register_forward_hook(_begin_graph)
    return found


def _add_adapter(
    module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], result: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, bias = result
    adapter = module.adapter
    assert isinstance(adapter, Adapter)
    return out + adapter(inputs[0]), bias


def _begin_graph(_module: torch.nn.Module, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
    """Functions that are computed again have gradients only if their input does, and the embedding is frozen."""
    return out.requires_grad_() if torch.is_grad_enabled() else out
