"""Run with the software devices: grouped queries in fp32 reach attention without groups, the rest as they are.

Prints ``reached`` at the end.
"""

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_style_aligner.models.attention import CausalAttention

config = TransformerConfig(
    num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8, attention_dropout=0.0
)
attention = CausalAttention(config, 1, AttnMaskType.causal, "self")
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
print("reached", flush=True)
os._exit(0)  # torch's threads for backward passes of a device outlive what they need, and may abort the exit
