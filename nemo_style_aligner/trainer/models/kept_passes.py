"""Activations of forward passes, kept for the backward pass with the same weights.

A PPO step with one update runs each sequence through a model twice with the same weights: for log-probs (or values),
from which advantages are computed, and again in training. Where memory has room, the first pass's activations are kept,
and training begins with the backward pass. The policy's numbers stay the same. The critic's differ by rounding, since
the first pass also computes values at prompt positions, which training does not need.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_style_aligner.engine.parallel.allocator import keep_freed_memory, unused_memory
from nemo_style_aligner.engine.parallel.groups import device
from nemo_style_aligner.engine.parallel.machine import available_memory, ranks_on_this_machine
from nemo_style_aligner.kinds import KeepChoice
from nemo_style_aligner.trainer.models import recompute
from nemo_style_aligner.trainer.models.activation_memory import activation_bytes
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.models.layers import uses_torch_attention, uses_transformer_engine
from nemo_style_aligner.trainer.models.logprobs import Prediction
from nemo_style_aligner.trainer.models.packing import PackedRow, Sequences
from nemo_style_aligner.trainer.models.products import widened
from nemo_style_aligner.trainer.models.sharing import Costs

logger = logging.getLogger(__name__)

_SHARE = 0.5
"""Share of the free memory for kept activations. On a CPU, actor and critic take from the same memory."""
_RESERVED_PER_PARAMETER = 16
"""Bytes left free for Adam's states and gradients, which are restored or created later, or for the copy for a save."""


