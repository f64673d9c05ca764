"""What the checks of a job's settings read, and the keys that several of them use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_style_aligner.architecture import ModelArchitecture

TP, PP = "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
GLOBAL_BATCH, MICRO_BATCH = "model.global_batch_size", "model.micro_batch_size"
LENGTH, POSITIONS = "model.encoder_seq_length", "model.max_position_embeddings"
ROLLOUT_RANKS = "trainer.ppo.rollout_devices"
RESPONSES = ("model.ppo.num_rollout_samples", "trainer.ppo.num_rollouts_per_prompt")  # factors of those of a step


@dataclasses.dataclass(frozen=True)
class JobView:
    """A job's config and surroundings, as the checks see them.

    Attributes:
        name: the job's YAML file, without its ending.
        cfg: the config, its ``model`` section laid over the checkpoint's.
        world_size: ranks of the job.
        architecture: the model's shape; None if the checkpoint's config could not be read.
        rank: this process's.
    """

    name: str
    cfg: DictConfig
    world_size: int
    architecture: ModelArchitecture | None
    rank: int = 0

    def get(self, key: str) -> Any:
        """The value of a key; None if it is not set or cannot be computed (another check reports the latter)."""
        try:
            return OmegaConf.select(self.cfg, key)
        except OmegaConfBaseException:
            return None

    def said(self, *keys: str) -> str:
        """``key=value`` of each key, for messages."""
        return ", ".join(f"{key}={self.get(key)}" for key in keys)

    @property
    def is_actor(self) -> bool:
        """Whether the job trains a policy by reinforcement learning, whatever the algorithm."""
        return "remote_critic_rm" in self.cfg

    @property
    def responses(self) -> int | None:
        """Responses of a step; None if the config does not say."""
        prompts, of_each = map(self.get, RESPONSES)
        return prompts * of_each if isinstance(prompts, int) and isinstance(of_each, int) else None

    @property
    def responses_said(self) -> str:
        """What makes `responses` as many, for messages."""
        return self.said(*(RESPONSES if self.get(RESPONSES[1]) != 1 else RESPONSES[:1]))

    @property
    def rollout_ranks(self) -> int:
        """Ranks that only generate."""
        return int(self.get(ROLLOUT_RANKS) or 0)

    @property
    def training_ranks(self) -> int:
        """Ranks that train."""
        return self.world_size - self.rollout_ranks

    @property
    def only_generates(self) -> bool:
        """Whether this rank only generates: it reads no data or training checkpoint, and its machine may have none."""
        return self.rank >= self.training_ranks > 0

    @property
    def tp_size(self) -> int:
        """The tensor-parallel size that the config asks for."""
        return int(self.get(TP) or 1)

    @property
    def pp_size(self) -> int:
        """The pipeline-parallel size that the config asks for."""
        return int(self.get(PP) or 1)


Check = Callable[[JobView], Iterator[str]]
"""One line for each problem: key=value, why it cannot be, what to do."""
