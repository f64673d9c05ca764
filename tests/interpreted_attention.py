"""Run with TRITON_INTERPRET=1: the engine's attention kernels, as Triton's interpreter computes them on the CPU.

In fp32 and fp16: the interpreter multiplies no bf16. Prints ``equal`` at the end.
"""

from __future__ import annotations

import random

import pytest
import torch
from generation_models import VOCAB, engine_for, hf_model

from nemo_style_aligner.generation.embedded import torch_model
from nemo_style_aligner.generation.embedded.choose_attention import check, example
from nemo_style_aligner.generation.embedded.gathered_attention import Attend
from nemo_style_aligner.generation.embedded.paged_attention import PagedAttention
from nemo_style_aligner.generation.embedded.step import EngineShape
from nemo_style_aligner.generation.engine import GenerationRequest, GenerationResult, SamplingParams

CPU = torch.device("cpu")
PROCESSORS = 8


class Zeros(PagedAttention):
    """Kernels that do nothing."""

    def of_pass(self, batch: torch_model.Batch) -> Attend:
        return lambda pages, query, key_value: torch.zeros(len(query), query[0].numel())


for groups, heads, channels in ((1, 1, 64), (2, 3, 8), (3, 4, 80), (1, 20, 32)):
    attention = PagedAttention(groups, heads, channels, PROCESSORS)
    assert attention.num_parts(3, 4) == 1 < attention.num_parts(3, 80)  # both ways are compared
    for dtype in (torch.float32, torch.float16):
        check(attention, groups, heads, channels, dtype, CPU)
with pytest.raises(ArithmeticError, match="off in"):
    check(Zeros(1, 2, 16, PROCESSORS), 1, 2, 16, torch.float32, CPU)

# What is not a number reaches those that see it, and nobody else.
for num_pages in (4, 80):
    batch = example(num_pages, 120, CPU)
    attend = PagedAttention(1, 2, 16, PROCESSORS).of_pass(batch)
    pages = torch.ones(120, 16, 2, 16)
    pages[batch.tables[1, -1], -1] = torch.nan  # the last that the second token sees
    bad = attend(pages, torch.ones(len(batch.positions), 1, 2, 16), torch.empty(0)).isnan()
    assert bad.any(1).nonzero().tolist() == [[1]] and bad[1].all()


def responses(**options: object) -> list[GenerationResult]:
    """Of prompts that share pages, are cut into chunks, and enter while others decode."""
    draw = random.Random(3)
    common = [draw.randrange(2, VOCAB) for _ in range(20)]
    prompts = [common[: draw.choice((0, 17, 20))] + [draw.randrange(2, VOCAB)] * draw.randint(1, 30) for _ in range(6)]
    engine = engine_for(model=model, step="torch", prefill_chunk_tokens=11, prefill_share=1.0, **options)
    requests = [GenerationRequest(i, prompt, seed=i) for i, prompt in enumerate(prompts)]
    return sorted(engine.generate(requests, SamplingParams(max_new_tokens=6, seed=2)), key=lambda r: r.request_id)


def paged(shape: EngineShape, device: torch.device) -> PagedAttention:
    groups = shape.shard.num_groups
    return PagedAttention(groups, shape.shard.num_heads // groups, shape.architecture.kv_channels, PROCESSORS)


model = hf_model()
expected = responses()
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(torch_model, "choose_attention", paged)
    for result, other in zip(responses(), expected, strict=True):
        assert result.token_ids == other.token_ids
        torch.testing.assert_close(torch.tensor(result.logprobs), torch.tensor(other.logprobs), atol=2e-5, rtol=0)
print("equal", flush=True)
