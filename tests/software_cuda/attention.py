"""Run with the software devices: grouped queries in fp32 reach attention without groups, the rest as they are.

Sequences in one row are one call of torch's varlen attention in bf16, and several of `scaled_dot_product_attention`
in fp32, with dropout, and where varlen attention is wrong or missing.

Prints ``reached`` at the end.
"""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel

from nemo_style_aligner.engine.architecture import Layer
from nemo_style_aligner.trainer.models import varlen_attention
from nemo_style_aligner.trainer.models.attention import CausalAttention, LayerConfig
from nemo_style_aligner.trainer.models.pipeline import to_device
from nemo_style_aligner.trainer.models.spans import PackedSequences, Run, Span, Spans

config = LayerConfig(
    num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, attention_dropout=0.0,
    layers=(Layer(),),
)  # fmt: skip
attention = CausalAttention(config, 1)
attend = F.scaled_dot_product_attention
calls: list[tuple[int, bool]] = []


def noted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    calls.append((key.shape[1], options["enable_gqa"]))
    return attend(query, key, value, **options)


def outputs(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of 6 tokens of 3 sequences, and the gradients of queries, keys and values."""
    draw = torch.Generator().manual_seed(1)
    shapes = (4, 2, 2)
    parts = [torch.randn(6, 3, n, 8, generator=draw).to(dtype).to(device).requires_grad_() for n in shapes]
    out = attention(*parts)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad(out.float().square().sum(), parts))]


with pytest.MonkeyPatch.context() as patch:
    patch.setattr(F, "scaled_dot_product_attention", noted)
    torch.testing.assert_close(outputs("cuda", torch.float32), outputs("cpu", torch.float32))
    outputs("cuda", torch.bfloat16)
assert calls == [(4, False), (2, True), (2, True)], calls
FIRST, SECOND, THIRD = Run(1, 201), Run(201, 206), Run(206, 336)
SPANS = Spans((*Spans.whole([1]), Span(FIRST, (FIRST,)), Span(SECOND, (FIRST, SECOND)), Span(THIRD, (FIRST, THIRD))))


def packed_outputs(device: str, dtype: torch.dtype, dropout: float = 0.0) -> list[torch.Tensor]:
    """As `outputs`, of one row of sequences, of which two begin alike."""
    row = to_device(PackedSequences.of(SPANS, torch.arange(336)), torch.device(device))
    assert isinstance(row, PackedSequences)
    draw = torch.Generator().manual_seed(1)
    parts = [torch.randn(336, n, 8, generator=draw).to(dtype).to(device).requires_grad_() for n in (4, 2, 2)]
    attention.dropout = dropout
    out = attention(*parts, packed_seq_params=row)
    assert out.shape == (336, 1, 32)
    weight = torch.randn(out.shape, generator=draw).to(device)
    return [x.detach().cpu() for x in (out, *torch.autograd.grad((out * weight).sum(), parts))]


varlen, rows = varlen_attention.varlen_attention, []


def noted_row(query: torch.Tensor, *others: Any) -> torch.Tensor:
    rows.append((len(query), str(query.dtype)))
    return varlen(query, *others)


def wrong_row(query: torch.Tensor, *others: Any) -> torch.Tensor:
    return varlen(query, *others) * (query == query[0]).all()  # of one sequence it would be right


with pytest.MonkeyPatch.context() as patch:
    patch.setattr("nemo_style_aligner.trainer.models.attention.varlen_attention", noted_row)
    rounded = packed_outputs("cpu", torch.bfloat16)
    for computed, expected in zip(packed_outputs("cuda", torch.bfloat16), rounded, strict=True):
        torch.testing.assert_close(computed, expected, atol=0.03, rtol=0.03)
    assert rows == [(336, "torch.bfloat16")], rows
    torch.testing.assert_close(packed_outputs("cuda", torch.float32), packed_outputs("cpu", torch.float32))
    tensor_parallel.get_cuda_rng_tracker().add("model-parallel-rng", 1)  # as every job does
    packed_outputs("cuda", torch.bfloat16, dropout=0.5)
    for replacement in (wrong_row, None):
        varlen_attention._works.cache_clear()
        patch.setattr(varlen_attention, "varlen_attention", replacement)  # None cannot be called, as torch 2.9's
        packed_outputs("cuda", torch.bfloat16)
    assert len(rows) == 1
print("reached", flush=True)
os._exit(0)  # torch's threads for backward passes of a device outlive what they need, and may abort the exit
