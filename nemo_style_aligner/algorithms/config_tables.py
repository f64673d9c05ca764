"""Ranges and choices: which values a config key may take, whatever the other keys say.

Patterns are dotted keys with ``*`` for any text. Null passes everywhere: `config_types` knows which keys need a value.
"""

from __future__ import annotations

import dataclasses
import math
from fnmatch import fnmatchcase
from typing import Any, get_args

from nemo_style_aligner.architecture import LARGEST_LENGTH
from nemo_style_aligner.data.sft import TruncationMethod
from nemo_style_aligner.functional import KLEstimator
from nemo_style_aligner.generation.embedded.engine import StepChoice
from nemo_style_aligner.models.frozen import Placement
from nemo_style_aligner.models.heads import MOST_ATTRIBUTES
from nemo_style_aligner.models.kept_passes import KeepChoice
from nemo_style_aligner.models.nonfinite import Action
from nemo_style_aligner.parallel.detection import LARGEST_PORT
from nemo_style_aligner.rl.remote_critic import TrainedCritic
from nemo_style_aligner.seeds import LARGEST_SEED
from nemo_style_aligner.telemetry.log_lines import LOG_FORMATS, LOG_LEVELS


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, the ends included unless said otherwise; ``also`` is allowed too: off.

    With ``is_share``, numbers up to 1 may be fractions, and larger ones count something, so they must be whole.
    """

    low: float
    high: float = math.inf
    low_excluded: bool = False
    high_excluded: bool = False
    also: float | None = None
    is_share: bool = False

    def allows(self, value: Any) -> bool:
        """Whether a number, or each number of a list, is in the range. Other types pass: `config_types` checks them."""
        if isinstance(value, list | tuple):
            return all(map(self.allows, value))
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        if value == self.also:
            return True
        above = value > self.low if self.low_excluded else value >= self.low
        below = value < self.high if self.high_excluded else value <= self.high
        whole = not self.is_share or value <= 1 or float(value).is_integer()
        return above and below and not math.isinf(value) and whole

    def __str__(self) -> str:
        if self.also is not None:
            return f"{self.also}, or {dataclasses.replace(self, also=None)}"
        if self.is_share:
            return f"a share from {self.low} to 1.0, or a whole number"
        if self.low == -math.inf:
            return "a finite number"
        if self.high == math.inf:
            return f"above {self.low}" if self.low_excluded else f"{self.low} or more"
        left, right = "(" if self.low_excluded else "[", ")" if self.high_excluded else "]"
        return f"in {left}{self.low}, {self.high}{right}"


_FINITE = Range(-math.inf)
_LONGEST_SECONDS = 2_000_000  # sockets wait for less than 2^31 ms; a longer wait may end at once
_SECONDS = Range(0, _LONGEST_SECONDS, low_excluded=True)
_MINUTES = Range(0, _LONGEST_SECONDS // 60, low_excluded=True)
_COUNT = Range(1)
_NOT_NEGATIVE = Range(0)
_POSITIVE = Range(0, low_excluded=True)
_NOT_0_IN_FP32 = Range(2.0**-126)
_SHARE = Range(0, 1)
_COUNT_OR_SHARE = Range(0, is_share=True)
_SHARE_ABOVE_0 = Range(0, 1, low_excluded=True)
_SHARE_BELOW_1 = Range(0, 1, high_excluded=True)
_PORT = Range(0, LARGEST_PORT)
_SEED = Range(0, LARGEST_SEED)

RANGES: tuple[tuple[str, Range], ...] = (
    ("trainer.num_nodes", _COUNT),
    ("trainer.devices", _COUNT),
    ("trainer.distributed_timeout_minutes", _MINUTES),
    ("model.seed", _SEED),
    ("exp_manager.watchdog_minutes", _MINUTES),
    ("trainer.*.max_epochs", _COUNT),
    ("trainer.*.max_steps", Range(1, also=-1)),  # 0 steps would load a model only to write it out again
    ("trainer.ppo.*_interval", _NOT_NEGATIVE),
    ("trainer.*.val_check_interval", _COUNT_OR_SHARE),
    ("trainer.*.save_interval", _COUNT_OR_SHARE),
    ("trainer.*.limit_val_batches", _COUNT_OR_SHARE),
    ("trainer.*.gradient_clip_val", _NOT_NEGATIVE),
    ("trainer.*.max_consecutive_skips", _NOT_NEGATIVE),
    ("trainer.ppo.critic_warmup_steps", _NOT_NEGATIVE),
    ("trainer.ppo.num_ppo_epochs", _COUNT),
    ("trainer.ppo.num_rollouts_per_prompt", _COUNT),
    ("trainer.ppo.loss_constant_length", _COUNT),
    ("trainer.ppo.dual_clip", Range(1, low_excluded=True)),
    ("trainer.ppo.dynamic_sampling.max_rounds", _COUNT),
    ("trainer.ppo.overlong.*", _NOT_NEGATIVE),
    ("trainer.ppo.reward_functions.threads", Range(1, 10_000)),
    ("trainer.ppo.reward_functions.seconds", _SECONDS),
    ("trainer.ppo.initial_policy_kl_penalty", _NOT_NEGATIVE),
    ("trainer.ppo.kl_clamp", _POSITIVE),
    ("trainer.ppo.discount_factor", _SHARE),
    ("trainer.ppo.gae_lambda", _SHARE),
    ("trainer.ppo.importance_weight_cap", _POSITIVE),
    ("trainer.ppo.rollout_devices", _NOT_NEGATIVE),
    ("trainer.ppo.num_table_rows", _NOT_NEGATIVE),
    ("trainer.ppo.generation.num_slots", _COUNT),
    ("trainer.ppo.generation.tensor_parallel_size", _COUNT),
    ("trainer.ppo.generation.kv_cache_tokens", _COUNT),
    ("trainer.ppo.generation.prefill_chunk_tokens", _COUNT),
    ("trainer.ppo.trt_llm.kv_cache_memory_fraction", _SHARE_ABOVE_0),
    ("trainer.ppo.trt_llm.refit_bucket_mebibytes", _COUNT),
    ("trainer.ppo.batch_iterator.*_seconds", _SECONDS),
    ("trainer.ppo.max_body_bytes", _COUNT),
    ("inference.max_body_bytes", _COUNT),
    ("*.max_outstanding_requests", Range(1, 10_000)),  # each has a thread
    ("*.connections.*_seconds", _SECONDS),
    ("*.connections.min_bytes_per_second", _POSITIVE),
    ("*.connections.max_connections", _COUNT),
    ("*.connections.max_body_without_token", _NOT_NEGATIVE),
    ("*.inference_micro_batch_size", _COUNT),
    ("*.max_queue_delay_microseconds", Range(0, 10**6 * _LONGEST_SECONDS)),
    ("*.strip_sequence_length_to_multiple", _COUNT),
    ("remote_critic_rm.pad_to_length", _COUNT),
    ("remote_critic_rm.journal_max_gibibytes", _NOT_NEGATIVE),
    ("*.timeouts.*_seconds", _SECONDS),
    ("*.infer_timeout_seconds", _SECONDS),
    ("*.command_timeout_seconds", _SECONDS),
    ("remote_critic_rm.*.port", Range(1, LARGEST_PORT)),
    ("*.port", _PORT),
    ("model.tensor_model_parallel_size", _COUNT),
    ("model.pipeline_model_parallel_size", _COUNT),
    ("model.*micro_batch_size", _COUNT),
    ("model.*max_tokens_per_micro_batch", _COUNT),
    ("model.*global_batch_size", _COUNT),
    ("model.make_vocab_size_divisible_by", Range(1, 1 << 16)),
    ("model.encoder_seq_length", Range(2, LARGEST_LENGTH)),
    ("model.max_position_embeddings", Range(2, LARGEST_LENGTH)),
    ("model.activations_checkpoint_num_layers", _COUNT),
    ("model.*_dropout", _SHARE_BELOW_1),
    ("model.loss_clip_val", _NOT_NEGATIVE),
    ("model.regression.num_attributes", Range(1, MOST_ATTRIBUTES)),
    ("model.regression.attribute_weights", _FINITE),
    ("model.regression.loss_mask_val", _FINITE),
    ("model.reward_standardization.mean", _FINITE),
    ("model.reward_standardization.std", _POSITIVE),
    ("model.ppo.num_rollout_samples", _COUNT),
    ("model.ppo.num_val_samples", _COUNT),
    ("model.ppo.entropy_bonus", _NOT_NEGATIVE),
    ("model.ppo.ratio_eps*", _POSITIVE),
    ("model.ppo.cispo_ratio_max", _POSITIVE),
    ("model.ppo.length_params.max_length", _COUNT),
    ("model.ppo.length_params.min_length", _NOT_NEGATIVE),
    ("model.ppo.sampling_params.top_k", _NOT_NEGATIVE),
    ("model.ppo.sampling_params.top_p", _SHARE_ABOVE_0),
    ("model.ppo.sampling_params.repetition_penalty", _POSITIVE),
    ("model.optim.lr", _NOT_NEGATIVE),
    ("model.optim.weight_decay", _NOT_NEGATIVE),
    ("model.optim.eps", _NOT_0_IN_FP32),  # a divisor, beside moments that may be 0
    ("model.optim.betas", _SHARE_BELOW_1),
    ("model.optim.sched.max_steps", _COUNT),
    ("model.optim.sched.*_steps", _NOT_NEGATIVE),
    ("model.optim.sched.min_lr", _NOT_NEGATIVE),
    ("model.data.*seq_length", _COUNT),
)

CHOICES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("exp_manager.log_format", LOG_FORMATS),
    ("exp_manager.log_level", LOG_LEVELS),
    ("trainer.*.on_nonfinite", get_args(Action)),
    ("trainer.ppo.staleness", (0, 1)),
    ("trainer.ppo.loss_aggregation", ("token_mean", "sequence_mean", "sequence_sum")),
    ("trainer.ppo.kl_in", ("reward", "loss")),
    ("trainer.ppo.kl_estimator", get_args(KLEstimator)),
    ("trainer.ppo.policy_logprobs", ("trainer", "engine")),
    ("trainer.ppo.reference_policy_placement", get_args(Placement)),
    ("trainer.ppo.generation.engine", ("embedded", "megatron", "trtllm")),
    ("trainer.ppo.generation.step", get_args(StepChoice)),
    ("remote_critic_rm.trained_critic", get_args(TrainedCritic)),
    ("model.rm_placement", get_args(Placement)),
    ("model.*keep_activations", get_args(KeepChoice)),
    ("model.activations_checkpoint_granularity", ("selective", "full")),
    ("model.activations_checkpoint_method", ("uniform", "block")),
    (
        "model.optim.name",
        ("distributed_fused_adam", "mcore_distributed_optim", "fused_adam", "adam", "adamw", "sgd"),
    ),
    ("model.data.*.truncation_method", get_args(TruncationMethod)),
)


def find_range(key: str) -> Range | None:
    """The range of a key's value, if it has one."""
    return next((allowed for pattern, allowed in RANGES if fnmatchcase(key, pattern)), None)


def find_choices(key: str) -> tuple[Any, ...]:
    """The values that a key may take; empty if they are not listed in `CHOICES`."""
    return next((allowed for pattern, allowed in CHOICES if fnmatchcase(key, pattern)), ())
