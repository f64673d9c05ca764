"""Which experts a pass computes its tokens with: counted, compared with the engine's, or given by it; and balanced.

Every packed row of a model with experts has a `RowExperts`, of which each layer's router gets its part. What is counted
are the positions whose outputs are wanted, each as often as it is: the same whatever layout, packing and sharing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.embedded.routing import routed
from nemo_style_aligner.engine.parallel.groups import device


@dataclasses.dataclass
class Balance:
    """What is done for even loads of experts: an auxiliary loss (arXiv:2101.03961), moves of their biases.

    The loss is the sum over layers of E * sum over experts of f * p: p is the mean score of an expert over the tokens
    that count, f its share of their choices in the update before. So f is of a whole global batch, in any layout, and
    costs no pass of its own. A bias is moved by a fixed step after each update: up, if its expert was chosen less than
    the mean, down if more (arXiv:2408.15664).

    Attributes:
        coefficient: of the loss.
        bias_step: of the biases.
        fractions: f, fp32 [layers with experts, experts]; at first all are even.
    """

    coefficient: float
    bias_step: float
    fractions: torch.Tensor

    @classmethod
    def of(cls, a: ModelArchitecture, coefficient: float, bias_step: float) -> Balance | None:
        """None where nothing is to be done."""
        if a.experts is None or not (coefficient or bias_step):
            return None
        size = sum(a.expert_layers), a.experts.number
        return cls(coefficient, bias_step, torch.full(size, 1 / a.experts.number, device=device()))

    def learn(self, seen: torch.Tensor) -> None:
        """Take over the loads of an update (`seen_by_all`)."""
        load = seen[:, :-2]
        self.fractions = (load / load.sum(1, keepdim=True).clamp(min=1)).float()

    def move_biases(self, layers: Iterable[torch.nn.Module]) -> None:
        """Move those of this rank's layers, after an update that was applied."""
        for layer in layers if self.bias_step else ():
            if isinstance(router := getattr(layer.mlp, "router", None), ExpertRouter):
                of_layer = self.fractions[layer.expert_layer]  # type: ignore[index]
                router.expert_bias += self.bias_step * (of_layer.mean() - of_layer).sign()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs; the biases are weights."""
        return {"expert_fractions": self.fractions.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; from even loads, if it was taken of no balance."""
        if "expert_fractions" in state:
            self.fractions = torch.tensor(state["expert_fractions"], device=self.fractions.device)


@dataclasses.dataclass
class RowExperts:
    """Of a packed row of t tokens.

    Attributes:
        weights: fp32 [t], how many wanted outputs each position has.
        given: uint8 [t, bytes], the engine's routes; None: they are not known.
        are_known: bool [t], tokens whose routes these are.
        replays: tokens are computed with these experts, and the router's own choice is only compared.
        part: (place, number) of this rank among those that have a part of the row each.
        balance: of the loss that is added; None: there is none.
        seen: of each layer with experts that has been computed, fp32 [experts + 2]: what its experts have been chosen
            for, how much was compared, and of this, what was another choice than the engine's.
    """

    weights: torch.Tensor
    given: torch.Tensor | None = None
    are_known: torch.Tensor | None = None
    replays: bool = False
    part: tuple[int, int] = (0, 1)
    balance: Balance | None = None
    seen: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def own(self, x: torch.Tensor, chosen: torch.Tensor | None) -> torch.Tensor:
        """Of something of each token [t, ...], that of this rank's part of the row, or of the ``chosen`` tokens."""
        if chosen is not None:
            return x.index_select(0, chosen)
        place, number = self.part
        size = len(x) // number
        return x[place * size : (place + 1) * size]