@dataclasses.dataclass
class Part:
    """Rows of a batch that are computed together; of another data-parallel rank's, only what identifies its sequences.

    Attributes:
        rows: of the batch; `KeptPasses.take` sets those of the training batch.
        rank: data-parallel rank that computes it.
        sequences: b sequences, and the positions whose outputs are computed.
        packed, prediction: of a kept part, the model's input; a reward head has no ``prediction``.
        output: the model's output with its autograd graph; None: memory had no room, so it is computed again.
    """

    rows: list[int]
    rank: int
    sequences: Sequences
    packed: PackedRow | None = None
    prediction: Prediction | None = None
    output: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed, without those that fill up the packed row."""
        return self.sequences.num_tokens

    def contents(self) -> list[bytes]:
        """What identifies each sequence: the tokens that went through the model and the one that the last predicts."""
        of_each = zip(self.sequences.tokens, self.sequences.used, strict=True)
        known = [row[: length + 1] for row, length in of_each]
        return [next(_contents(row, [len(row)])) for row in known]


class KeptPasses:
    """Forward passes of a model since its weights last changed, kept until they are trained on.

    Where data-parallel ranks share a batch that all of them hold, all know which sequences were computed together and
    by which rank; of ragged batches a rank knows its own passes. Each rank decides for itself whether it keeps the
    activations (ranks that compute together agree on it): the micro batches are the same either way, and with them the
    numbers.

    Args:
        model: the model whose passes are kept; see `why_not_kept` for the models that cannot have any.
        choice: ``auto`` keeps what memory has room for, ``always`` everything.
        update_size: sequences that are trained on before the weights change. Only that many, the newest, are kept.
    """

    def __init__(self, model: MegatronModel, choice: KeepChoice, update_size: int) -> None:
        self._model = model
        self._choice = choice
        self._update_size = update_size
        self._parts: list[Part] = []
        self._work = [0] * model.layout.dp_size  # dealt to each rank so far, operations
        self._room = 0  # bytes
        self._retained = 0  # the most bytes that were held, if freed memory stays with the process
        self._is_told = False

    def begin(self) -> None:
        """Measure how much memory there is for a pass that begins. Collective over ranks that compute together."""
        if self._choice == "always":
            return
        held = self._held()
        room = max(0, int(_SHARE * (max(held, self._retained) + self._free_bytes())))
        if self._retained > held:  # nobody else gets what this process does not give back
            room = max(room, held + min(self._retained - held, unused_memory()))
        if self._model.layout.tp_size * self._model.layout.cp_size > 1:
            agreed = torch.tensor([room], dtype=torch.int64, device=device())
            group = parallel_state.get_tensor_and_context_parallel_group()
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=group)
            room = int(agreed)
        self._room = room - held

    def compute(
        self, part: Part, packed: PackedRow, prediction: Prediction | None, call: Callable[[Any], torch.Tensor]
    ) -> torch.Tensor:
        """The output of ``call``, which takes the prediction; with the autograd graph where memory has room for it."""
        part.packed, part.prediction = packed, prediction
        is_kept = self._has_room(part)
        if is_kept and self._keeps_logits and prediction is not None:
            prediction = dataclasses.replace(prediction, keeps_logits=True)
        with torch.set_grad_enabled(is_kept):
            output = call(prediction)
        if is_kept:
            part.output = output
        return output

    def _has_room(self, part: Part) -> bool:
        """Decide whether a part's activations are kept; if so, count their memory."""
        if not any(part is noted for noted in self._parts):
            return False
        if self._choice == "always":
            return True
        if self._bytes(part) > self._room:
            if not self._is_told:
                self._is_told = True
                logger.info(
                    "not enough memory to keep the activations of all sequences (%d MB per 1000 tokens): training "
                    "recomputes some forward passes (keep_activations)",
                    self._bytes_per_token() * 1000 // 2**20,
                )
            return False
        self._room -= self._bytes(part)
        return True

    @property
    def _keeps_logits(self) -> bool:
        """Whether logits are kept with the activations: on CPUs that multiply in bf16, without recomputation.

        GPUs recompute logits in no time. In fp32 a chunk is larger than the tensors whose freed memory the allocator
        keeps, and new pages would take as long as recomputing. Where activations are recomputed, logits are, too.
        """
        config = self._model.config
        dtype = widened(torch.empty(0, dtype=config.params_dtype, device=device())).dtype
        return device().type == "cpu" and dtype == torch.bfloat16 and config.recompute_granularity is None

    def dealt(self, parts: list[list[int]], work: Costs) -> list[list[int]]:
        """Deal the shares of a new pass to the ranks: the most work to the rank that has had least.

        An update trains on many small passes, whose differences in work would otherwise add up.

        Args:
            parts: the rows of each share, one share per rank.
            work: of the rows of the pass.

        Returns:
            The rows of each rank.
        """
        sums = [work.of(part) for part in parts]
        largest_first = sorted(range(len(parts)), key=lambda i: -sums[i])
        least_first = sorted(range(len(parts)), key=lambda rank: self._work[rank])
        by_rank: list[list[int]] = [[] for _ in parts]
        for rank, part in zip(least_first, largest_first, strict=True):
            by_rank[rank] = parts[part]
            self._work[rank] += sums[part]
        return by_rank

    def add(self, part: Part) -> None:
        """Note a part that is about to be computed, by whichever rank."""
        if not len(part.sequences):
            return
        self._parts.append(part)
        surplus = sum(len(noted.sequences) for noted in self._parts) - self._update_size
        while surplus >= len(self._parts[0].sequences):  # of a validation, or of an actor that stopped
            surplus -= len(self._parts.pop(0).sequences)

    def forget(self, part: Part) -> None:
        """Drop a part, so that training computes its sequences again. All ranks must drop the same ones."""
        self._parts = [noted for noted in self._parts if noted is not part]

    def take(self, asked: Sequences) -> list[Part]:
        """Take the parts whose sequences are all in a training batch, with ``rows`` set; forget all others.

        Args:
            asked: the batch; wanted are the positions that training depends on.
        """
        if device().type == "cpu" and keep_freed_memory():
            self._retained = max(self._held(), self._retained)
        known = self._parts
        self.clear()
        lengths = _lengths(known)
        # A row that training leaves out may have any length, but matters only in a part with other sequences.
        lengths_beside = _lengths([part for part in known if len(part.sequences) > 1])
        contents = [part.contents() for part in known]
        by_content: dict[bytes, list[int]] = {content: [] for of_one in contents for content in of_one}
        for row, used in enumerate(asked.used):
            possible = [used]  # nearly always the pass computed what training needs
            if used not in lengths:
                possible = [length for length in lengths if length > used] if used else lengths_beside
            for content in _contents(asked.tokens[row], [length + 1 for length in possible]):
                if content in by_content:
                    by_content[content].append(row)
        free = set(range(len(asked)))
        taken = []
        for part, of_one in zip(known, contents, strict=True):
            rows: list[int] = []
            for content, has in zip(of_one, part.sequences.wanted, strict=True):
                alike = (row for row in by_content[content] if row in free and row not in rows)
                rows += [row for row in alike if _covers(has, asked.wanted[row])][:1]
            if len(rows) == len(part.sequences):
                free.difference_update(rows)
                part.rows = rows
                if any(asked.used[row] for row in rows):
                    taken.append(part)
        return taken

    def clear(self) -> None:
        """Forget everything: the weights change, or the passes will not be trained on."""
        self._parts = []
        self._work = [0] * len(self._work)

    def _held(self) -> int:
        """Bytes of the activations that are kept now."""
        return sum(self._bytes(part) for part in self._parts if part.output is not None)

    def _bytes(self, part: Part) -> int:
        size = part.num_tokens * self._bytes_per_token() // self._model.layout.cp_size
        if part.prediction is not None and self._keeps_logits:
            vocabulary = len(self._model.gpt.shared_embedding_or_output_weight())
            size += len(part.prediction.targets) * vocabulary * torch.bfloat16.itemsize
        return size

    def _bytes_per_token(self) -> int:
        config, layout = self._model.config, self._model.layout
        return activation_bytes(
            self._model.architecture,
            config.params_dtype.itemsize,
            config.recompute_granularity,
            layout.tp_size,
            recompute.recomputes_mlp(config),
            config.recompute_num_layers if config.recompute_method == "block" else None,
            uses_transformer_engine(config.params_dtype, config.layers),
            uses_torch_attention(config.params_dtype, config.layers),
        )

    def _free_bytes(self) -> float:
        """Free bytes of this rank's memory beyond the reserve; negative where the reserve is not free."""
        reserved = _RESERVED_PER_PARAMETER * sum(p.numel() for p in self._model.trained_parameters())
        if device().type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - reserved
        return available_memory() / ranks_on_this_machine() - reserved


