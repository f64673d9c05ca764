"""What a model takes of a rank's memory, by its shape and layout."""

from __future__ import annotations

import dataclasses
from typing import Any

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.trainer.models.activation_memory import activation_bytes


@dataclasses.dataclass(frozen=True)
class Layout:
    """Tensor-, pipeline-, data-, context-parallel sizes; experts' as in `ParallelLayout`, ``etp`` 0 meaning ``tp``."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 0

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.tp * self.cp * self.pp * self.dp

    def __str__(self) -> str:
        context = f" x CP {self.cp}" if self.cp > 1 else ""
        experts = f", EP {self.ep}" if self.ep > 1 else ""
        return f"TP {self.tp}{context} x PP {self.pp} x DP {self.dp}{experts}"

    @property
    def expert_ranks(self) -> int:
        """Ranks that share all experts of a layer."""
        return self.ep * (self.etp or self.tp)

    @property
    def expert_dp(self) -> float:
        """Ranks that have the same experts."""
        return self.tp * self.cp * self.dp / self.expert_ranks


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A model's bytes, with ``itemsize`` bytes per weight: 2 in bf16, 4 in fp32."""

    architecture: ModelArchitecture
    itemsize: int = 2

    def parameters(self, layout: Layout) -> float:
        """Parameters of the rank that has most: of a pipeline, the stage with the embedding or the output layer."""
        return sum(part for part, _ in self.parts(layout))

    def parts(self, layout: Layout) -> tuple[tuple[float, float], tuple[float, float]]:
        """Those `parameters`, without experts' and of experts alone, and the ranks that have the same ones."""
        a = self.architecture
        ends = a.output_parameters * (2 if layout.pp == 1 and not a.tied_embeddings else 1)
        own = ((a.layer_parameters - a.expert_parameters) / layout.pp + ends) / layout.tp
        return (own, layout.dp * layout.cp), (a.expert_parameters / layout.pp / layout.expert_ranks, layout.expert_dp)

    def weights(self, layout: Layout) -> float:
        """Bytes of weights."""
        return self.itemsize * self.parameters(layout)

    def gradients(self, layout: Layout) -> float:
        """Bytes of fp32 gradients."""
        return 4 * self.parameters(layout)

    def optimizer(self, layout: Layout) -> float:
        """Bytes of Adam's moments, and of fp32 main weights in bf16, divided over ranks with the same weights."""
        return (8 if self.itemsize == 4 else 12) * sum(part / replicas for part, replicas in self.parts(layout))

    def activations(self, layout: Layout, tokens: int, granularity: str | None = None, **layers: Any) -> float:
        """Bytes kept for the backward pass of a micro batch, with sequence parallelism, without logits.

        Of its part of the tokens, with context parallelism. Of a pipeline's first stage: 1 / pp of the layers' for each
        of the pp micro batches that it has begun. Where whole layers or MLPs are recomputed, one layer's besides.

        Args:
            layers: what they keep, see `activation_bytes`.
        """
        a, e = self.architecture, self.itemsize
        per_token = activation_bytes(a, e, granularity, **layers)
        if granularity == "full" or (granularity == "selective" and layers.get("recomputes_mlp")):
            per_token += activation_bytes(a, e, **layers) // a.num_layers
        return tokens * per_token / (layout.tp * layout.cp)

    def kv_bytes(self, tp: int) -> float:
        """Bytes of keys and values of one token, in an engine of ``tp`` ranks; each has a key head at least."""
        a = self.architecture
        return 2 * self.itemsize * a.num_layers * a.kv_channels * max(1, a.num_query_groups / tp)
