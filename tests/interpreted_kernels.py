"""Run with TRITON_INTERPRET=1: the engine's kernels for GPUs, as Triton's interpreter computes them on the CPU.

In fp32, fp16 and bf16. Prints ``equal`` at the end.
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from generation_models import VOCAB, architecture, engine_for, have_graphs, hf_model
from interpreted_bf16 import multiply_bf16
from transformers import PreTrainedModel

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded import torch_step
from nemo_style_aligner.engine.embedded.choose_operations import check, example
from nemo_style_aligner.engine.embedded.paged_attention import PagedAttention
from nemo_style_aligner.engine.embedded.step import EngineShape
from nemo_style_aligner.engine.embedded.triton_operations import TritonOperations

CPU = torch.device("cpu")
PROCESSORS = 8
LARGE = ModelArchitecture(
    num_layers=1, hidden_size=1100, ffn_hidden_size=1300, num_attention_heads=12, num_query_groups=3, vocab_size=8,
    kv_channels=80, rotary_percentage=0.4, qk_layernorm=True,
)  # fmt: skip
ONE_GROUP = dataclasses.replace(LARGE, num_attention_heads=20, num_query_groups=1, kv_channels=32, activation="gelu",
                                no_rope_layers=(0,), residual_multiplier=0.25, softmax_scale=0.1)  # fmt: skip


def operations_for(shape: EngineShape, device: torch.device) -> TritonOperations:
    return TritonOperations(shape, device, PROCESSORS)


def checked(a: ModelArchitecture, dtype: torch.dtype) -> None:
    shape = EngineShape(a, dtype, num_slots=4, max_sequence_length=1280, num_pages=8, max_step_tokens=8)
    check(operations_for(shape, CPU), shape, CPU)


ZERO_CENTERED = dataclasses.replace(LARGE, normalization="rmsnorm1p")
WINDOWS = dataclasses.replace(
    LARGE, num_layers=2, attention_sinks=True, sliding_window=37, windowed_layers=(1,), local_rotary_base=100.0
)
LONG_WINDOWS = dataclasses.replace(WINDOWS, sliding_window=700, attention_sinks=False)
MIXTURE = dataclasses.replace(architecture(), experts=Experts(number=5, per_token=2, ffn_hidden_size=24))
FAMILIES = ("llama-geglu-bias", "nemotron")

for each in (LARGE, ZERO_CENTERED, WINDOWS, LONG_WINDOWS, *map(architecture, FAMILIES)):
    checked(each, torch.float32)
checked(ONE_GROUP, torch.float16)
multiply_bf16()
checked(dataclasses.replace(MIXTURE, bias=True, clamped_swiglu=True), torch.bfloat16)

with pytest.MonkeyPatch.context() as patch:
    for name, wrong in (
        ("norm", lambda ops, hidden, *_: hidden * 2),
        ("activation", lambda ops, x: torch.relu(x[:, : x.shape[1] // 2])),
        ("attention", lambda ops, batch: lambda qkv, norms, pages, layer: qkv[:, : ops.groups * ops.heads * 8]),
        ("experts", lambda ops, x, chosen, weights, matrices: x),
    ):
        method = {"norm": "add_and_norm", "activation": "activate", "attention": "attention_of"}.get(name, name)
        with patch.context() as one, pytest.raises(ArithmeticError, match=f"{name} by Triton"):
            one.setattr(TritonOperations, method, wrong)
            checked(MIXTURE, torch.float32)

# What is not a number reaches those that see it, and nobody else.
for num_pages in (4, 80):
    batch = example(num_pages, 120, CPU)
    attention = PagedAttention(1, 2, 16, 0.25, PROCESSORS)
    assert (attention.num_parts(3, num_pages) == 1) == (num_pages == 4)  # both ways are compared
    pages = torch.ones(120, 16, 2, 16)
    pages[batch.tables[1, -1], -1] = torch.nan  # the last that the second token sees
    query = torch.ones(len(batch.positions), 1, 2, 16)
    bad = attention.of_pass(batch)(pages, query).isnan()
    assert bad.any(1).nonzero().tolist() == [[1]] and bad[1].all()


def responses(family: str, model: PreTrainedModel) -> list[GenerationResult]:
    """Of prompts that share pages, are cut into chunks, and enter while others decode; with routes."""
    draw = random.Random(3)
    common = [draw.randrange(2, VOCAB) for _ in range(20)]
    prompts = [common[: draw.choice((0, 17, 20))] + [draw.randrange(2, VOCAB)] * draw.randint(1, 20) for _ in range(5)]
    engine = engine_for(family, model, step="torch", prefill_chunk_tokens=11, records_routes=True)
    requests = [GenerationRequest(i, prompt, seed=i) for i, prompt in enumerate(prompts)]
    return sorted(engine.generate(requests, SamplingParams(max_new_tokens=3, seed=2)), key=lambda r: r.request_id)


for family in ("gemma2", "olmo2", "glm4-moe", "gpt-oss"):
    model = hf_model(family)
    expected = responses(family, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_step, "choose_operations", operations_for)
        have_graphs(patch, True)  # for passes that only decode; others decode without
        for result, other in zip(responses(family, model), expected, strict=True):
            assert (result.token_ids, result.routes) == (other.token_ids, other.routes)
            torch.testing.assert_close(torch.tensor(result.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0)
assert expected[0].routes
print("equal", flush=True)
