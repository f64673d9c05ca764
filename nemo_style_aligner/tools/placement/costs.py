"""What passes of a model cost, in bytes and seconds of one rank: from its shape, its layout and the device's rates.

Every formula is per rank, of ``tp`` x ``pp`` x ``dp`` equal ones.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from nemo_style_aligner.tools.placement.rates import Device
from nemo_style_aligner.trainer.models.sizes import Layout, Sizes

KERNELS_PER_LAYER = 7
"""In decoding: four products, attention, and two of all the rest, which is fused."""

MACHINE = 8
"""Devices of a machine, as far as sums over data-parallel ranks are concerned."""

_PARTS = 1 << 14
"""Updates, and batches of scores, whose largest part is remembered."""

PASSES_PER_STAGE = 4
"""Micro batches of an update for each pipeline stage, where there are samples enough."""

SEND_SECONDS = 1e-5
"""From one rank to another, beside what the bytes take."""


class Sample(NamedTuple):
    """Tokens of a prompt and of its response."""

    prompt: int
    response: int

    @property
    def tokens(self) -> int:
        """Of both."""
        return self.prompt + self.response


@dataclasses.dataclass(frozen=True)
class Model(Sizes):
    """And its seconds, on a device type.

    Attributes:
        group: so many neighbouring samples have one prompt, which a pass computes once.
    """

    device: Device = dataclasses.field(kw_only=True)
    group: int = dataclasses.field(default=1, kw_only=True)

    def decode(self, tp: int, batch: float, kv_tokens: float) -> float:
        """Seconds of a pass that extends ``batch`` responses by a token, with ``kv_tokens`` before them in all.

        GPUs read weights while they compute. A CPU does one after the other, and computes as in `forward`.
        """
        a, d = self.architecture, self.device
        reading = self.itemsize * (a.layer_parameters_read(batch) + a.output_parameters) / tp / d.bandwidth
        computing = 2 * (a.active_layer_parameters + a.output_parameters) / tp * batch / d.products
        beside = self.kv_bytes(tp) * a.keys_read(batch, kv_tokens) / d.bandwidth + self._per_layer(tp, batch)
        if d.is_cpu:
            return d.decoding_factor * (reading + beside) + computing / d.forward_share
        return d.decoding_factor * (max(reading, computing) + beside)

    def prefill(self, tp: int, tokens: float) -> float:
        """Seconds that an engine needs for prompts' tokens."""
        a, d = self.architecture, self.device
        sums = 2 * a.num_layers * self._all_reduce(tp, tokens)
        return 2 * a.active_layer_parameters * tokens / tp / (d.products * d.forward_share) + sums

    def _per_layer(self, tp: int, batch: float) -> float:
        return self.architecture.num_layers * (KERNELS_PER_LAYER * self.device.kernel + 2 * self._all_reduce(tp, batch))

    def _all_reduce(self, tp: int, tokens: float) -> float:
        size = self.itemsize * self.architecture.hidden_size * tokens
        return self.device.all_reduce_seconds(size) if tp > 1 and tokens else 0.0

    def _exchange(self, layout: Layout, tokens: float) -> float:
        """Seconds to bring tokens to their experts and back, in one layer: between machines, or within one."""
        experts, d, ranks = self.architecture.experts, self.device, layout.expert_ranks
        if experts is None or ranks == 1:
            return 0.0
        size = 2 * self.itemsize * self.architecture.hidden_size * experts.per_token * tokens / layout.tp
        if ranks > MACHINE:
            return size * (1 - MACHINE / ranks) / d.network
        return d.all_reduce_seconds(size) / 2

    def forward(self, layout: Layout, samples: Sequence[Sample], micro_batch: int) -> float:
        """Seconds of a pass over samples for log-probs or values; see `training`."""
        return self._passes(layout, samples, micro_batch, len(samples), is_training=False)

    def training(self, layout: Layout, samples: Sequence[Sample], micro_batch: int, update: int) -> float:
        """Seconds of training once on all samples.

        Args:
            micro_batch: tokens of each, at most.
            update: samples of each update; the ranks meet after each.
        """
        seconds = self._passes(layout, samples, micro_batch, update, is_training=True)
        return seconds + math.ceil(len(samples) / update) * self.update(layout)

    def update(self, layout: Layout) -> float:
        """Seconds to add up gradients over ranks with the same weights, step the optimizer, and gather weights.

        Within a machine first: what passes the network is divided over the machine's ranks.
        """
        of_experts = MACHINE // layout.expert_ranks
        shares = zip(self.parts(layout), (MACHINE // layout.tp, of_experts), strict=True)
        return sum(self._update(part, replicas, max(1, here)) for (part, replicas), here in shares)

    def _update(self, parameters: float, replicas: float, here: int) -> float:
        """`update` of parameters that ``replicas`` ranks have, of which up to ``here`` are on one machine."""
        d, neighbours = self.device, min(replicas, here)
        seconds = (3 * 12 + 4) * parameters / replicas / d.bandwidth  # reads and writes states, reads gradients
        sent = (4 + self.itemsize) * parameters
        if neighbours > 1 and sent:
            seconds += d.all_reduce_seconds(sent) / 2  # adding up and gathering, each half of it
        return seconds + sent / neighbours * (1 - neighbours / replicas) / d.network

    def _passes(
        self, layout: Layout, samples: Sequence[Sample], micro_batch: int, update: int, *, is_training: bool
    ) -> float:
        """The work of the rank that has most in each update, at the rate of passes, with sums and pipeline bubbles."""
        a, d = self.architecture, self.device
        rate = layout.tp * layout.cp * layout.pp * d.products * (d.training_share if is_training else d.forward_share)
        factor = 3 if is_training else 1
        seconds = 0.0
        for begin in range(0, len(samples), update):
            part = samples[begin : begin + update]
            most, tokens = self._largest_part(tuple(part), layout.dp)
            passes = max(1, math.ceil(tokens / micro_batch))
            if layout.pp > 1:  # smaller ones, as far as samples go: fewer bubbles
                passes = max(passes, min(math.ceil(len(part) / layout.dp), PASSES_PER_STAGE * layout.pp))
            of_pass = tokens / passes / layout.cp
            sums = passes * self._all_reduce(layout.tp, of_pass) * 2 * a.num_layers / layout.pp
            sums += passes * self._exchange(layout, of_pass) * sum(a.expert_layers) / layout.pp
            if layout.cp > 1:  # keys and values of all parts
                size = 2 * self.itemsize * a.num_query_groups * a.kv_channels / layout.tp * tokens / passes
                sums += passes * d.all_reduce_seconds(size) / 2 * a.num_layers / layout.pp
            if layout.pp > 1:  # what a stage hands to the next
                sums += passes * SEND_SECONDS + tokens / layout.cp * a.hidden_size * self.itemsize / d.network
            alone = factor * most / rate * self._slowest_stage(layout, part) + (2 if is_training else 1) * sums
            seconds += alone * (1 + (layout.pp - 1) / passes)
        return seconds

    @functools.cached_property  # layouts and plans ask for the same parts again and again
    def _largest_part(self) -> Callable[[tuple[Sample, ...], int], tuple[float, float]]:
        """Work and tokens of the rank that has most. Groups stay together, or are divided if that is faster."""

        @functools.lru_cache(_PARTS)
        def largest(samples: tuple[Sample, ...], ranks: int) -> tuple[float, float]:
            return min(self._in_groups(samples, ranks, size) for size in _halves(self.group))

        return largest

    @functools.cached_property
    def _operations(self) -> Callable[[int, int], int]:
        return functools.cache(self.architecture.forward_operations)

    def _in_groups(self, samples: Sequence[Sample], ranks: int, size: int) -> tuple[float, float]:
        """`_largest_part` where ``size`` neighbours stay together."""
        operations, work, tokens = self._operations, [], 0
        for begin in range(0, len(samples), size):
            first, *others = samples[begin : begin + size]
            whole = operations(first.tokens, first.response)
            tokens += first.tokens
            if others:
                whole += sum([operations(s.tokens, s.response) for s in others])
                whole -= len(others) * operations(first.prompt, 0)
                tokens += sum([sample.response for sample in others])
            work.append(whole)
        most = largest_share(work, ranks)
        return most, tokens * most / sum(work)

    def _slowest_stage(self, layout: Layout, samples: Sequence[Sample]) -> float:
        """Work of a pipeline's last stage, which has the output layer, over that of its stages on average."""
        if layout.pp == 1:
            return 1.0
        layers = self.architecture.active_layer_parameters * sum(sample.tokens for sample in samples)
        head = self.architecture.output_parameters * sum(sample.response for sample in samples)
        return layout.pp * (layers / layout.pp + head) / (layers + head)

    def refit(self, layout: Layout, engine_tp: int, *, is_apart: bool = False) -> float:
        """Seconds to bring trained weights into the engines, bucket by bucket.

        Args:
            is_apart: the engines are on ranks of their own, to which rank 0's machine broadcasts the whole model.
        """
        size = self.itemsize * self.architecture.num_parameters
        if is_apart:
            return size / self.device.network
        own = self.architecture.expert_parameters == 0 or (layout.ep == 1 and layout.expert_ranks == layout.tp)
        if layout.pp == 1 and layout.tp == engine_tp and own:
            return 0.0  # the engine computes with the trainer's weights
        return size * (1 - 1 / (layout.pp * layout.ep)) / self.device.network + size / self.device.bandwidth


def _halves(size: int) -> Iterator[int]:
    while size:
        yield size
        size //= 2


def largest_share(work: Sequence[float], ranks: int) -> float:
    """The work of the rank that has most, where each piece goes to the rank with least, the largest first."""
    if len(work) <= ranks:
        return max(work)
    shares = [0.0] * ranks
    for piece in sorted(work, reverse=True):
        heapq.heapreplace(shares, shares[0] + piece)
    return max(shares)
