"""The forward pass of `TorchStep`: this rank's part of a model, over pages of keys and values, and its weights.

Everything but attention works on one packed axis of ``t`` tokens. The residual stream and the norms are float32
whatever the dtype of the weights; matrix products and attention run in that dtype.

Matrices are laid out as Megatron's (see `weight_table.layer_rows`), so that the weights can be a trainer's own memory
where that has the same tensor parallelism; else they are buffers, filled by name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from nemo_style_aligner.engine.embedded.step import EngineShape
from nemo_style_aligner.engine.embedded.torch_operations import (
    LOADED_BYTES,
    Batch,
    ExpertMatrices,
    HeadWeights,
    Norm,
    TorchOperations,
)
from nemo_style_aligner.engine.embedded.trainer_weights import TrainerWeights
from nemo_style_aligner.engine.embedded.weight_table import Rows, Write, layer_rows, mlp_rows
from nemo_style_aligner.engine.softcaps import capped
from nemo_style_aligner.engine.weights.layout import LAYER_NORMS, ROUTER_BIAS


class TorchWeights:
    """All weights of this rank's shard.

    Attributes:
        buffers: the engine's own tensors.
        writes: Hugging Face name -> what stores this rank's part of the tensor in them.
    """

    def __init__(self, shape: EngineShape, device: torch.device, trainer: TrainerWeights) -> None:
        self.shape = shape
        self.buffers: list[torch.Tensor] = []
        self.writes: dict[str, Write] = {}
        self._device = device
        self._trainer = trainer
        a, shard = shape.architecture, shape.shard
        vocabulary, size = Rows(0, shard.held_vocab_rows), (shard.vocab_rows, a.hidden_size)
        self.embedding = self.tensor({"model.embed_tokens.weight": vocabulary}, size, shape.dtype)
        self.head = self.embedding
        if not a.tied_embeddings:
            self.head = self.tensor({"lm_head.weight": vocabulary}, size, shape.dtype)
        self.layers = [LayerWeights(self, index) for index in range(a.num_layers)]
        self.final_norm = self.norm("model.norm")

    def locate(self) -> None:
        """Note where the memory of experts lies: to be called when buffers have got memory anew."""
        for layer in self.layers:
            if isinstance(layer.mlp, ExpertWeights):
                layer.mlp.matrices.locate()

    def linear(self, parts: dict[str, Rows], columns: int, has_bias: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A matrix [all rows of ``parts``, ``columns``] and its bias; ``parts``: module names and their rows."""
        rows, dtype = Rows.total(parts), self.shape.dtype
        weight = self.tensor({f"{name}.weight": part for name, part in parts.items()}, (rows, columns), dtype)
        if not has_bias:
            return weight, None
        return weight, self.tensor({f"{name}.bias": part for name, part in parts.items()}, (rows,), dtype)

    def norm(self, name: str) -> Norm:
        """Weight and bias of a norm. They work on the float32 residual stream, so they are float32 in every dtype."""
        a = self.shape.architecture
        names = [f"{name}.weight", f"{name}.bias"] if a.norm_has_bias else [f"{name}.weight"]
        found = [self.tensor({each: Rows(0, a.hidden_size)}, (a.hidden_size,), torch.float32) for each in names]
        return found[0], found[1] if len(found) > 1 else None

    def tensor(self, parts: dict[str, Rows], size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor that ``parts`` make up; they cover all rows but those that pad the vocabulary."""
        names = tuple(parts)
        viewed = self._trainer.find(names, size, (dtype,), self._device)
        if viewed is not None and not viewed.data_ptr() % LOADED_BYTES:
            self._trainer.viewed[names] = viewed
            return viewed
        tensor = torch.empty(size, dtype=dtype, device=self._device)
        self.buffers.append(tensor)
        self.writes |= {name: _writing(rows.of(tensor)) for name, rows in parts.items()}
        return tensor


class LayerWeights:
    """Weights of this rank's part of one layer; q, k, v are fused, so are gate and up.

    Attributes:
        norms: by their keys in `LAYER_NORMS`.
    """

    def __init__(self, weights: TorchWeights, layer: int) -> None:
        a, shard, prefix = weights.shape.architecture, weights.shape.shard, f"model.layers.{layer}."
        matrices = layer_rows(shard, prefix)
        self.qkv, self.qkv_bias = weights.linear(matrices["qkv"], a.hidden_size, a.bias or a.qkv_bias)
        self.output, self.output_bias = weights.linear(matrices["output"], shard.query_size, a.bias)
        self.mlp: MlpWeights | ExpertWeights
        if a.layers[layer].experts is None:
            self.mlp = MlpWeights(weights, f"{prefix}mlp.", shard.ffn_size)
        else:
            self.mlp = ExpertWeights(weights, f"{prefix}mlp.")
        names = LAYER_NORMS[a.layers[layer].layer_norms]
        self.norms = {kind: weights.norm(prefix + name) for kind, name in names.items()}
        head_norms = sinks = None
        if sizes := shard.qk_norm_sizes:
            names_and_sizes = zip((f"{prefix}self_attn.{part}_norm.weight" for part in "qk"), sizes, strict=True)
            query, key = (weights.tensor({name: Rows(0, n)}, (n,), torch.float32) for name, n in names_and_sizes)
            head_norms = query, key
        if a.attention_sinks:
            rows = Rows(0, shard.num_heads)
            sinks = weights.tensor({f"{prefix}self_attn.sinks": rows}, (shard.num_heads,), torch.float32)
        self.heads = HeadWeights(head_norms, sinks)


class MlpWeights:
    """This rank's part of an MLP or an expert: [2 f or f, h], gate over up, and [h, f]; their biases."""

    def __init__(self, weights: TorchWeights, prefix: str, size: int) -> None:
        a = weights.shape.architecture
        matrices = mlp_rows(weights.shape.shard, prefix, size)
        self.fc1, self.fc1_bias = weights.linear(matrices["fc1"], a.hidden_size, a.bias)
        self.fc2, self.fc2_bias = weights.linear(matrices["fc2"], size, a.bias)


class ExpertWeights:
    """A layer's router [experts, h], its bias and that of its choice, float32 [experts], or None; this rank's part of
    each expert.
    """

    fc2_bias = None

    def __init__(self, weights: TorchWeights, prefix: str) -> None:
        experts, shard = weights.shape.architecture.experts, weights.shape.shard
        assert experts is not None
        a, rows = shard.architecture, Rows(0, experts.number)
        self.router, self.router_bias = weights.linear({f"{prefix}gate": rows}, a.hidden_size, a.bias)
        self.choice_bias = None
        if experts.has_bias:
            names, size = {f"{prefix}gate.{ROUTER_BIAS}": rows}, (experts.number,)
            self.choice_bias = weights.tensor(names, size, torch.float32)
        self.shared: MlpWeights | None = None
        if experts.shared_ffn_hidden_size:
            self.shared = MlpWeights(weights, f"{prefix}shared_experts.", experts.shared_ffn_hidden_size // shard.size)
        each = [MlpWeights(weights, f"{prefix}experts.{n}.", shard.expert_size) for n in range(experts.number)]
        self.matrices = ExpertMatrices(
            tuple(expert.fc1 for expert in each),
            tuple(expert.fc2 for expert in each),
            tuple(expert.fc1_bias for expert in each if expert.fc1_bias is not None),
            tuple(expert.fc2_bias for expert in each if expert.fc2_bias is not None),
        )


def _writing(view: torch.Tensor) -> Write:
    """Stores a part in ``view``, whose leading dimensions may divide the part's rows."""
    return lambda part: view.copy_(part.reshape(view.shape))


class TorchModel:
    """Computes logits from a `Batch`, reading weights and reading and writing pages; it has no state of its own."""

    def __init__(
        self, shape: EngineShape, weights: TorchWeights, pages: list[torch.Tensor], operations: TorchOperations
    ) -> None:
        """``pages``: per layer [pages, PAGE_TOKENS, 2 * groups, kv_channels], keys and then values."""
        self._a = shape.architecture
        self._dtype = shape.dtype
        self._shard = shape.shard
        self._tensor_parallel = shape.tensor_parallel
        self._weights = weights
        self._pages = pages
        self._operations = operations

    def forward(self, batch: Batch) -> torch.Tensor:
        """Logits [o, vocab_size], of `logits_dtype`. Collective over the tensor-parallel ranks."""
        ops, weights, reduce = self._operations, self._weights, self._tensor_parallel.all_reduce
        attention = ops.attention_of(batch)
        hidden = self._embed(batch.token_ids)
        if self._a.embedding_multiplier != 1:
            hidden *= self._a.embedding_multiplier
        product, bias, product_norm = None, None, None  # not yet added to the hidden states
        for layer, pages, features in zip(weights.layers, self._pages, self._a.layers, strict=True):
            norms = layer.norms
            normed = ops.add_and_norm(hidden, product, bias, product_norm, norms.get("input_norm"))
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
            product = F.linear(attention(qkv, layer.heads, pages, features), layer.output)
            reduce(product)  # each rank has multiplied its columns of the matrix
            normed = ops.add_and_norm(
                hidden, product, layer.output_bias, norms.get("attention_out_norm"), norms.get("mlp_norm")
            )
            if isinstance(layer.mlp, ExpertWeights):
                product = self._experts(normed, layer.mlp, batch)
            else:
                product = self._mlp(normed, layer.mlp)
            reduce(product)
            bias, product_norm = layer.mlp.fc2_bias, norms.get("mlp_out_norm")
        if batch.output_rows is not None:
            hidden = hidden[batch.output_rows]
            product = None if product is None else product[batch.output_rows]
        return self._logits(ops.add_and_norm(hidden, product, bias, product_norm, weights.final_norm))

    def _mlp(self, x: torch.Tensor, mlp: MlpWeights) -> torch.Tensor:
        """What this rank's part of an MLP adds to the sum over ranks: [t, h] -> [t, h]."""
        return F.linear(self._operations.activate(F.linear(x, mlp.fc1, mlp.fc1_bias)), mlp.fc2)

    def _experts(self, x: torch.Tensor, mlp: ExpertWeights, batch: Batch) -> torch.Tensor:
        """The same of experts; the batch gets which of them each token has."""
        logits = _wide_product(x, mlp.router, mlp.router_bias)
        chosen, weights = self._operations.route(logits, mlp.choice_bias)
        batch.routes.append(chosen)
        out = self._operations.experts(x, chosen, weights, mlp.matrices)
        return out if mlp.shared is None else out + self._mlp(x, mlp.shared)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings, float32 [t, hidden]: each rank looks up the ids it holds, and the ranks' results are summed."""
        if self._tensor_parallel.size == 1:
            return F.embedding(token_ids, self._weights.embedding).float()
        rows = token_ids - self._shard.vocab_start
        elsewhere = (rows < 0) | (rows >= self._shard.vocab_rows)
        hidden = F.embedding(rows.masked_fill(elsewhere, 0), self._weights.embedding).float()
        hidden = hidden.masked_fill(elsewhere[:, None], 0.0)
        self._tensor_parallel.all_reduce(hidden)
        return hidden

    def _logits(self, last: torch.Tensor) -> torch.Tensor:
        """Logits [o, vocab_size], joined from the ranks' columns."""
        dtype, weight = logits_dtype(self._dtype, last.device), self._weights.head
        # On a GPU without rounding in between.
        logits = F.linear(last, weight) if dtype == last.dtype else torch.mm(last, weight.t(), out_dtype=dtype)
        if self._a.logits_scaling != 1:
            logits /= self._a.logits_scaling
        logits = capped(logits, self._a.final_logit_softcapping)
        if self._tensor_parallel.size == 1:
            return logits
        return torch.cat(self._tensor_parallel.all_gather(logits), dim=-1)[:, : self._a.vocab_size]


def _wide_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` in float32: products of two numbers of 16 bits are exact in it."""
    if x.dtype != torch.float32 and x.device.type == "cuda":
        product = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return product if bias is None else product + bias
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float())


def logits_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Dtype of the logits of a model that computes in ``dtype``: GPUs accumulate in float32 and need not round it."""
    return torch.float32 if device.type == "cuda" else dtype
