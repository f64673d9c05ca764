"""Activations of forward passes, kept for the backward pass of the same weights.

A PPO step that makes one update computes each sequence twice with the same trained weights: for its log-probs (or
values), of which advantages are made, and once more in training. Where memory has room, what the first pass computed
is kept, and training begins with its backward pass. The policy's numbers are the same, only when they are computed
differs; the critic's differ by rounding, since its last layer gives values of prompts, too, which training does not
ask for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.models import recompute
from nemo_style_aligner.models.frozen import FrozenWeights
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.models.logprobs import Prediction
from nemo_style_aligner.models.packing import PackedRow, used_lengths
from nemo_style_aligner.models.products import widened
from nemo_style_aligner.parallel.allocator import keep_freed_memory
from nemo_style_aligner.parallel.groups import device
from nemo_style_aligner.parallel.machine import available_memory, ranks_on_this_machine

logger = logging.getLogger(__name__)

KeepChoice = Literal["auto", "always", "never"]

_SHARE = 0.5
"""Of the free memory, for kept activations. On a CPU others take of the same memory: the critic beside the actor."""
_RESERVED_PER_PARAMETER = 16
"""Bytes that stay free besides: Adam's states and gradients, which come back or come to be, or the copy for a save."""


def activation_bytes(
    architecture: ModelArchitecture,
    itemsize: int,
    granularity: str | None = None,
    tp_size: int = 1,
    recomputes_mlp: bool = False,
) -> int:
    """What a packed token keeps for the backward pass, bytes; docs/performance.md has the formula.

    Args:
        itemsize: bytes of a number.
        granularity: of recomputation: None, ``selective`` or ``full``.
        tp_size: ranks that share each layer. Without sequence parallelism each has all of the hidden states.
        recomputes_mlp: ``selective`` means the whole MLP, as with Transformer Engine's layers.
    """
    a = architecture
    h, f = a.hidden_size, a.ffn_hidden_size // tp_size
    if granularity == "full":
        return itemsize * a.num_layers * h
    channels = (a.num_attention_heads + a.num_query_groups) * a.kv_channels // tp_size
    layer = 4 * h + 2 * channels + 3 * f
    if granularity == "selective":
        layer -= h + 3 * f if recomputes_mlp else 2 * h + f
    return itemsize * a.num_layers * layer


