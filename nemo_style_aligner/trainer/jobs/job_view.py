"""What the checks of a job's settings read, and the keys that several of them use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor, RewardService, fields_of_job
from nemo_style_aligner.trainer.launch.roles import CRITIC, ROLLOUT, TEACHER, devices_key, ranks_apart
from nemo_style_aligner.trainer.models.foreign_models import foreign_config, is_foreign
from nemo_style_aligner.trainer.models.restore import read_base_config

TP, PP = "model.tensor_model_parallel_size", "model.pipeline_model_parallel_size"
CP = "model.context_parallel_size"
EP, ETP = "model.expert_model_parallel_size", "model.expert_tensor_parallel_size"
GLOBAL_BATCH, MICRO_BATCH = "model.global_batch_size", "model.micro_batch_size"
LENGTH, POSITIONS = "model.encoder_seq_length", "model.max_position_embeddings"
ROLLOUT_RANKS, CRITIC_RANKS = devices_key(ROLLOUT), devices_key(CRITIC)
KL_PENALTY, TEACHER_ARCHIVE = "trainer.ppo.initial_policy_kl_penalty", f"{TEACHER}.restore_from_path"
PROMPTS, GROUP, BEST = (
    *("model.ppo.num_rollout_samples", "trainer.ppo.num_rollouts_per_prompt", "trainer.ppo.top_n_rollouts"),
)


@dataclasses.dataclass(frozen=True)
class JobView:
    """A job's config and surroundings, as the checks see them.

    Attributes:
        name: the job's YAML file, without its ending.
        config: its ``model`` section is laid over the checkpoint's.
        world_size: ranks of the job.
        architecture: the model's shape; None if the checkpoint's config could not be read.
        rank: this process's.
    """

    name: str
    config: JobConfig
    world_size: int
    architecture: ModelArchitecture | None
    rank: int = 0

    def get(self, key: str) -> Any:
        """The value of a key; None if it is not set."""
        return self.config.get(key)

    def has(self, key: str) -> bool:
        """Whether it is a key or a section of this job."""
        return key in fields_of_job(self.name)

    def show(self, *keys: str) -> str:
        """``key=value`` of each key, for messages."""
        return ", ".join(f"{key}={self.get(key)}" for key in keys)

    @property
    def is_actor(self) -> bool:
        """Whether the job trains a policy by reinforcement learning, whatever the algorithm."""
        return isinstance(self.config, PPOActor)

    @property
    def actor(self) -> PPOActor:
        """The config of such a job."""
        assert isinstance(self.config, PPOActor)
        return self.config

    @property
    def responses(self) -> int:
        """Responses that a step of an actor trains on."""
        responses: int = self.get(PROMPTS) * self.get(self._of_prompt)
        return responses

    @property
    def shown_responses(self) -> str:
        """What makes `responses` as many, for messages."""
        return self.show(PROMPTS, *([self._of_prompt] if self.get(self._of_prompt) != 1 else []))

    @property
    def _of_prompt(self) -> str:
        return GROUP if self.get(BEST) is None else BEST

    @property
    def apart(self) -> dict[str, int]:
        """Ranks set apart: see `roles.ranks_apart`."""
        return ranks_apart(self.config.trainer.ppo) if isinstance(self.config, PPOActor) else {}

    @property
    def rollout_ranks(self) -> int:
        """Ranks that only generate."""
        return self.apart.get(ROLLOUT, 0)

    @property
    def training_ranks(self) -> int:
        """Ranks that train."""
        return self.world_size - sum(self.apart.values())

    @property
    def is_apart(self) -> bool:
        """Whether this rank is set apart: it reads no data of the policy's, and its machine may have none."""
        return self.rank >= self.training_ranks > 0

    @property
    def tp_size(self) -> int:
        """The tensor-parallel size that the config asks for."""
        return self.config.model.tensor_model_parallel_size

    @property
    def pp_size(self) -> int:
        """The pipeline-parallel size that the config asks for."""
        return self.config.model.pipeline_model_parallel_size

    @property
    def cp_size(self) -> int:
        """The context-parallel size that the config asks for."""
        return self.config.model.context_parallel_size

    @property
    def ep_size(self) -> int:
        """The number of groups with different experts that the config asks for."""
        return self.config.model.expert_model_parallel_size

    @property
    def etp_size(self) -> int:
        """The number of ranks that share each expert that the config asks for."""
        return self.config.model.expert_tensor_parallel_size or self.tp_size

    @property
    def shares_experts(self) -> bool:
        """See `ParallelLayout.shares_experts`."""
        return self.tp_size % (self.ep_size * self.etp_size) != 0


Check = Callable[[JobView], Iterator[str]]
"""One line for each problem: key=value, why it cannot be, what to do."""


def base_config(path: str | None, key: str) -> dict[str, Any]:
    """The config that `read_base_config` reads, or that of the archive that `first_archives` will make.

    Raises:
        ValueError: in one line that begins with ``key``.
    """
    try:
        if path and is_foreign(location := Path(str(path)).expanduser()):
            return foreign_config(location)
        return read_base_config(path, key)[1]
    except (OSError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).splitlines())  # tarfile's error has a line for each compression
        raise ValueError(text if text.startswith(key) else f"{key}={path}: {text}") from error


def as_served(config: JobConfig) -> RewardService:
    """The config with which ``serve_reward_model.py`` would serve a reward model in the layout of an actor's job.

    A teacher is of the same layout. As in the critic's job, the attributes of a regression model are merged.
    """
    given = {key: config.get(key) for key in (TP, CP, PP, "model.sequence_parallel", "trainer.precision")}
    shared = {key: value for key, value in given.items() if value is not None}
    served = RewardService.read(load_defaults("inference_rm"))
    return served.changed(shared | {"model.regression.merge_attributes": True})
