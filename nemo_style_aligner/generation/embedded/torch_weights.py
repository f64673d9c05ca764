"""Weight buffers of `TorchStep`: fused, preallocated, filled by name; in the engine's dtype or as int8 rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from nemo_style_aligner.generation.embedded.step import EngineShape
from nemo_style_aligner.generation.embedded.weight_table import (
    Destination,
    TiedDestination,
    ViewDestination,
    quantize_rows,
)

_QUANTIZED_ROWS = 4096  # at a time: bounds the temporary memory of a refit


class Matrix:
    """A weight [out, in] in the engine's dtype."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._weight = torch.empty(rows, columns, dtype=dtype, device=device)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All tensors it owns."""
        return [self._weight]

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x`` [t, in] times the transposed weight, plus ``bias`` [out], in the dtype of ``x``."""
        return F.linear(x, self._weight, bias)

    def rows(self, start: int, count: int) -> Destination:
        """Where ``count`` rows from ``start`` on go."""
        return ViewDestination(self._weight.narrow(0, start, count))


class TableMatrix(Matrix):
    """An output layer whose weight [vocabulary, hidden] is the embedding's."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    @property
    def buffers(self) -> list[torch.Tensor]:
        """None: the embedding owns the weight."""
        return []


class Int8Matrix(Matrix):
    """A weight [out, in] as int8 with one float32 scale per output row: weight = scale * integers."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        self._integers = torch.empty(rows, columns, dtype=torch.int8, device=device)
        self._scale = torch.empty(rows, dtype=torch.float32, device=device)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """All tensors it owns."""
        return [self._integers, self._scale]

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """As `Matrix.product`. The integers are exact in every dtype, so the scale can wait for the output."""
        out = F.linear(x, self._integers.to(x.dtype)) * self._scale
        return (out if bias is None else out + bias).to(x.dtype)

    def rows(self, start: int, count: int) -> Destination:
        """Where ``count`` rows from ``start`` on go."""
        return Int8Destination(self._integers.narrow(0, start, count), self._scale.narrow(0, start, count))


@dataclasses.dataclass(frozen=True)
class Int8Destination:
    """Rows of an `Int8Matrix`."""

    integers: torch.Tensor  # int8 [rows, in]
    scale: torch.Tensor  # float32 [rows]

    def write(self, part: torch.Tensor) -> None:
        """See `Destination.write`."""
        for start in range(0, len(part), _QUANTIZED_ROWS):
            rows = slice(start, start + _QUANTIZED_ROWS)
            integers, scale = quantize_rows(part[rows].to(self.scale.device))
            self.integers[rows] = integers
            self.scale[rows] = scale

    def read(self, rows: slice) -> torch.Tensor:
        """See `Destination.read`; float32."""
        return self.integers[rows] * self.scale[rows, None]

    def as_stored(self, part: torch.Tensor) -> torch.Tensor:
        """See `Destination.as_stored`."""
        integers, scale = quantize_rows(part.to(self.scale.device))
        return integers.to(torch.int8) * scale[:, None]


class LayerWeights:
    """Weights of this rank's part of one layer; q, k, v are fused, so are gate and up."""

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        a, shard = shape.architecture, shape.shard
        qkv_rows = shard.query_size + 2 * shard.group_size
        fc1_rows = shard.ffn_size * (2 if a.gated else 1)

        def vector(size: int, exists: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor | None:
            return torch.empty(size, dtype=dtype, device=device) if exists else None

        has_norm_bias = a.normalization != "rmsnorm"
        self.qkv = make_matrix(shape, qkv_rows, a.hidden_size, device)
        self.qkv_bias = vector(qkv_rows, a.bias or a.qkv_bias, shape.dtype)
        self.output = make_matrix(shape, a.hidden_size, shard.query_size, device)
        self.output_bias = vector(a.hidden_size, a.bias, shape.dtype)
        self.fc1 = make_matrix(shape, fc1_rows, a.hidden_size, device)
        self.fc1_bias = vector(fc1_rows, a.bias, shape.dtype)
        self.fc2 = make_matrix(shape, a.hidden_size, shard.ffn_size, device)
        self.fc2_bias = vector(a.hidden_size, a.bias, shape.dtype)
        # Norms work on the float32 residual stream, so their weights are float32 in every dtype.
        self.input_norm = torch.empty(a.hidden_size, dtype=torch.float32, device=device)
        self.input_norm_bias = vector(a.hidden_size, has_norm_bias)
        self.mlp_norm = torch.empty(a.hidden_size, dtype=torch.float32, device=device)
        self.mlp_norm_bias = vector(a.hidden_size, has_norm_bias)
        self.query_norm = vector(a.kv_channels, a.qk_layernorm)
        self.key_norm = vector(a.kv_channels, a.qk_layernorm)


class TorchWeights:
    """All weights of this rank's shard."""

    def __init__(self, shape: EngineShape, device: torch.device) -> None:
        a, shard = shape.architecture, shape.shard
        self.layers = [LayerWeights(shape, device) for _ in range(a.num_layers)]
        self.embedding = torch.empty(shard.vocab_rows, a.hidden_size, dtype=shape.dtype, device=device)
        self.shares_embedding = a.tied_embeddings and shape.weight_format == "dtype"
        self.head = (
            TableMatrix(self.embedding)
            if self.shares_embedding
            else make_matrix(shape, shard.vocab_rows, a.hidden_size, device)
        )
        self.final_norm = torch.empty(a.hidden_size, dtype=torch.float32, device=device)
        self.final_norm_bias = torch.empty_like(self.final_norm) if a.normalization != "rmsnorm" else None

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Every tensor once."""
        owners = [*(value for layer in self.layers for value in vars(layer).values()), *vars(self).values()]
        found: list[torch.Tensor] = []
        for owner in owners:
            if isinstance(owner, Matrix):
                found += owner.buffers
            elif isinstance(owner, torch.Tensor):
                found.append(owner)
        return found


def make_matrix(shape: EngineShape, rows: int, columns: int, device: torch.device) -> Matrix:
    """An unfilled weight in the engine's format."""
    if shape.weight_format == "int8":
        return Int8Matrix(rows, columns, device)
    return Matrix(rows, columns, shape.dtype, device)


def destinations(weights: TorchWeights, shape: EngineShape) -> dict[str, Destination]:
    """Hugging Face name -> where this rank's part of the tensor goes."""
    a, shard = shape.architecture, shape.shard
    # The last ranks' parts of the vocabulary may be shorter than their buffers.
    vocab_rows = max(0, min(shard.vocab_rows, a.vocab_size - shard.vocab_start))
    embedding: Destination = ViewDestination(weights.embedding.narrow(0, 0, vocab_rows))
    head = weights.head.rows(0, vocab_rows)
    found: dict[str, Destination] = {}
    if a.tied_embeddings:
        found["model.embed_tokens.weight"] = embedding if weights.shares_embedding else TiedDestination(embedding, head)
    else:
        found |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    for index, layer in enumerate(weights.layers):
        found |= dict(_layer_destinations(layer, f"model.layers.{index}.", shape))
    found["model.norm.weight"] = ViewDestination(weights.final_norm)
    if weights.final_norm_bias is not None:
        found["model.norm.bias"] = ViewDestination(weights.final_norm_bias)
    return found


def _layer_destinations(layer: LayerWeights, prefix: str, shape: EngineShape) -> Iterator[tuple[str, Destination]]:
    a, shard = shape.architecture, shape.shard
    fc1_names = ["gate_proj", "up_proj"] if a.gated else ["up_proj"]
    fused = (
        (
            "self_attn.",
            ["q_proj", "k_proj", "v_proj"],
            [shard.query_size, shard.group_size, shard.group_size],
            layer.qkv,
            layer.qkv_bias,
        ),
        ("self_attn.", ["o_proj"], [a.hidden_size], layer.output, layer.output_bias),
        ("mlp.", fc1_names, [shard.ffn_size] * len(fc1_names), layer.fc1, layer.fc1_bias),
        ("mlp.", ["down_proj"], [a.hidden_size], layer.fc2, layer.fc2_bias),
    )
    for module, names, sizes, matrix, bias in fused:
        start = 0
        for name, size in zip(names, sizes, strict=True):
            yield f"{prefix}{module}{name}.weight", matrix.rows(start, size)
            if bias is not None:
                yield f"{prefix}{module}{name}.bias", ViewDestination(bias.narrow(0, start, size))
            start += size
    vectors = {
        "self_attn.q_norm.weight": layer.query_norm,
        "self_attn.k_norm.weight": layer.key_norm,
        "input_layernorm.weight": layer.input_norm,
        "input_layernorm.bias": layer.input_norm_bias,
        "post_attention_layernorm.weight": layer.mlp_norm,
        "post_attention_layernorm.bias": layer.mlp_norm_bias,
    }
    for name, vector in vectors.items():
        if vector is not None:
            yield prefix + name, ViewDestination(vector)
