"""Rotary position embeddings, with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math

import torch

from nemo_style_aligner.architecture import LLAMA3_ROPE, ModelArchitecture


def rotary_tables(a: ModelArchitecture, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [length, turned channels / 2] each, with Llama 3.1's scaling if asked for."""
    exponents = torch.arange(0, a.rotary_size, 2, dtype=torch.int64).float() / a.rotary_size
    frequencies = 1.0 / (a.rotary_base**exponents)
    if a.rope_scaling_factor is not None:
        low, high, context = LLAMA3_ROPE.values()
        wavelengths = 2 * math.pi / frequencies
        smooth = (context / wavelengths - low) / (high - low)
        slowed = frequencies / a.rope_scaling_factor
        between = (1 - smooth) * slowed + smooth * frequencies
        fast_ones_kept = torch.where(wavelengths < context / high, frequencies, between)
        frequencies = torch.where(wavelengths > context / low, slowed, fast_ones_kept)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return angles.cos().to(device), angles.sin().to(device)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``2 * cos.shape[-1]`` channels of ``x`` [t, ..., d]; tables are [t, 1..., r / 2].

    The two halves of the rotated part pair up (Hugging Face's order, not interleaved). Returns
    float32.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, rest.float()) if rest.shape[-1] else rotated, dim=-1)
