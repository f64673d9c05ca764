"""The engine's own copy of the weights: fused, preallocated, filled by name."""

from __future__ import annotations

from typing import Literal

import torch

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.engine import WeightStream

RefitCheck = Literal["off", "sampled", "full"]

_SAMPLED_VALUES = 1024  # per tensor, under refit_check=sampled
_FINGERPRINT_CHUNK = 1 << 20  # values hashed at a time: bounds the temporary memory of a full check


class LayerWeights:
    """Buffers of one layer. Projections are [out, in]; q, k, v are fused, so are gate and up."""

    def __init__(self, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        a = architecture
        query, group = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
        fc1_rows = a.ffn_hidden_size * (2 if a.gated else 1)

        def buffer(*shape: int, exists: bool = True, kind: torch.dtype = dtype) -> torch.Tensor | None:
            return torch.empty(shape, dtype=kind, device=device) if exists else None

        has_norm_bias = a.normalization != "rmsnorm"
        self.qkv = torch.empty(query + 2 * group, a.hidden_size, dtype=dtype, device=device)
        self.qkv_bias = buffer(query + 2 * group, exists=a.bias or a.qkv_bias)
        self.output = torch.empty(a.hidden_size, query, dtype=dtype, device=device)
        self.output_bias = buffer(a.hidden_size, exists=a.bias)
        self.fc1 = torch.empty(fc1_rows, a.hidden_size, dtype=dtype, device=device)
        self.fc1_bias = buffer(fc1_rows, exists=a.bias)
        self.fc2 = torch.empty(a.hidden_size, a.ffn_hidden_size, dtype=dtype, device=device)
        self.fc2_bias = buffer(a.hidden_size, exists=a.bias)
        # Norms work on the float32 residual stream, so their weights are float32 in every dtype.
        self.input_norm = torch.empty(a.hidden_size, device=device, dtype=torch.float32)
        self.input_norm_bias = buffer(a.hidden_size, exists=has_norm_bias, kind=torch.float32)
        self.mlp_norm = torch.empty(a.hidden_size, device=device, dtype=torch.float32)
        self.mlp_norm_bias = buffer(a.hidden_size, exists=has_norm_bias, kind=torch.float32)
        self.query_norm = buffer(a.kv_channels, exists=a.qk_layernorm, kind=torch.float32)
        self.key_norm = buffer(a.kv_channels, exists=a.qk_layernorm, kind=torch.float32)


class ModelWeights:
    """All weights of a model, addressed by Hugging Face name through views into fused buffers.

    The buffers live as long as the object: `copy_from` fills them, `release` and `acquire` below give
    their memory back and take it again, and every tensor and view stays the same object throughout.
    """

    def __init__(self, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device) -> None:
        a = architecture
        self.layers = [LayerWeights(a, dtype, device) for _ in range(a.num_layers)]
        self.embedding = torch.empty(a.vocab_size, a.hidden_size, dtype=dtype, device=device)
        self.head = self.embedding if a.tied_embeddings else torch.empty_like(self.embedding)  # [vocab, hidden]
        self.final_norm = torch.empty(a.hidden_size, dtype=torch.float32, device=device)
        self.final_norm_bias = torch.empty_like(self.final_norm) if a.normalization != "rmsnorm" else None
        self._views = _name_views(self, a)

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Every buffer once."""
        owned = [tensor for layer in self.layers for tensor in vars(layer).values() if tensor is not None]
        owned += [self.embedding, self.final_norm]
        owned += [] if self.head is self.embedding else [self.head]
        return owned + ([] if self.final_norm_bias is None else [self.final_norm_bias])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that a refit must bring."""
        return {name: tuple(view.shape) for name, view in self._views.items()}

    def copy_from(self, stream: WeightStream, check: RefitCheck) -> None:
        """Copy the whole stream in; casts to the buffers' dtypes.

        With ``check`` each tensor's bits are hashed before it is copied (all of them, or about
        a thousand values per tensor) and compared with the buffers' after the last one.

        Raises:
            ValueError: a tensor is missing, unknown, given twice or of the wrong shape, or the
                check failed. The content is then undefined.
        """
        expected: dict[str, int] = {}
        seen: set[str] = set()
        for name, tensor in stream:
            view = self._views.get(name)
            if view is None:
                raise ValueError(f"refit: unexpected tensor {name!r}; {_nearest(name, self._views)}")
            if name in seen:
                raise ValueError(f"refit: tensor {name!r} comes twice in the stream")
            if tensor.shape != view.shape:
                raise ValueError(
                    f"refit: tensor {name!r} has shape {tuple(tensor.shape)}, the engine was built for "
                    f"{tuple(view.shape)}; refit with full, unsharded and unpadded tensors of the same model"
                )
            seen.add(name)
            view.copy_(tensor)
            if check != "off":
                expected[name] = _fingerprint(tensor.detach().to(view.device, view.dtype), check)
        missing = [name for name in self._views if name not in seen]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(f"refit: tensor {missing[0]!r}{more} missing from the stream")
        for name, value in expected.items():
            if _fingerprint(self._views[name], check) != value:
                raise ValueError(f"refit: check failed, tensor {name!r} changed while or after it was copied")


def _name_views(weights: ModelWeights, a: ModelArchitecture) -> dict[str, torch.Tensor]:
    """Hugging Face name -> the (part of a) buffer that holds it."""
    query, group = a.num_attention_heads * a.kv_channels, a.num_query_groups * a.kv_channels
    qkv_sizes = [query, group, group]
    fc1_names = ["gate_proj", "up_proj"] if a.gated else ["up_proj"]
    fc1_sizes = [a.ffn_hidden_size] * len(fc1_names)
    views: dict[str, torch.Tensor | None] = {"model.embed_tokens.weight": weights.embedding}
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        fused = [
            ("self_attn.", ["q_proj", "k_proj", "v_proj"], qkv_sizes, layer.qkv, layer.qkv_bias),
            ("self_attn.", ["o_proj"], [a.hidden_size], layer.output, layer.output_bias),
            ("mlp.", fc1_names, fc1_sizes, layer.fc1, layer.fc1_bias),
            ("mlp.", ["down_proj"], [a.hidden_size], layer.fc2, layer.fc2_bias),
        ]
        for module, names, sizes, matrix, bias in fused:
            for kind, buffer in (("weight", matrix), ("bias", bias)):
                parts = buffer.split(sizes) if buffer is not None else [None] * len(sizes)
                views |= {f"{prefix}{module}{name}.{kind}": part for name, part in zip(names, parts, strict=True)}
        views[prefix + "self_attn.q_norm.weight"] = layer.query_norm
        views[prefix + "self_attn.k_norm.weight"] = layer.key_norm
        views[prefix + "input_layernorm.weight"] = layer.input_norm
        views[prefix + "input_layernorm.bias"] = layer.input_norm_bias
        views[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm
        views[prefix + "post_attention_layernorm.bias"] = layer.mlp_norm_bias
    views["model.norm.weight"] = weights.final_norm
    views["model.norm.bias"] = weights.final_norm_bias
    views["lm_head.weight"] = None if a.tied_embeddings else weights.head
    return {name: view for name, view in views.items() if view is not None}


def _nearest(name: str, known: dict[str, torch.Tensor]) -> str:
    """A hint on why ``name`` is not ``known``."""
    if name == "lm_head.weight":
        return "the engine was built with tied embeddings, so the stream must not bring an output layer"
    if name.endswith(".bias") and name.removesuffix("bias") + "weight" in known:
        return "the engine was built for an architecture without this bias"
    return "the engine was built for another architecture"


def _fingerprint(tensor: torch.Tensor, check: RefitCheck) -> int:
    """Position-dependent 64-bit hash of all, or of evenly spaced, values' bits."""
    flat = tensor.reshape(-1)
    if check == "sampled":
        flat = flat[:: max(1, flat.numel() // _SAMPLED_VALUES)].contiguous()
    bits = flat.view({2: torch.int16, 4: torch.int32}[flat.element_size()])
    total = 0
    for start in range(0, bits.numel(), _FINGERPRINT_CHUNK):
        chunk = bits[start : start + _FINGERPRINT_CHUNK].long()
        weight = torch.arange(start, start + chunk.numel(), device=chunk.device) * 2654435761 + 1
        total = (total + int((chunk * weight).sum())) & ((1 << 64) - 1)
    return total


def release(buffers: list[torch.Tensor]) -> None:
    """Free the memory behind ``buffers``; the tensors and their views stay valid objects."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(0)


def acquire(buffers: list[torch.Tensor]) -> None:
    """Allocate the memory of released ``buffers`` again; the content is undefined."""
    for buffer in buffers:
        buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
