"""What words and numbers some keys may be: for the schema and the rooms that read them."""

from __future__ import annotations

from typing import Literal

LARGEST_PORT = 65535
MOST_ATTRIBUTES = 1000
"""Outputs that a reward model's head may have."""

Action = Literal["stop", "skip"]
InitMethod = Literal["xavier", "kaiming", "normal", "zero"]
KLEstimator = Literal["abs", "k1", "k2", "k3"]
KeepChoice = Literal["auto", "always", "never"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning"]
Placement = Literal["auto", "swap", "resident"]
DistillationLoss = Literal["fwd_kl", "bwd_kl"]
PreferenceLoss = Literal["dpo", "ipo", "rpo_sq", "rpo_bwd_kl", "rpo_fwd_kl"]
Strategy = Literal["interleave", "flatten", "colocated", "colocate_all", "separate", "disaggregated"]
StepChoice = Literal["auto", "native", "torch"]
TrainedCritic = Literal["refuse", "keep"]
TruncationMethod = Literal["left", "right"]
OptimizerName = Literal["distributed_fused_adam", "mcore_distributed_optim", "fused_adam", "adam", "adamw", "sgd"]
