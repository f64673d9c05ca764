"""`TransformerConfig` with what megatron-core's layers have no words for."""

from __future__ import annotations

import dataclasses
import math

from megatron.core.transformer.transformer_config import TransformerConfig


@dataclasses.dataclass
class LayerConfig(TransformerConfig):
    """megatron-core's config of a model's layers, and more.

    Attributes:
        attention_factor: what cosines and sines of the rotary embedding are multiplied by.
        residual_multiplier: of what attention and MLP add to the residual stream.
    """

    attention_factor: float = 1.0
    residual_multiplier: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.attention_factor != 1:
            # megatron-core's own attention computes it from these: 0.1 * mscale * log(scaling factor) + 1.
            self.yarn_rotary_scaling_factor = math.e
            self.yarn_mscale, self.yarn_mscale_all_dim = 10 * (self.attention_factor - 1), 0.0
            self.apply_rope_fusion = False  # fused, packed rows would be turned without it

    def rotates(self, layer_number: int) -> bool:
        """Whether the layer (1-based) has a rotary embedding; some of SmolLM3's have none."""
        return not (isinstance(self.no_rope_freq, list) and self.no_rope_freq[layer_number - 1])
