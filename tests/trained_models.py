"""Small models that are trained, batches for them, and what they report."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from small_models import SHAPE, VOCAB

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.rope import RopeScaling
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.schema import Updates
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.nonfinite import STOP
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, forward
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.models.ragged import RaggedBatch

EOS = 1
ARCHITECTURES = {
    "llama": ModelArchitecture(**SHAPE),
    "tied": ModelArchitecture(**SHAPE, tied_embeddings=True, qkv_bias=True),
    "qk-norm": ModelArchitecture(**SHAPE, qk_layernorm=True, kv_channels=16, rope_scaling=RopeScaling("yarn", 8.0, 64)),
    "scaled": ModelArchitecture(
        **SHAPE, no_rope_layers=(1,), rope_scaling=RopeScaling("linear", 2.0), softmax_scale=0.5, tied_embeddings=True,
        embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=1.5,
    ),
    "layernorm1p": ModelArchitecture(
        **SHAPE, normalization="layernorm1p", activation="squared-relu", gated=False, bias=True, rotary_percentage=0.5
    ),
    "norms after": ModelArchitecture(**SHAPE, layer_norms="after", qk_layernorm=True, qk_norm_over_heads=True),
    "norms both": ModelArchitecture(
        **SHAPE, layer_norms="both", normalization="rmsnorm1p", activation="gelu-tanh", tied_embeddings=True,
        attn_logit_softcapping=1.0, final_logit_softcapping=2.0, embedding_multiplier=5.0, softmax_scale=0.3,
    ),
    "windows": ModelArchitecture(**SHAPE, sliding_window=6, windowed_layers=(0, 1), local_rotary_base=50.0),
    "sinks": ModelArchitecture(**SHAPE, attention_sinks=True, sliding_window=6, windowed_layers=(1,)),
}  # fmt: skip
OPTIM = {"name": "distributed_fused_adam", "lr": 1e-2, "weight_decay": 0.1}
ADAM = schema.Optimizer(**OPTIM)


def tokens(rows: int = 5, width: int = 12, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


def logprobs(model: MegatronModel, ids: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return score(model, ids, Scoring(temperature))


def score(model: MegatronModel, ids: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    shape = (ids.shape[1] - 1, 2) if scoring.entropy else (ids.shape[1] - 1,)
    wanted = torch.ones(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
    return forward(model, Tokens(ids), wanted, MicroBatching(2), lambda outputs, _: outputs, shape, scoring)


@dataclasses.dataclass
class Weighted:
    """A batch whose loss is the sum of its outputs, weighted."""

    tokens: torch.Tensor
    weights: torch.Tensor


def weighted_sum(outputs: torch.Tensor, batch: Weighted) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a `Weighted` batch."""
    return (outputs.flatten(1) * batch.weights).sum(), torch.tensor(len(batch.weights)), {}


def make_actor(
    model: MegatronModel, frozen: FrozenWeights | None, clip: float = 1.0, nonfinite: Updates = STOP
) -> Actor:
    optimizer = Optimizer(model, ADAM, Schedule(lr=1e-2, name="constant"), clip, nonfinite)
    return Actor(
        model, optimizer, frozen, training_batching=MicroBatching(5), forward_batching=MicroBatching(2),
        temperature=1.0, loss=LossSettings(entropy_bonus=0.01),
    )  # fmt: skip


def policy_batch(ids: torch.Tensor, advantage: float = 1.0) -> RaggedBatch:
    """Prompts of one token, responses of all others."""
    n, s = ids.shape
    advantages = advantage * torch.randn(n * (s - 1), generator=torch.Generator().manual_seed(9))
    return RaggedBatch(
        ids.flatten().int(), torch.full((n,), s), torch.arange(n * s) % s > 0,
        {"old_logprobs": torch.full_like(advantages, -4.0), "advantages": advantages},
        torch.ones(n, dtype=torch.bool),
    )  # fmt: skip


def saved_tokenizer(folder: Path) -> Path:
    train_character_tokenizer(["abc"], folder)
    return folder


def reference_model() -> MegatronModel:
    torch.manual_seed(4)
    return build_model(ARCHITECTURES["llama"], {}, torch.float32, trainable=False)
