"""Rotary position embeddings, with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math

import torch

from nemo_style_aligner.architecture import ModelArchitecture

# The constants of Llama 3.1's frequency scaling (only the factor differs between models).
_LOW_FREQUENCY_FACTOR = 1.0
_HIGH_FREQUENCY_FACTOR = 4.0
_ORIGINAL_CONTEXT = 8192


def rotary_tables(a: ModelArchitecture, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, float32 [length, rotary size / 2] each, with Llama 3.1's scaling if asked for."""
    size = int(a.kv_channels * a.rotary_percentage)
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    frequencies = 1.0 / (a.rotary_base**exponents)
    if a.rope_scaling_factor is not None:
        wavelengths = 2 * math.pi / frequencies
        low, high = _ORIGINAL_CONTEXT / _LOW_FREQUENCY_FACTOR, _ORIGINAL_CONTEXT / _HIGH_FREQUENCY_FACTOR
        smooth = (_ORIGINAL_CONTEXT / wavelengths - _LOW_FREQUENCY_FACTOR) / (
            _HIGH_FREQUENCY_FACTOR - _LOW_FREQUENCY_FACTOR
        )
        slowed = frequencies / a.rope_scaling_factor
        between = (1 - smooth) * slowed + smooth * frequencies
        frequencies = torch.where(wavelengths > low, slowed, torch.where(wavelengths < high, frequencies, between))
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