def keep_passes(model: MegatronModel, second: FrozenWeights | None, choice: KeepChoice, update_size: int) -> None:
    """Let ``model`` keep its passes, unless ``choice`` is ``never``, or is ``auto`` and they cannot be kept.

    Args:
        second: weights that may take the place of the model's own between a pass and the update.
        choice, update_size: see `KeptPasses`.

    Raises:
        ValueError: ``choice`` is ``always``, but passes cannot be kept.
    """
    model.kept_passes = None
    if choice == "never":
        return
    of_adapters = any(adapter.dropout for adapter in model.adapters.values())
    drops_out = bool(model.config.hidden_dropout or model.config.attention_dropout or of_adapters)
    swaps, together = second is not None and second.swaps, model.computes_together
    if why := why_not_kept(swaps, model.layout.pp_size, drops_out, together):
        if choice == "always":
            raise ValueError(f"keep_activations=always: {why}. Choose auto or never")
        return
    model.kept_passes = KeptPasses(model, choice, update_size)


def why_not_kept(swaps: bool, pp_size: int, drops_out: bool, computes_together: bool) -> str | None:
    """Why passes of a model cannot be kept; None: they can.

    Args:
        swaps: other weights take the place of the trained ones between a pass and the update.
        pp_size: pipeline stages.
        drops_out: the model has dropout.
        computes_together: see `MegatronModel.computes_together`.
    """
    if computes_together:
        return "data-parallel ranks share experts (model.expert_model_parallel_size): all would have to keep the same"
    if swaps:
        return "other weights take the place of the trained ones (reference_policy_placement or rm_placement: swap)"
    if pp_size > 1:
        return "with pipeline stages (model.pipeline_model_parallel_size), training runs passes in another order"
    if drops_out:
        return "with dropout (hidden_dropout, attention_dropout, adapter_dropout), training computes other activations"
    return None


def _lengths(parts: Sequence[Part]) -> list[int]:
    """The distinct numbers of used tokens of all sequences, ascending."""
    return sorted({length for part in parts for length in part.sequences.used})


def _contents(row: torch.Tensor, lengths: Sequence[int]) -> Iterator[bytes]:
    """Digests of the row's prefixes of ``lengths`` tokens (ascending), up to the length of the row."""
    tokens, begin, digest = row.contiguous().numpy(), 0, hashlib.blake2b(digest_size=16)
    for length in lengths:
        if length > len(tokens):
            return
        digest.update(tokens[begin:length].data)
        begin = length
        yield digest.copy().digest()


def _covers(has: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether all positions set in ``wanted`` [u'] are set in ``has`` [u]."""
    return len(wanted) <= len(has) and bool(has[: len(wanted)][wanted].all())