@dataclasses.dataclass
class KeptMicroBatch:
    """A micro batch as it was computed; of another data-parallel rank only what tells its sequences.

    Attributes:
        rank: data-parallel rank that computed it.
        sequences: int64 [used] of each of its b sequences: the tokens that were computed.
        wanted: bool [b, w], positions whose outputs there are.
        rows: of the batch that is trained, in this order; once it is known.
        packed, prediction: what the model was given; None for another rank's. A reward head predicts nothing.
        output: what it gave, with all that a backward pass needs; None: for want of memory it is computed again.
    """

    rank: int
    sequences: list[torch.Tensor]
    wanted: torch.Tensor
    rows: list[int] = dataclasses.field(default_factory=list)
    packed: PackedRow | None = None
    prediction: Prediction | None = None
    output: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens computed, without filling."""
        return sum(map(len, self.sequences))


class KeptPasses:
    """Forward passes since the weights last changed, until they are trained on.

    Which sequences were computed together, and where, is the same on all data-parallel ranks, which pass the same
    sequences in the same order. Who has memory for the activations is each rank's own affair (those that share layers
    agree): the micro batches are the same either way, and with them the numbers.

    Args:
        model: whose passes these are; see `keep_passes` for what it must not have.
        choice: ``auto`` keeps what memory has room for, ``always`` everything.
        update_size: sequences that are trained on before the weights change. No more are kept: the newest.
    """

    def __init__(self, model: MegatronModel, choice: KeepChoice, update_size: int) -> None:
        self._model = model
        self._choice = choice
        self._update_size = update_size
        self._micro_batches: list[KeptMicroBatch] = []
        self._work = [0] * model.layout.dp_size  # of each rank
        self._room = 0  # bytes
        self._retained = 0  # bytes that this process has, since it held as many once
        self._is_told = False

    def begin(self) -> None:
        """A pass begins: see how much memory there is. Collective over the ranks that share layers."""
        if self._choice == "always":
            return
        held, free = self._held(), self._free_bytes()
        room = max(0, int(_SHARE * (max(held, self._retained) + free)))
        if free >= 0:  # with the reserve untouched, what this process has anyway is all for this: nobody else gets it
            room = max(room, self._retained)
        if self._model.layout.tp_size > 1:
            agreed = torch.tensor([room], dtype=torch.int64, device=device())
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=parallel_state.get_tensor_model_parallel_group())
            room = int(agreed)
        self._room = room - held

    def has_room(self, micro_batch: KeptMicroBatch) -> bool:
        """Whether the activations of what was noted are kept."""
        if not any(micro_batch is noted for noted in self._micro_batches):
            return False
        if self._choice == "always":
            return True
        if self._bytes(micro_batch) > self._room:
            if not self._is_told:
                self._is_told = True
                logger.info(
                    "memory has no room for the activations of all sequences (%d MB for 1000 tokens): some forward "
                    "passes are computed again in training (keep_activations)",
                    self._bytes_per_token() * 1000 // 2**20,
                )
            return False
        self._room -= self._bytes(micro_batch)
        return True

    @property
    def keeps_logits(self) -> bool:
        """Whether logits are kept with the activations, on CPUs in bf16.

        GPUs compute them again in no time; in fp32 a chunk is more than the allocator keeps of freed memory, and new
        pages would take as long. Where activations are computed again to save memory, logits are, too.
        """
        config = self._model.config
        dtype = widened(torch.empty(0, dtype=config.params_dtype, device=device())).dtype
        return device().type == "cpu" and dtype == torch.bfloat16 and config.recompute_granularity is None

    def dealt(self, parts: list[list[int]], work: list[int]) -> list[list[int]]:
        """Each rank's rows of a new pass: the most work for the rank that has had least.

        Passes are small beside what is trained at once, so that their differences would add up.
        """
        sums = [sum(work[row] for row in part) for part in parts]
        largest_first = sorted(range(len(parts)), key=lambda i: -sums[i])
        least_first = sorted(range(len(parts)), key=lambda rank: self._work[rank])
        by_rank: list[list[int]] = [[] for _ in parts]
        for rank, part in zip(least_first, largest_first, strict=True):
            by_rank[rank] = parts[part]
            self._work[rank] += sums[part]
        return by_rank

    def add(self, rank: int, tokens: torch.Tensor, wanted: torch.Tensor) -> KeptMicroBatch:
        """Note what ``rank`` computes together; for its own, the caller fills in the rest.

        Args:
            tokens: int64 [b, s].
            wanted: bool [b, w]; both on the CPU.
        """
        sequences = [row[:used] for row, used in zip(tokens, used_lengths(wanted), strict=True)]
        micro_batch = KeptMicroBatch(rank, sequences, wanted)
        if not sequences:
            return micro_batch
        self._micro_batches.append(micro_batch)
        surplus = sum(len(noted.sequences) for noted in self._micro_batches) - self._update_size
        while surplus >= len(self._micro_batches[0].sequences):  # of a validation, or of an actor that did not go on
            surplus -= len(self._micro_batches.pop(0).sequences)
        return micro_batch

    def forget(self, micro_batch: KeptMicroBatch) -> None:
        """Training computes these sequences again. All ranks forget the same."""
        self._micro_batches = [noted for noted in self._micro_batches if noted is not micro_batch]

    def take(self, tokens: torch.Tensor, wanted: torch.Tensor) -> list[KeptMicroBatch]:
        """The micro batches of which a training batch has all sequences, with their ``rows`` in it; nothing stays.

        Args:
            tokens: int64 [n, s].
            wanted: bool [n, w], positions that training depends on; both on the CPU.
        """
        if device().type == "cpu" and keep_freed_memory():
            self._retained = max(self._held(), self._retained)
        known = self._micro_batches
        self.clear()
        lengths = _lengths(known)
        # A row that training leaves out may be any, but is asked for beside another alone.
        lengths_beside = _lengths([micro_batch for micro_batch in known if len(micro_batch.sequences) > 1])
        contents = [[_content(sequence) for sequence in micro_batch.sequences] for micro_batch in known]
        by_content: dict[bytes, list[int]] = {content: [] for of_one in contents for content in of_one}
        for row, used in enumerate(used_lengths(wanted)):
            possible = [used]  # nearly always what was computed is what training needs
            if used not in lengths:
                possible = [length for length in lengths if length > used] if used else lengths_beside
            for content in _contents(tokens[row], possible):
                if content in by_content:
                    by_content[content].append(row)
        free = set(range(len(tokens)))
        taken = []
        for micro_batch, of_one in zip(known, contents, strict=True):
            rows: list[int] = []
            for content, has in zip(of_one, micro_batch.wanted, strict=True):
                alike = (row for row in by_content[content] if row in free and row not in rows)
                rows += [row for row in alike if _covers(has, wanted[row])][:1]
            if len(rows) == len(micro_batch.sequences):
                free.difference_update(rows)
                micro_batch.rows = rows
                if wanted[rows].any():
                    taken.append(micro_batch)
        return taken

    def clear(self) -> None:
        """Forget everything: the weights change, or what was computed will not be trained on."""
        self._micro_batches = []
        self._work = [0] * len(self._work)

    def _held(self) -> int:
        """Bytes."""
        return sum(self._bytes(micro_batch) for micro_batch in self._micro_batches if micro_batch.output is not None)

    def _bytes(self, micro_batch: KeptMicroBatch) -> int:
        size = micro_batch.num_tokens * self._bytes_per_token()
        if micro_batch.prediction is not None and self.keeps_logits:
            vocabulary = len(self._model.gpt.shared_embedding_or_output_weight())
            size += len(micro_batch.prediction.targets) * vocabulary * torch.bfloat16.itemsize
        return size

    def _bytes_per_token(self) -> int:
        config, layout = self._model.config, self._model.layout
        itemsize, granularity = config.params_dtype.itemsize, config.recompute_granularity
        return activation_bytes(
            self._model.architecture, itemsize, granularity, layout.tp_size, recompute.recomputes_mlp(config)
        )

    def _free_bytes(self) -> float:
        """Of this rank's memory, beyond what is reserved."""
        layout = self._model.layout
        reserved = _RESERVED_PER_PARAMETER * self._model.architecture.num_parameters // layout.tp_size
        if device().type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            return free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - reserved
        return available_memory() / ranks_on_this_machine() - reserved