@dataclasses.dataclass
class LayerTokens:
    """A row's tokens in one layer: of ``layer``, counted among those with experts, those at ``chosen`` (None: all)."""

    row: RowExperts
    layer: int
    chosen: torch.Tensor | None

    @property
    def weights(self) -> torch.Tensor:
        """Of the tokens, see `RowExperts`."""
        return self.row.own(self.row.weights, self.chosen)

    def given(self, experts: Experts, own: torch.Tensor) -> torch.Tensor | None:
        """The engine's choice, int64 [n, k], and the router's ``own`` where that is not known; None: it is nowhere."""
        row, size = self.row, experts.per_token * (1 if experts.number <= 256 else 2)
        if row.given is None or row.are_known is None:
            return None
        of_layer = row.given[:, self.layer * size : (self.layer + 1) * size]
        numbers = row.own(of_layer, self.chosen).long()
        if size > experts.per_token:
            numbers = numbers[:, ::2] + 256 * numbers[:, 1::2]
        return numbers.where(row.own(row.are_known, self.chosen)[:, None], own)

    def note(self, chosen: torch.Tensor, number: int, given: torch.Tensor | None) -> None:
        """Note the router's own choice, int64 [n, k], of so many experts; again where it is computed again."""
        weights = self.weights
        seen = weights.new_zeros(number + 2)
        seen[:number].index_add_(0, chosen.flatten(), weights.repeat_interleave(chosen.shape[1]))
        if given is not None:
            differs = (chosen.sort(-1).values != given.sort(-1).values).any(-1)
            seen[number], seen[number + 1] = weights.sum(), (weights * differs).sum()
        self.row.seen[self.layer] = seen


class ExpertRouter(TopKRouter):
    """megatron-core's, with the engine's routing, which is the same.

    Attributes:
        tokens: which tokens come next; None: nothing is known of them.
    """

    tokens: LayerTokens | None = None

    def routing(self, logits: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """fp32 [s, b, experts] -> weights fp32 and choice bool, [s * b, experts] each."""
        logits, tokens = logits.view(-1, self.num_experts), self.tokens
        experts = self.config.layer(self.layer_number).experts
        chosen, weights = routed(logits, experts, self.expert_bias)
        if tokens is not None:
            given = tokens.given(experts, chosen)
            with torch.no_grad():
                tokens.note(chosen, experts.number, given)
            if tokens.row.replays and given is not None:
                chosen, weights = routed(logits, experts, self.expert_bias, given)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights)
        if (
            tokens is not None
            and tokens.row.balance is not None
            and tokens.row.balance.coefficient
            and torch.is_grad_enabled()
        ):
            probs = _WithLoss.apply(probs, _balance_loss(logits, experts, tokens, tokens.row.balance))
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)


def _balance_loss(logits: torch.Tensor, experts: Experts, tokens: LayerTokens, balance: Balance) -> torch.Tensor:
    """Summed over the tokens, as the losses of models are."""
    scores = logits.softmax(-1) if experts.scores == "softmax" else logits.sigmoid()
    if experts.scores == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    of_expert = balance.coefficient * experts.number * balance.fractions[tokens.layer]
    return (tokens.weights * (scores @ of_expert)).sum()


class _WithLoss(torch.autograd.Function):
    """Returns its first argument; the gradient of the second, a loss, is 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)


# ---- over all ranks -----------------------------------------------------------------------------


def seen_by_all(rows: Sequence[RowExperts | None], a: ModelArchitecture) -> torch.Tensor:
    """What was seen of some rows: fp64 [layers with experts, experts + 2]. Collective over all ranks that train.

    Each data-parallel rank has other rows, each stage other layers; where ranks share tokens as well, all of them have
    the same sums, whose relations are the same.
    """
    assert a.experts is not None
    total = torch.zeros(sum(a.expert_layers), a.experts.number + 2, dtype=torch.float64, device=device())
    for row in rows:
        for layer, seen in row.seen.items() if row is not None else ():
            total[layer] += seen
    dist.all_reduce(total)
    return total


LOADS = ("expert_load_mean", "expert_load_max", "dead_experts")


def load_metrics(seen: torch.Tensor) -> dict[str, float]:
    """How evenly experts are chosen (`seen_by_all`): the mean over layers, and the worst of them, of the largest load
    over the mean; the share of experts that no token has chosen. Nothing where nothing was seen.
    """
    load = seen[:, :-2]
    if not load.sum():
        return {}
    largest = load.max(1).values / load.mean(1).clamp(min=1e-9)
    found = largest.mean(), largest.max(), (load == 0).double().mean()
    return {name: number.item() for name, number in zip(LOADS, found, strict=True)}


def disagreement(seen: torch.Tensor) -> dict[str, float]:
    """The share of positions, in each layer, whose choice was not the engine's; nothing if none was compared."""
    compared, different = seen[:, -2:].sum(0).tolist()
    return {"routing_disagreement": different / compared} if compared else {}
