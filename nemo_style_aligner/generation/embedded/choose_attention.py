"""Which attention the torch step computes with: Triton kernels on GPUs that can run them, else torch's function."""

from __future__ import annotations

import importlib.util
import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from nemo_style_aligner.generation.embedded.batch import Batch, ChunkSegment
from nemo_style_aligner.generation.embedded.gathered_attention import GatheredAttention
from nemo_style_aligner.generation.embedded.step import PAGE_TOKENS, EngineShape

if TYPE_CHECKING:
    from nemo_style_aligner.generation.embedded.paged_attention import PagedAttention

logger = logging.getLogger(__name__)

_TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 1e-4}  # for results of about 1


def choose_attention(shape: EngineShape, device: torch.device) -> GatheredAttention | PagedAttention:
    """The kernels, if this is a GPU that compiles them and computes with them what it should; else the log says why."""
    groups, channels = shape.shard.num_groups, shape.architecture.kv_channels
    heads = shape.shard.num_heads // groups
    gathered = GatheredAttention(heads, shape.dtype)
    if device.type != "cuda" or shape.dtype == torch.float32:  # without tensor cores the kernels are slow
        return gathered
    try:
        if importlib.util.find_spec("triton") is None:
            raise ImportError("Triton is not installed")
        from nemo_style_aligner.generation.embedded.paged_attention import PagedAttention

        num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        paged = PagedAttention(groups, heads, channels, num_processors)
        check(paged, groups, heads, channels, shape.dtype, device)
    except Exception as error:  # noqa: BLE001 - whatever Triton, its compilers and the driver come up with
        logger.warning("generation copies keys and values before it attends: %s: %s", type(error).__name__, error)
        return gathered
    return paged


@torch.inference_mode()
def check(
    paged: PagedAttention, groups: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Compile all that passes need, and compare it with torch's function in fp32.

    Args:
        heads: per group.

    Raises:
        ArithmeticError: they differ by more than ``dtype`` explains.
    """
    draw = torch.Generator().manual_seed(1)
    pages = torch.randn(120, PAGE_TOKENS, 2 * groups, channels, generator=draw).to(device, dtype)
    for num_pages in (4, 80):  # tokens that decode see positions of so many: in one part, and in several
        batch = example(num_pages, len(pages), device)
        size = (len(batch.positions), groups, heads + 2, channels)
        qkv = torch.randn(size, generator=draw).to(device, dtype)
        query, key_value = qkv[:, :, :heads], qkv[:, :, heads:].transpose(1, 2)
        pages.view(-1, 2, groups, channels).index_copy_(0, batch.places, key_value)
        attend = GatheredAttention(heads, torch.float32).of_pass(batch)
        expected = attend(pages.float(), query.float(), key_value.float())
        error = (paged.of_pass(batch)(pages, query, key_value).float() - expected).abs().max().item()
        if not error < _TOLERANCES[dtype]:
            raise ArithmeticError(f"the Triton kernels are {error:.2g} off in {dtype}")


def example(num_pages: int, num_all_pages: int, device: torch.device) -> Batch:
    """Three tokens that decode, a chunk that starts its sequence and one that goes on with another."""
    order = np.random.default_rng(1).permutation(num_all_pages)
    last = PAGE_TOKENS * num_pages - 1
    tables = np.stack([order[:num_pages] for _ in range(3)])  # they share them but for the pages of their own tokens
    tables[0, 0], tables[2, 37 // PAGE_TOKENS] = order[num_pages : num_pages + 2]
    rows = [(tables[0], range(1)), (tables[1], range(last, last + 1)), (tables[2], range(37, 38))]
    chunk_pages = order[num_pages + 2 :]
    rows += [(chunk_pages[:4], range(50)), (chunk_pages[4:16], range(21, 170))]
    positions = np.concatenate([np.array(places) for _, places in rows])
    places = np.concatenate(
        [pages[np.array(seen) // PAGE_TOKENS] * PAGE_TOKENS + np.array(seen) % PAGE_TOKENS for pages, seen in rows]
    )
    return Batch(
        token_ids=torch.empty(0, device=device),  # nobody looks at them
        positions=torch.from_numpy(positions).to(device),
        places=torch.from_numpy(places).to(device),
        tables=torch.from_numpy(tables).to(device),
        segments=(
            ChunkSegment(3, 50, 0, chunk_pages[:4].astype(np.int32)),
            ChunkSegment(53, 149, 21, chunk_pages[4:16].astype(np.int32)),
        ),
    )