def keep_passes(
    model: MegatronModel, second: FrozenWeights | None, choice: KeepChoice, update_size: int
) -> KeptPasses | None:
    """Where passes of ``model`` are kept, if they are to be and can be.

    Args:
        second: weights that may take the place of the model's own between a pass and the update.
        choice, update_size: see `KeptPasses`.

    Raises:
        ValueError: they cannot be kept, and must be.
    """
    if choice == "never":
        return None
    drops_out = bool(model.config.hidden_dropout or model.config.attention_dropout)
    if why := why_not_kept(second is not None and second.swaps, model.layout.pp_size, drops_out):
        if choice == "always":
            raise ValueError(f"keep_activations=always: {why}. Choose auto or never")
        return None
    return KeptPasses(model, choice, update_size)


def why_not_kept(swaps: bool, pp_size: int, drops_out: bool) -> str | None:
    """Why passes of a model cannot be kept; None: they can.

    Args:
        swaps: other weights take the place of the trained ones between a pass and the update.
        pp_size: pipeline stages.
        drops_out: the model has dropout.
    """
    if swaps:
        return "other weights take the place of the trained ones (reference_policy_placement or rm_placement: swap)"
    if pp_size > 1:
        return "pipeline stages (model.pipeline_model_parallel_size) compute in another order in training"
    if drops_out:
        return "with dropout (model.hidden_dropout, model.attention_dropout) training computes something else"
    return None


def _lengths(micro_batches: Sequence[KeptMicroBatch]) -> list[int]:
    """Of all sequences, each once, ascending."""
    return sorted({len(sequence) for micro_batch in micro_batches for sequence in micro_batch.sequences})


def _content(sequence: torch.Tensor) -> bytes:
    """What tells a sequence [n] from others."""
    (content,) = _contents(sequence, [len(sequence)])
    return content


def _contents(row: torch.Tensor, lengths: Sequence[int]) -> Iterator[bytes]:
    """`_content` of the row's first tokens, as many as each of ``lengths`` says (ascending), as far as it has them."""
    tokens, begin, digest = row.contiguous().numpy(), 0, hashlib.blake2b(digest_size=16)
    for length in lengths:
        if length > len(tokens):
            return
        digest.update(tokens[begin:length].data)
        begin = length
        yield digest.copy().digest()


def _covers(has: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether outputs at ``has`` [w] include those ``wanted`` [w'], whose widths differ in what nobody wants."""
    places = wanted.nonzero()[:, 0]
    return not len(places) or (int(places[-1]) < len(has) and bool(has[places].all()))
