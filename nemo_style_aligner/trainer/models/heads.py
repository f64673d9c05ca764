"""The head of reward models and critics, and how its outputs become rewards and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_style_aligner.engine.transfers import moved
from nemo_style_aligner.kinds import MOST_ATTRIBUTES
from nemo_style_aligner.seeds import derive_seed

_DTYPES = {
    "float32": torch.float32,
    "32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
}


@dataclasses.dataclass(frozen=True)
class RewardHeadConfig:
    """What the head computes.

    Attributes:
        num_attributes: outputs per token (1 for a ranking model, one per attribute for regression).
        pooling: a sequence's reward is the last token's output, or the average over its tokens.
        dtype: dtype of the head's weights and of its arithmetic.
        merge_attributes: fold attributes into one number by ``attribute_weights``.
        attribute_weights: weights of that sum; empty means equal weights.
        mean, std: standardisation of the reward, ``(r - mean) / std``, when ``std`` is set.
    """

    num_attributes: int = 1
    pooling: Literal["last", "average"] = "last"
    dtype: torch.dtype = torch.float32
    merge_attributes: bool = False
    attribute_weights: tuple[float, ...] = ()
    mean: float = 0.0
    std: float | None = None

    @property
    def num_rewards(self) -> int:
        """Rewards per sequence: 1 if attributes are merged, else one per attribute."""
        return 1 if self.merge_attributes else self.num_attributes

    @classmethod
    def from_model_config(cls, cfg: Mapping[str, Any], *, merge_attributes: bool = False) -> RewardHeadConfig:
        """Read NeMo-Aligner's keys (`reward_model_type`, `regression`, `use_avg_pool`, `force_head_dtype`, ...).

        ``merge_attributes``: do so whatever the config says.

        Raises:
            ValueError: an unknown choice, attribute weights that do not match the attributes, or a standardisation
                without mean or std.
        """
        kind = "binary_ranking" if (given := cfg.get("reward_model_type")) is None else given
        if kind not in ("binary_ranking", "regression"):
            raise ValueError(f"model.reward_model_type={kind!r}: choose binary_ranking or regression")
        regression, standardization = cfg.get("regression") or {}, cfg.get("reward_standardization") or {}
        if not isinstance(regression, Mapping) or not isinstance(standardization, Mapping):
            raise ValueError("model.regression and model.reward_standardization must be sections")
        num_attributes = regression.get("num_attributes") or 1 if kind == "regression" else 1
        if num_attributes not in range(1, MOST_ATTRIBUTES + 1):
            raise ValueError(f"model.regression.num_attributes={num_attributes}: must be in [1, {MOST_ATTRIBUTES}]")
        enabled = bool(standardization.get("enable", False))
        if enabled and (standardization.get("mean") is None or not standardization.get("std")):
            raise ValueError("model.reward_standardization.enable=True needs both mean and std")
        try:
            weights = tuple(float(w) for w in regression.get("attribute_weights") or ())
            mean, std = (float(standardization.get(key, 0) if enabled else 0) for key in ("mean", "std"))
        except (TypeError, OverflowError) as error:
            raise ValueError(
                f"model.regression or model.reward_standardization has what is no number: {error}"
            ) from error
        if weights and len(weights) != num_attributes:
            raise ValueError(
                f"model.regression.attribute_weights has {len(weights)} entries for num_attributes={num_attributes}"
            )
        dtype_name = "float32" if (given := cfg.get("force_head_dtype")) is None else str(given).removeprefix("torch.")
        if dtype_name not in _DTYPES:
            raise ValueError(f"model.force_head_dtype={dtype_name!r}: choose float32 or bfloat16")
        return cls(
            num_attributes=int(num_attributes),
            pooling="average" if cfg.get("use_avg_pool", False) else "last",
            dtype=_DTYPES[dtype_name],
            merge_attributes=merge_attributes or bool(regression.get("merge_attributes", False)),
            attribute_weights=weights,
            mean=mean,
            std=std if enabled else None,
        )


class RewardHead(torch.nn.Module):
    """A linear layer from each token's hidden state to ``num_attributes`` outputs.

    It is small, so every tensor-parallel rank holds all of it and computes the same outputs.
    """

    def __init__(self, config: TransformerConfig, head: RewardHeadConfig) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(head.num_attributes, config.hidden_size, dtype=head.dtype))
        self.bias = torch.nn.Parameter(torch.zeros(head.num_attributes, dtype=head.dtype))
        # From a random stream of its own: the same initial weights whatever the parallel layout.
        generator = torch.Generator().manual_seed(derive_seed("reward head", *self.weight.shape))
        start = torch.empty(self.weight.shape).normal_(std=config.init_method_std, generator=generator)
        self.weight.data.copy_(start)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[s, b, h] (s split over the tensor-parallel group under sequence parallelism) -> [b, s, a] fp32."""
        if self.sequence_parallel:
            # Every rank computes the same loss from the whole sequence, so its gradient is split, not summed.
            hidden_states = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=False)
        out = torch.nn.functional.linear(hidden_states.to(self.weight.dtype), self.weight, self.bias)
        return out.float().transpose(0, 1).contiguous()


def merge_attributes(outputs: torch.Tensor, head: RewardHeadConfig) -> torch.Tensor:
    """[..., a] -> [...]: the weighted sum of the attributes (equal weights unless configured)."""
    weights = head.attribute_weights or (1.0 / head.num_attributes,) * head.num_attributes
    return outputs @ moved(torch.tensor(weights, dtype=outputs.dtype), outputs.device)


def pooled_positions(lengths: torch.Tensor, width: int, head: RewardHeadConfig) -> torch.Tensor:
    """The positions whose outputs `pool_rewards` needs: int64 [b] -> bool [b, width]."""
    positions, lengths = torch.arange(width, device=lengths.device)[None, :], lengths[:, None]
    return positions < lengths if head.pooling == "average" else positions == lengths - 1


def pool_rewards(outputs: torch.Tensor, lengths: torch.Tensor, head: RewardHeadConfig) -> torch.Tensor:
    """A sequence's reward from its tokens' outputs.

    Args:
        outputs: [b, s, a] fp32.
        lengths: [b] int64, tokens per sequence, at least 1.

    Returns:
        [b, 1] when attributes are merged (or there is one), else [b, a]; standardised if configured.
    """
    lengths = lengths.to(outputs.device)
    if head.pooling == "average":
        # The head is linear, so averaging outputs equals the output of the averaged state.
        mask = torch.arange(outputs.shape[1], device=outputs.device)[None, :] < lengths[:, None]
        pooled = (outputs * mask[..., None]).sum(1) / lengths[:, None]
    else:
        pooled = outputs[torch.arange(outputs.shape[0], device=outputs.device), lengths - 1]
    if head.merge_attributes:
        pooled = merge_attributes(pooled, head)[:, None]
    return standardize(pooled, head)


def standardize(outputs: torch.Tensor, head: RewardHeadConfig) -> torch.Tensor:
    """(x - mean) / std, if configured, of rewards or of a critic's values, which estimate sums of such rewards."""
    return outputs if head.std is None else (outputs - head.mean) / head.std
