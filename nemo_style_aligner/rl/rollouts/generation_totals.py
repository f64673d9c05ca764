"""What the engines of all ranks did in one rollout phase, as metrics."""

from __future__ import annotations

import torch
import torch.distributed as dist

from nemo_style_aligner.generation.engine import GenerationEngine
from nemo_style_aligner.parallel.groups import all_reduce_sums, device

_SUMMED = ("generated_tokens", "prefill_tokens", "shared_prefix_tokens", "steps", "active_slot_steps", "preemptions")


class GenerationTotals:
    """Sums over the calls of `GenerationEngine.generate` in one phase on this rank."""

    def __init__(self) -> None:
        self._sums = dict.fromkeys(_SUMMED, 0)
        self._peak_kv_share = 0.0
        self._seconds = 0.0

    def add(self, engine: GenerationEngine, seconds: float) -> None:
        """Add the counters of a finished ``engine.generate`` call that took ``seconds``."""
        statistics = engine.statistics
        for name in _SUMMED:
            self._sums[name] += getattr(statistics, name)
        if statistics.num_pages:
            self._peak_kv_share = max(self._peak_kv_share, statistics.peak_pages / statistics.num_pages)
        self._seconds += seconds

    @property
    def tokens(self) -> int:
        """New tokens."""
        return self._sums["generated_tokens"]

    def metrics(self, engine: GenerationEngine, is_leader: bool) -> dict[str, float]:
        """The metrics over all engines, the same on every rank. Collective.

        ``tokens_per_second`` is new tokens over the time of the slowest engine; ``balance`` is the engines' mean time
        over the slowest's, 1 if all took equally long; ``active_slots`` is the mean over all engines' forward passes;
        ``peak_kv_share`` is the mean of the engines' peak shares of KV memory; ``compilations`` counts since the start.

        Args:
            is_leader: whether this rank speaks for its engine (ranks may share one).
        """
        weight = 1.0 if is_leader else 0.0
        own = {name: weight * value for name, value in self._sums.items()}
        own |= {"engines": weight, "seconds": weight * self._seconds, "peak_kv_share": weight * self._peak_kv_share}
        sums = all_reduce_sums(own | {"compilations": weight * engine.num_compilations})
        slowest = torch.tensor([self._seconds], dtype=torch.float64, device=device())
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        longest = max(float(slowest), 1e-9)
        return {
            "tokens": sums["generated_tokens"],
            "tokens_per_second": sums["generated_tokens"] / longest,
            "prompt_tokens_computed": sums["prefill_tokens"],
            "prompt_tokens_shared": sums["shared_prefix_tokens"],
            "passes": sums["steps"],
            "active_slots": sums["active_slot_steps"] / max(sums["steps"], 1.0),
            "preemptions": sums["preemptions"],
            "peak_kv_share": sums["peak_kv_share"] / sums["engines"],
            "balance": sums["seconds"] / (sums["engines"] * longest),
            "compilations": sums["compilations"],
        }
