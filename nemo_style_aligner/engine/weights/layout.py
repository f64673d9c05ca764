"""The layout table: which Hugging Face tensors each Megatron parameter is made of, and how ranks split it.

Import, export, refits and checks of files follow it. A parameter of the Megatron model consists of pieces of Hugging
Face tensors, laid end to end along one dimension and then cut evenly over the tensor-parallel ranks. So one
description, a list of `Segment`s, covers every case:

- plain column- or row-parallel: one segment;
- the vocabulary: the embedding's rows, then padding;
- q, k and v in one matrix: per query group its q heads, then k, then v. With more ranks than groups Megatron
  still cuts this same matrix evenly (and gathers the activations), so nothing changes here;
- a gated first MLP layer: per *rank* its share of the gate, then its share of the up projection.

Norm weights are stored as the model stores them: those of ``layernorm1p`` and ``rmsnorm1p`` are offsets from one, on
the Hugging Face side too (as in Nemotron and Gemma).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from nemo_style_aligner.engine.architecture import ModelArchitecture, NormPlaces
from nemo_style_aligner.wording import some_of

if TYPE_CHECKING:
    import torch

    from nemo_style_aligner.engine.parallel.groups import ParallelLayout

Order = Literal["plain", "vocabulary", "query groups", "gated"]

_FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)

LAYER_NORMS: Mapping[NormPlaces, Mapping[str, str]] = {
    "before": {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"},
    "both": {
        "input_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}
"""A layer's norms, in their order: what each is of -> its name in Hugging Face's checkpoints."""

_MEGATRON_NORMS = {
    "input_norm": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "attention_out_norm": ("attention_out_norm.",),
    "mlp_norm": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    "mlp_out_norm": ("mlp_out_norm.",),
}

EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
HEAD_BIAS = "score.bias"
ROUTER_BIAS = "e_score_correction_bias"
PADDING = -1  # the `part` of a segment that comes from no tensor


class HFTensor(NamedTuple):
    """A tensor of the Hugging Face checkpoint: its name and its full shape."""

    name: str
    shape: tuple[int, ...]


class Segment(NamedTuple):
    """``length`` rows (or columns) of tensor number ``part`` from ``start`` on; zeros if ``part`` is `PADDING`."""

    part: int
    start: int
    length: int


class Piece(NamedTuple):
    """What one rank holds of a segment: from ``offset`` on in its shard, from ``start`` on in tensor ``part``."""

    rank: int
    offset: int
    part: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True)
class LayoutEntry:
    """One parameter of the Megatron model.

    Attributes:
        megatron_names: its name in `GPTModel` (layer numbers global): our own layers' name, then Transformer
            Engine's where that differs.
        parts: the Hugging Face tensors it is made of.
        split_dim: the dimension cut over tensor-parallel ranks; None where every rank holds all of it.
        order: how the parts are laid out along ``split_dim``.
        place: the layer it belongs to (0-based), or the end of the model it sits at.
        total: length of ``split_dim`` over all ranks, padding included.
        is_copy: the tied embedding's copy on the last pipeline stage; read on import, skipped on export.
        optional: absent from some checkpoints, which means zero.
        expert: the expert of its layer that it belongs to (0-based), whose matrices are cut over the ranks of
            expert tensor parallelism; None: every rank of a stage has it, or its part of it.
    """

    megatron_names: tuple[str, ...]
    parts: tuple[HFTensor, ...]
    split_dim: int | None
    order: Order
    place: int | Literal["first", "last"]
    total: int = 0
    is_copy: bool = False
    optional: bool = False
    group_rows: tuple[int, ...] = ()  # of "query groups": rows of q, k and v in one group
    expert: int | None = None

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Shape of one rank's shard."""
        shape = list(self.parts[0].shape)
        if self.split_dim is not None:
            shape[self.split_dim] = self.total // tp_size
        return tuple(shape)

    def cut(self, layout: ParallelLayout) -> tuple[int, int]:
        """How many ranks of a stage share it, and this rank's number among them."""
        if self.expert is None:
            return layout.tp_size, layout.tp_rank
        return layout.etp_size, layout.etp_rank

    def owner(self, num_experts: int, ep_size: int) -> int | None:
        """The rank of each expert-parallel group that has it; None: all do."""
        return None if self.expert is None else self.expert // (num_experts // ep_size)

    def stage(self, num_layers: int, pp_size: int) -> int:
        """The pipeline stage that holds it; layers are spread evenly."""
        if self.place == "first":
            return 0
        return pp_size - 1 if self.place == "last" else self.place // (num_layers // pp_size)

    def segments(self, tp_size: int) -> Iterator[Segment]:
        """All ranks' shards laid end to end, as segments of the parts."""
        dim = self.split_dim or 0
        if self.order == "query groups":
            for group in range(self.total // sum(self.group_rows)):
                for part, rows in enumerate(self.group_rows):
                    yield Segment(part, group * rows, rows)
        elif self.order == "gated":
            rows = self.parts[0].shape[dim] // tp_size
            for rank in range(tp_size):
                for part in range(len(self.parts)):
                    yield Segment(part, rank * rows, rows)
        else:
            length = self.parts[0].shape[dim]
            yield Segment(0, 0, length)
            if self.total > length:
                yield Segment(PADDING, 0, self.total - length)

    def pieces(self, tp_size: int) -> list[Piece]:
        """The segments, cut at the boundaries between ranks; those of one part in the order of their ``start``.

        A replicated parameter is a single piece, rank 0's.
        """
        if self.split_dim is None:
            return [Piece(0, 0, 0, 0, self.parts[0].shape[0])]
        shard = self.total // tp_size
        pieces = []
        position = 0
        for part, start, length in self.segments(tp_size):
            while length:
                rank, offset = divmod(position, shard)
                size = min(length, shard - offset)
                pieces.append(Piece(rank, offset, part, start, size))
                position, start, length = position + size, start + size, length - size
        return pieces


@functools.lru_cache(maxsize=16)  # every refit asks
def weight_layout(
    architecture: ModelArchitecture, *, padded_vocab_size: int | None = None, num_attributes: int = 0
) -> tuple[LayoutEntry, ...]:
    """The table for a model, in the order in which weights are streamed.

    Args:
        architecture: the model's shape.
        padded_vocab_size: rows of the embedding over all ranks; the plain vocabulary where None.
        num_attributes: outputs of the reward head, for a model that has one in place of the output layer.
    """
    vocab = HFTensor(EMBEDDING, (architecture.vocab_size, architecture.hidden_size))
    padded = padded_vocab_size or architecture.vocab_size
    head: tuple[LayoutEntry, ...]
    if num_attributes:
        head = (
            _replicated(("rm_head.weight",), "score.weight", (num_attributes, architecture.hidden_size), "last"),
            dataclasses.replace(
                _replicated(("rm_head.bias",), HEAD_BIAS, (num_attributes,), "last"),
                optional=True,  # Hugging Face's sequence classifiers have none
            ),
        )
    elif architecture.tied_embeddings:
        head = (LayoutEntry(("output_layer.weight",), (vocab,), 0, "vocabulary", "last", padded, is_copy=True),)
    else:
        output = HFTensor(OUTPUT, vocab.shape)
        head = (LayoutEntry(("output_layer.weight",), (output,), 0, "vocabulary", "last", padded),)
    return (
        LayoutEntry(("embedding.word_embeddings.weight",), (vocab,), 0, "vocabulary", "first", padded),
        *(entry for layer in range(architecture.num_layers) for entry in _layer(architecture, layer)),
        *_norm(architecture, ("decoder.final_layernorm.",), "model.norm", "last"),
        *head,
    )


def fused_name(name: str) -> str:
    """Phi-3's name for the tensor that holds ``name`` and others, one after the other; ``name`` where there is none."""
    module, _, kind = name.rpartition(".")
    parent, _, last = module.rpartition(".")
    return f"{parent}.{_FUSED[last]}.{kind}" if last in _FUSED else name


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a tensor of a model whose weights are of ``dtype``: routers' biases are always in fp32."""
    import torch

    return torch.float32 if name.endswith(ROUTER_BIAS) else dtype


def hf_tensors(entries: tuple[LayoutEntry, ...]) -> dict[str, HFTensor]:
    """The Hugging Face tensors of a table by name, in the order in which they are streamed."""
    return {part.name: part for entry in entries if not entry.is_copy for part in entry.parts}


def check_shapes(
    architecture: ModelArchitecture, shapes: Mapping[str, tuple[int, ...]], num_attributes: int = 0
) -> None:
    """Check the tensors of all stages against the table, so that every rank finds the same fault.

    Args:
        shapes: of the weights' tensors, by name.
        num_attributes: outputs of a reward head; 0 for a language model.

    Raises:
        ValueError: a tensor is missing, superfluous or of the wrong shape; the message names it.
    """
    experts = sum(architecture.expert_layers) * (architecture.experts.number if architecture.experts else 0)
    if max(architecture.num_layers, experts) > len(shapes):  # a lie that would fill the memory with the table
        what = f"{architecture.num_layers} layers" + (f" with {experts} experts" if experts else "")
        raise ValueError(f"the weights have {len(shapes)} tensors, too few for {what}")
    entries = weight_layout(architecture, num_attributes=num_attributes)
    ignored = (OUTPUT,) if architecture.tied_embeddings else ()  # which may have the embedding again
    expected = hf_tensors(entries)
    optional = {part.name for entry in entries if entry.optional for part in entry.parts}
    missing = [name for name in expected if name not in shapes and name not in optional]
    if missing:
        raise ValueError(f"the weights lack {some_of(sorted(missing))}: not a checkpoint of this architecture")
    for name, shape in shapes.items():
        if name in ignored:
            continue
        if name not in expected:
            raise ValueError(f"the weights have {name}, which the model has no place for")
        if shape != expected[name].shape:
            raise ValueError(f"{name} has shape {list(shape)}, the model needs {list(expected[name].shape)}")


def checked_stream(
    weights: Iterable[tuple[str, torch.Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    why_unexpected: Callable[[str], str] = lambda name: "the model does not have it",
) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass a stream of (Hugging Face name, full tensor) through, and check it.

    Args:
        weights: the stream.
        shapes: of every tensor that is expected.
        why_unexpected: says, for the error, why a name is not among them.

    Raises:
        ValueError: a tensor is unknown, given twice or misshapen, or, at the end, missing; the message names it.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        shape = shapes.get(name)
        if shape is None:
            raise ValueError(f"the weight stream has {name}: {why_unexpected(name)}")
        if name in seen:
            raise ValueError(f"the weight stream has {name} twice")
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"the weight stream has {name} of shape {tuple(tensor.shape)}, expected {tuple(shape)}: give full, "
                "unsharded and unpadded tensors of the same model"
            )
        seen.add(name)
        yield name, tensor
    missing = [name for name in shapes if name not in seen]
    if missing:
        raise ValueError(f"the weight stream lacks {some_of(missing)}")


def _layer(a: ModelArchitecture, layer: int) -> Iterator[LayoutEntry]:
    norms = {
        kind: tuple(_norm(a, _names(layer, *_MEGATRON_NORMS[kind]), f"model.layers.{layer}.{hf}", layer))
        for kind, hf in LAYER_NORMS[a.layers[layer].layer_norms].items()
    }
    yield from norms.get("input_norm", ())
    yield from _attention(a, layer)
    for kind in ("attention_out_norm", "mlp_norm"):
        yield from norms.get(kind, ())
    yield from _mlp(a, layer)
    yield from norms.get("mlp_out_norm", ())


def _attention(a: ModelArchitecture, layer: int) -> Iterator[LayoutEntry]:
    hf, heads_per_group = f"model.layers.{layer}.self_attn", a.num_attention_heads // a.num_query_groups
    group_rows = (heads_per_group * a.kv_channels, a.kv_channels, a.kv_channels)
    for kind in ("weight", "bias") if a.bias or a.qkv_bias else ("weight",):
        columns = (a.hidden_size,) if kind == "weight" else ()
        parts = tuple(
            HFTensor(f"{hf}.{name}_proj.{kind}", (a.num_query_groups * rows, *columns))
            for name, rows in zip("qkv", group_rows, strict=True)
        )
        yield LayoutEntry(
            _names(layer, f"self_attention.linear_qkv.{kind}"),
            parts, 0, "query groups", layer, a.num_query_groups * sum(group_rows), group_rows=group_rows,
        )  # fmt: skip
    for name, size in zip("qk", a.qk_norm_sizes, strict=False):  # the norms may be none
        yield from _norm(a, _names(layer, f"self_attention.{name}_layernorm."), f"{hf}.{name}_norm", layer, size)
    if a.attention_sinks:
        sinks, names = HFTensor(f"{hf}.sinks", (a.num_attention_heads,)), "self_attention.core_attention.softmax_offset"
        yield LayoutEntry(_names(layer, names), (sinks,), 0, "plain", layer, a.num_attention_heads)
    width = a.num_attention_heads * a.kv_channels
    yield from _row_parallel(a, layer, "self_attention.linear_proj", f"{hf}.o_proj", width)


def _mlp(a: ModelArchitecture, layer: int) -> Iterator[LayoutEntry]:
    hf, experts = f"model.layers.{layer}.mlp", a.layers[layer].experts
    if experts is None:
        yield from _two_matrices(a, layer, "mlp", hf, a.ffn_hidden_size)
        return
    yield _replicated(_names(layer, "mlp.router.weight"), f"{hf}.gate.weight", (experts.number, a.hidden_size), layer)
    if a.bias:
        yield _replicated(_names(layer, "mlp.router.bias"), f"{hf}.gate.bias", (experts.number,), layer)
    if experts.has_bias:
        yield _replicated(_names(layer, "mlp.router.expert_bias"), f"{hf}.gate.{ROUTER_BIAS}", (experts.number,), layer)
    if experts.shared_ffn_hidden_size:
        names = "mlp.shared_experts", f"{hf}.shared_experts"
        yield from _two_matrices(a, layer, *names, experts.shared_ffn_hidden_size)
    for number in range(experts.number):
        names = f"mlp.experts.local_experts.{number}", f"{hf}.experts.{number}"
        for entry in _two_matrices(a, layer, *names, experts.ffn_hidden_size):
            yield dataclasses.replace(entry, expert=number)


def _two_matrices(a: ModelArchitecture, layer: int, megatron: str, hf: str, size: int) -> Iterator[LayoutEntry]:
    """An MLP of an inner ``size``, or an expert."""
    projections = ("gate", "up") if a.gated else ("up",)
    for kind in ("weight", "bias") if a.bias else ("weight",):
        shape = (size, a.hidden_size) if kind == "weight" else (size,)
        parts = tuple(HFTensor(f"{hf}.{name}_proj.{kind}", shape) for name in projections)
        order: Order = "gated" if a.gated else "plain"
        yield LayoutEntry(_names(layer, f"{megatron}.linear_fc1.{kind}"), parts, 0, order, layer, len(parts) * size)
    yield from _row_parallel(a, layer, f"{megatron}.linear_fc2", f"{hf}.down_proj", size)


def _row_parallel(a: ModelArchitecture, layer: int, megatron: str, hf: str, width: int) -> Iterator[LayoutEntry]:
    weight = HFTensor(f"{hf}.weight", (a.hidden_size, width))
    yield LayoutEntry(_names(layer, f"{megatron}.weight"), (weight,), 1, "plain", layer, width)
    if a.bias:
        # Added once, after the ranks' partial sums: every rank holds all of it.
        yield _replicated(_names(layer, f"{megatron}.bias"), f"{hf}.bias", (a.hidden_size,), layer)


def _norm(
    a: ModelArchitecture, megatron: tuple[str, ...], hf: str, place: int | Literal["first", "last"], size: int = 0
) -> Iterator[LayoutEntry]:
    """Entries of a norm. ``megatron``: its parameters' names without "weight" or "bias"; size 0: the hidden size."""
    for kind in ("weight", "bias") if a.norm_has_bias else ("weight",):
        yield _replicated(tuple(name + kind for name in megatron), f"{hf}.{kind}", (size or a.hidden_size,), place)


def _replicated(
    megatron: tuple[str, ...], hf: str, shape: tuple[int, ...], place: int | Literal["first", "last"]
) -> LayoutEntry:
    return LayoutEntry(megatron, (HFTensor(hf, shape),), None, "plain", place)


def _names(layer: int, *suffixes: str) -> tuple[str, ...]:
    return tuple(f"decoder.layers.{layer}.{suffix}" for suffix in suffixes)
