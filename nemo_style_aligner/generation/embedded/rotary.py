"""Rotary position embeddings: tables of cosines and sines, and turning by them."""

from __future__ import annotations

import torch

from nemo_style_aligner.architecture import ModelArchitecture


def rotary_tables(a: ModelArchitecture, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [length, turned channels / 2] each, times the attention factor of a scaling."""
    frequencies, factor = a.frequencies()
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` channels of ``x`` [t, ..., d]; tables are [t, 1..., r / 2].

    The two halves of the rotated part pair up (Hugging Face's order, not interleaved). Returns
    float32.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, rest.float()) if rest.shape[-1] else rotated, dim=-1)
