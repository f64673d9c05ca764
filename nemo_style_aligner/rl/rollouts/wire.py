"""Prompts and responses as bytes: between ranks that train and ranks that generate, and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import safetensors.numpy
import safetensors.torch
import torch

from nemo_style_aligner.generation.engine import GenerationResult
from nemo_style_aligner.rl.sample import Prompt


def pack_results(results: Sequence[GenerationResult]) -> bytes:
    """Pack any number of responses. Log-probs are stored in fp32, in which engines compute them."""
    facts = [
        [r.request_id, int(r.finish_reason == "stop"), r.weight_version, len(r.prompt_token_ids), len(r.token_ids)]
        for r in results
    ]
    return _pack(
        {
            "facts": torch.tensor(facts, dtype=torch.int64).view(len(facts), 5),
            "tokens": _flat([r.prompt_token_ids + r.token_ids for r in results], torch.int32),
            "logprobs": _flat([r.logprobs for r in results], torch.float32),
        }
    )


def unpack_results(content: bytes) -> list[GenerationResult]:
    """Inverse of `pack_results`."""
    tensors = safetensors.torch.load(content)
    tokens, logprobs = tensors["tokens"].tolist(), tensors["logprobs"].tolist()
    results = []
    start, response = 0, 0
    for request_id, is_stop, version, prompt_length, length in tensors["facts"].tolist():
        end = start + prompt_length + length
        results.append(
            GenerationResult(
                request_id=request_id,
                prompt_token_ids=tokens[start : start + prompt_length],
                token_ids=tokens[start + prompt_length : end],
                logprobs=logprobs[response : response + length],
                finish_reason="stop" if is_stop else "length",
                weight_version=version,
            )
        )
        start, response = end, response + length
    return results


def pack_request(prompts: Sequence[Prompt], seed: int) -> bytes:
    """Pack a round's prompts, in sample order, and the seed of its random streams."""
    return _pack(
        {
            "seed": torch.tensor([seed], dtype=torch.int64),
            "ids": torch.tensor([p.prompt_id for p in prompts], dtype=torch.int64),
            "lengths": torch.tensor([len(p.token_ids) for p in prompts], dtype=torch.int64),
            "expected_lengths": torch.tensor([p.expected_length for p in prompts], dtype=torch.float64),
            "tokens": _flat([p.token_ids for p in prompts], torch.int32),
        }
    )


def unpack_request(content: bytes) -> tuple[list[Prompt], int]:
    """Inverse of `pack_request`."""
    tensors = safetensors.torch.load(content)
    tokens = tensors["tokens"].split(tensors["lengths"].tolist())
    columns = zip(tensors["ids"].tolist(), tokens, tensors["expected_lengths"].tolist(), strict=True)
    return [Prompt(i, ids.tolist(), expected) for i, ids, expected in columns], int(tensors["seed"])


def _pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    # safetensors' function for torch leaves 6 kB behind for each size of a tensor: ctypes keeps a type for it.
    return safetensors.numpy.save({name: tensor.numpy() for name, tensor in tensors.items()})


def _flat(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([value for row in rows for value in row], dtype=dtype)
