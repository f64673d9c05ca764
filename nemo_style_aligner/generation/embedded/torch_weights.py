"""Weights of `TorchStep`: fused, preallocated, filled by name; in the engine's dtype or as int8 rows.

Matrices are laid out as Megatron's (see `fused_rows`), so that a trainer with the same tensor parallelism can lend its
own.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F

from nemo_style_aligner.generation.embedded.fused_rows import Rows, layer_rows
from nemo_style_aligner.generation.embedded.lent_weights import LentWeights
from nemo_style_aligner.generation.embedded.step import EngineShape
from nemo_style_aligner.generation.embedded.weight_table import (
    Destination,
    TiedDestination,
    ViewDestination,
    quantize_rows,
)

_QUANTIZED_ROWS = 4096  # at a time: bounds the temporary memory of a refit


def _view(tensor: torch.Tensor, rows: Rows) -> ViewDestination:
    """``rows`` of ``tensor`` [rows, ...]."""
    if rows.groups == 1:
        return ViewDestination(tensor.narrow(0, rows.start, rows.count))
    return ViewDestination(tensor.unflatten(0, (rows.groups, -1)).narrow(1, rows.start, rows.count), row_dims=2)


class Matrix:
    """A weight [out, in] in the engine's dtype."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [t, in] times the transposed weight, plus ``bias`` [out], in the dtype of ``x``."""
        return F.linear(x, self._weight, bias)

    def logits(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`product` in ``dtype``: that of ``x`` or, on a GPU, float32 without intermediate rounding."""
        return self.product(x) if dtype == x.dtype else torch.mm(x, self._weight.t(), out_dtype=dtype)


class Int8Matrix(Matrix):
    """A weight [out, in] as int8 with one float32 scale per output row: weight = scale * integers."""

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self._integers = integers
        self._scale = scale

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `Matrix.product`. The integers are exact in every dtype; the scale is applied to the output."""
        out = F.linear(x, self._integers.to(x.dtype)) * self._scale
        return (out if bias is None else out + bias).to(x.dtype)

    def logits(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """As `Matrix.logits`."""
        return Matrix(self._integers.to(x.dtype)).logits(x, dtype).mul_(self._scale)


@dataclasses.dataclass(frozen=True)
class Int8Destination:
    """Some rows of an `Int8Matrix`."""

    integers: torch.Tensor  # int8 [all rows, in]
    scale: torch.Tensor  # float32 [all rows]
    rows: torch.Tensor  # int64

    def write(self, part: torch.Tensor) -> None:
        """See `Destination.write`."""
        for start in range(0, len(part), _QUANTIZED_ROWS):
            chunk = slice(start, start + _QUANTIZED_ROWS)
            integers, scale = quantize_rows(part[chunk].to(self.scale.device))
            self.integers[self.rows[chunk]] = integers.to(torch.int8)
            self.scale[self.rows[chunk]] = scale

    def read(self, rows: slice) -> torch.Tensor:
        """See `Destination.read`; float32."""
        return self.integers[self.rows[rows]] * self.scale[self.rows[rows], None]

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """See `Destination.as_stored`."""
        integers, scale = quantize_rows(part.to(self.scale.device))
        return integers.to(torch.int8) * scale[:, None]


class Shelf:
    """Provides weights: the trainer's own memory where that holds just what is wanted, else new buffers.

    Attributes:
        buffers: the new ones.
        destinations: Hugging Face name -> where a refit writes this rank's part of the tensor.
    """

    def __init__(self, shape: EngineShape, device: torch.device, lent: LentWeights) -> None:
        self.shape = shape
        self.buffers: list[torch.Tensor] = []
        self.destinations: dict[str, Destination] = {}
        self._device = device
        self._lent = lent

    def linear(self, parts: dict[str, Rows], columns: int, has_bias: bool) -> tuple[Matrix, torch.Tensor | None]:
        """A matrix [all rows of ``parts``, ``columns``] and its bias; ``parts``: module names and their rows."""
        rows = Rows.total(parts)
        weight = self.matrix({f"{name}.weight": part for name, part in parts.items()}, (rows, columns))
        if not has_bias:
            return weight, None
        return weight, self.tensor({f"{name}.bias": part for name, part in parts.items()}, (rows,), self.shape.dtype)

    def norm(self, name: str, size: int, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weight and bias of a norm. They work on the float32 residual stream, so they are float32 in every dtype."""
        rows = Rows(0, size)
        weight = self.tensor({f"{name}.weight": rows}, (size,), torch.float32)
        return weight, self.tensor({f"{name}.bias": rows}, (size,), torch.float32) if has_bias else None

    def matrix(self, parts: dict[str, Rows], size: tuple[int, int]) -> Matrix:
        """A matrix in the engine's format; ``parts``: tensors and their rows."""
        if self.shape.weight_format == "dtype":
            return Matrix(self.tensor(parts, size, self.shape.dtype))
        integers, scale = self.new(size, torch.int8), self.new(size[:1], torch.float32)
        self.destinations |= {
            name: Int8Destination(integers, scale, rows.numbers(size[0]).to(self._device))
            for name, rows in parts.items()
        }
        return Int8Matrix(integers, scale)

    def tensor(self, parts: dict[str, Rows], size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor that ``parts`` make up; they cover all rows but those that pad the vocabulary."""
        lent = self._lent.view(tuple(parts), size, dtype, self._device)
        if lent is not None:
            return lent
        tensor = self.new(size, dtype)
        self.destinations |= {name: _view(tensor, rows) for name, rows in parts.items()}
        return tensor

    def new(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A buffer without destinations yet."""
        self.buffers.append(torch.empty(size, dtype=dtype, device=self._device))
        return self.buffers[-1]


class LayerWeights:
    """Weights of this rank's part of one layer; q, k, v are fused, so are gate and up."""

    def __init__(self, shelf: Shelf, prefix: str) -> None:
        a, shard = shelf.shape.architecture, shelf.shape.shard
        matrices = layer_rows(shard, prefix)
        self.qkv, self.qkv_bias = shelf.linear(matrices["qkv"], a.hidden_size, a.bias or a.qkv_bias)
        self.output, self.output_bias = shelf.linear(matrices["output"], shard.query_size, a.bias)
        self.fc1, self.fc1_bias = shelf.linear(matrices["fc1"], a.hidden_size, a.bias)
        self.fc2, self.fc2_bias = shelf.linear(matrices["fc2"], shard.ffn_size, a.bias)
        biased = a.normalization != "rmsnorm"
        self.input_norm, self.input_norm_bias = shelf.norm(f"{prefix}input_layernorm", a.hidden_size, biased)
        self.mlp_norm, self.mlp_norm_bias = shelf.norm(f"{prefix}post_attention_layernorm", a.hidden_size, biased)
        self.head_norms: tuple[torch.Tensor, torch.Tensor] | None = None  # of queries, of keys
        if a.qk_layernorm:
            names = (f"{prefix}self_attn.q_norm", f"{prefix}self_attn.k_norm")
            query, key = (shelf.norm(name, a.kv_channels, has_bias=False)[0] for name in names)
            self.head_norms = query, key


class TorchWeights:
    """All weights of this rank's shard.

    Attributes:
        buffers, destinations: see `Shelf`.
    """

    def __init__(self, shape: EngineShape, device: torch.device, lent: LentWeights) -> None:
        a, shard = shape.architecture, shape.shard
        shelf = Shelf(shape, device, lent)
        self.buffers, self.destinations = shelf.buffers, shelf.destinations
        vocab = Rows(0, shard.held_vocab_rows)
        size = (shard.vocab_rows, a.hidden_size)
        name = "model.embed_tokens.weight"
        if a.tied_embeddings and shape.weight_format != "dtype":
            # The lookup has the engine's dtype, the output layer is int8: a refit must write both, so nothing is lent.
            self.embedding = shelf.new(size, shape.dtype)
            self.head = shelf.matrix({name: vocab}, size)
            shelf.destinations[name] = TiedDestination(_view(self.embedding, vocab), shelf.destinations[name])
        else:
            self.embedding = shelf.tensor({name: vocab}, size, shape.dtype)
            self.head = Matrix(self.embedding) if a.tied_embeddings else shelf.matrix({"lm_head.weight": vocab}, size)
        self.layers = [LayerWeights(shelf, f"model.layers.{index}.") for index in range(a.num_layers)]
        self.final_norm, self.final_norm_bias = shelf.norm(
            "model.norm", a.hidden_size, has_bias=a.normalization != "rmsnorm"
        )

    @property
    def num_bytes(self) -> int:
        """Size of the engine's own buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)
