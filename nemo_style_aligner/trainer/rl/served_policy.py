"""The policy of a training job behind the same API, read only: ``trainer.ppo.serve_policy``."""

from __future__ import annotations

import logging

import torch.distributed as dist

from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.groups import device
from nemo_style_aligner.engine.serving.app import ServedModel
from nemo_style_aligner.engine.serving.generation import Generation
from nemo_style_aligner.engine.vocabulary import vocabulary_options
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.guard.http_client import server_url
from nemo_style_aligner.trainer.config.loading import ConfigError
from nemo_style_aligner.trainer.config.schema import ServePolicy
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.restore import BaseModel

logger = logging.getLogger(__name__)

_SECTION = "trainer.ppo.serve_policy"


class PolicyServer:
    """An engine of its own on rank 0, which gets the policy's weights whenever the run's engines do.

    It shares nothing with the run but the processor: the run's samples and numbers stay as they are.
    """

    def __init__(self, section: ServePolicy, base: BaseModel, longest: int, token: str | None) -> None:
        """Start to listen on rank 0; requests wait for the first weights.

        Args:
            longest: tokens of a prompt and its response in the run, unless the config says otherwise.
            token: the secret that clients must know; None: no authentication.

        Raises:
            ConfigError: the model has fewer positions than the config asks for.
            PlaceTakenError: nothing can listen where the config says.
        """
        max_length, positions = section.max_length or longest, base.architecture.max_position_embeddings
        if max_length > positions:
            raise ConfigError(f"{_SECTION}.max_length={max_length} is more than the model's {positions} positions")
        self._served: ServedModel | None = None
        if dist.get_rank():
            return
        self._engine = EmbeddedEngine(
            base.architecture,
            dtype=base.dtype,
            device=device(),
            num_slots=section.num_slots,
            max_sequence_length=max_length,
            is_watched=False,
            **vocabulary_options(base.architecture, base.tokenizer),
        )
        self._engine.build()
        self._served = ServedModel(
            self._engine,
            base.tokenizer,
            "policy",
            host=section.host,
            port=section.port,
            token=token,
            section=_SECTION,
        )
        server = self._served.server
        logger.info("policy served on %s/v1, API key: the shared secret", server_url(server.host, server.port))

    def refit(self, model: MegatronModel, version: int) -> None:
        """Take over the weights of the policy. Collective over the ranks that export them (`export_weights`)."""
        if model.layout.replica and not model.computes_together:
            return
        weights = export_weights(model, transient=True)
        if self._served is None:
            for _ in weights:
                pass
            return
        generation = self._served.generation
        assert isinstance(generation, Generation)
        with generation.paused():
            self._engine.refit(weights, version)

    def close(self) -> None:
        """Answer nobody any more."""
        if self._served is not None:
            self._served.close(1)
