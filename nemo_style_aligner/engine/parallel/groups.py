"""Process groups: the model-parallel layout of a job, and the few collectives that other modules need.

Ranks are ordered tensor-parallel first, then data-parallel, then pipeline (megatron-core's order
``tp-cp-ep-dp-pp``), so that a tensor-parallel group sits inside one node.

megatron-core takes seconds to import: functions that need it do that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_style_aligner.engine.parallel.detection import LaunchError
from nemo_style_aligner.errors import excepthook_kept

_TIMEOUT_MINUTES = 30.0  # as in the configs
_SEED_STEP_OF_STAGES = 100  # as in Megatron-LM and NeMo
_SEED_STEP_OF_CONTEXT = 1_000_000
# For ranks to find each other over gloo. Where nothing answers, gloo takes five times as long to fail.
_MEETING_TIMEOUT = timedelta(minutes=2)
_CONTROL_MARGIN_MINUTES = 5.0  # for the leader to end a wait that ran out, before the others give up on the leader


@dataclasses.dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the tensor-, pipeline- and data-parallel groups and this rank's place in them.

    ``cp_size`` ranks of those that have the same samples compute each of their sequences together.

    A stage's ranks are divided once more for its layers' experts: ``etp_size`` neighbouring ranks share each expert,
    ``ep_size`` such groups all experts, and the rest are replicas of these.
    """

    tp_size: int
    pp_size: int
    dp_size: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    ep_size: int = 1
    etp_size: int = 1
    ep_rank: int = 0
    etp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0

    def __str__(self) -> str:
        of_experts = f", of experts: expert {self.ep_size} x tensor {self.etp_size}" if self.cuts_experts else ""
        context = f" x context {self.cp_size}" if self.cp_size > 1 else ""
        return f"tensor {self.tp_size}{context} x pipeline {self.pp_size} x data {self.dp_size}{of_experts}"

    @property
    def cuts_experts(self) -> bool:
        """Whether experts are divided otherwise than other weights."""
        return (self.ep_size, self.etp_size) != (1, self.tp_size)

    @property
    def shares_experts(self) -> bool:
        """Whether data-parallel ranks have different experts, so that they can compute only together."""
        return self.tp_size % (self.ep_size * self.etp_size) != 0

    @property
    def expert_dp_size(self) -> int:
        """Ranks that have the same experts."""
        return self.tp_size * self.num_replicas // (self.ep_size * self.etp_size)

    @property
    def num_replicas(self) -> int:
        """Ranks that have the same weights, but for experts."""
        return self.dp_size * self.cp_size

    @property
    def replica(self) -> int:
        """This rank's number among those."""
        return self.dp_rank * self.cp_size + self.cp_rank

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the output layer or the reward head."""
        return self.pp_rank == self.pp_size - 1


def device() -> torch.device:
    """This rank's device: its GPU, or the CPU where there is no CUDA."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def initialize_model_parallel(
    tp_size: int,
    pp_size: int,
    seed: int,
    timeout_minutes: float = _TIMEOUT_MINUTES,
    *,
    ep_size: int = 1,
    etp_size: int | None = None,
    cp_size: int = 1,
) -> ParallelLayout:
    """Create megatron-core's process groups and seed every random stream.

    torch.distributed must be initialised. Python and numpy are seeded alike on every rank, torch per pipeline stage and
    part of a sequence (so that dropout differs between these), and megatron-core's tensor-parallel tracker also per
    tensor-parallel rank.

    Args:
        timeout_minutes: of the groups' collectives.
        cp_size: ranks that compute each sequence together.
        ep_size, etp_size: ranks that share a layer's experts, and those that share each expert; None: ``tp_size``.

    Raises:
        ValueError: the world size is not a multiple of ``tp_size * cp_size * pp_size``, or of
            ``ep_size * etp_size * pp_size``.
    """
    from megatron.core import parallel_state, tensor_parallel

    world_size = dist.get_world_size()
    together = tp_size * cp_size * pp_size
    if min(tp_size, cp_size, pp_size) < 1 or world_size % together:
        context = f"context_parallel_size={cp_size} x " if cp_size != 1 else ""
        raise ValueError(
            f"{world_size} ranks cannot be split into tensor_model_parallel_size={tp_size} x {context}"
            f"pipeline_model_parallel_size={pp_size}: start a multiple of {together} ranks"
        )
    etp_size = etp_size or tp_size
    parts = ep_size * etp_size * pp_size
    if parts < 1 or world_size % parts:
        raise ValueError(
            f"{world_size} ranks cannot be split into expert_model_parallel_size={ep_size} x "
            f"expert_tensor_parallel_size={etp_size} x pipeline_model_parallel_size={pp_size}: "
            f"start a multiple of {parts} ranks"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp_size,
        pipeline_model_parallel_size=pp_size,
        context_parallel_size=cp_size,
        expert_model_parallel_size=ep_size,
        expert_tensor_parallel_size=etp_size,
        distributed_timeout_minutes=timeout_minutes,
    )
    random.seed(seed)
    np.random.seed(seed)
    layout = current_layout()
    seed_of_stage = seed + _SEED_STEP_OF_STAGES * layout.pp_rank + _SEED_STEP_OF_CONTEXT * layout.cp_rank
    torch.manual_seed(seed_of_stage)
    tensor_parallel.model_parallel_cuda_manual_seed(seed_of_stage)
    return layout


def current_layout() -> ParallelLayout:
    """The layout that `initialize_model_parallel` set up."""
    from megatron.core import parallel_state

    return ParallelLayout(
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
    )


def broadcast_from_last_stage(tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Give every pipeline stage the last stage's ``tensor`` (``None`` on the other stages)."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        assert tensor is not None
        return tensor
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=device())
    dist.broadcast(
        tensor.contiguous(),
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return tensor


def all_gather_rows(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Concatenate the ranks' ``tensor``s along dimension 0, in rank order. Rows may differ in number."""
    world_size = dist.get_world_size(group)
    if world_size == 1:
        return tensor
    rows = torch.tensor([tensor.shape[0]], dtype=torch.int64, device=tensor.device)
    all_rows = [torch.empty_like(rows) for _ in range(world_size)]
    dist.all_gather(all_rows, rows, group=group)
    counts = [int(r.item()) for r in all_rows]
    # Collectives want equal shapes: pad to the longest, cut after. bool has no gloo support: go through uint8.
    wire = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    padded = wire.new_zeros((max(counts), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = wire
    gathered = [torch.empty_like(padded) for _ in range(world_size)]
    dist.all_gather(gathered, padded, group=group)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)]).to(tensor.dtype)


def exchange_rows(
    values: torch.Tensor, lengths: torch.Tensor, ids: torch.Tensor, wanted: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    """Give each rank the rows that it wants, whichever rank has them. Collective over all ranks of the job.

    One rank after the other sends all it has, and the others keep what they want: no rank ever holds more than its own
    rows, those that it wants, and those of one sender.

    Args:
        values: [t], this rank's rows one after the other.
        lengths: int64 [k], of its rows.
        ids: int64 [k], which rows these are; no row may be with two ranks.
        wanted: ids of the rows that this rank wants, in any order.

    Returns:
        The wanted rows, in their order, one after the other, on the CPU.

    Raises:
        RuntimeError: nobody has a row that is wanted.
    """
    where = device()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    table = torch.stack([torch.full_like(ids, rank), ids, lengths], dim=1)
    senders, all_ids, all_lengths = all_gather_rows(table.to(where)).cpu().unbind(1)
    places = {int(row): place for place, row in enumerate(wanted)}
    rows: dict[int, torch.Tensor] = {}
    for sender in range(world_size):
        sent = senders == sender
        sizes = all_lengths[sent].tolist()
        if not sum(sizes):
            content = values.new_empty(0)
        elif world_size == 1:
            content = values
        else:
            buffer = values.to(where) if sender == rank else torch.empty(sum(sizes), dtype=values.dtype, device=where)
            dist.broadcast(buffer.contiguous(), src=sender)
            content = buffer.cpu()
        for row, part in zip(all_ids[sent].tolist(), content.split(sizes), strict=True):
            if row in places:
                rows[places[row]] = part.clone() if world_size > 1 else part
    if len(rows) < len(places):
        missing = [row for row, place in places.items() if place not in rows]
        raise RuntimeError(f"no rank has rows {missing[:20]}")
    return torch.cat([values.new_empty(0).cpu(), *(rows[place] for place in range(len(places)))])


def neighbour_group(
    size: int, timeout_minutes: float = _TIMEOUT_MINUTES, backend: str | None = None
) -> dist.ProcessGroup | None:
    """This rank's group of ``size`` consecutive ranks (0 to size - 1, size to 2 * size - 1, ...). Collective.

    Args:
        timeout_minutes: of the group's collectives.
        backend: as in torch.distributed; None: that of the default group.

    Returns:
        The group; None for a ``size`` of 1.

    Raises:
        ValueError: the ranks cannot be divided into groups of ``size``.
    """
    world_size = dist.get_world_size()
    if size < 1 or world_size % size:
        raise ValueError(f"{world_size} ranks cannot be divided into groups of {size}")
    if size == 1:
        return None
    # Every rank creates every group, in the same order.
    timeout = timedelta(minutes=timeout_minutes)
    groups = [
        dist.new_group(list(range(first, first + size)), timeout, backend) for first in range(0, world_size, size)
    ]
    return groups[dist.get_rank() // size]


def control_group(size: int, wait_minutes: float) -> dist.ProcessGroup | None:
    """`neighbour_group` over gloo, for small messages of a leader who may take ``wait_minutes`` for each. Collective.

    A wait in NCCL would keep a GPU busy and end with the timeout of the training's collectives.
    """
    return neighbour_group(size, wait_minutes + _CONTROL_MARGIN_MINUTES, "gloo")


def all_reduce_sums(sums: dict[str, float], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """Sum every entry over the group, in float64. All ranks must pass the same keys."""
    keys = sorted(sums)
    values = torch.tensor([float(sums[key]) for key in keys], dtype=torch.float64, device=device())
    if dist.get_world_size(group) > 1:
        dist.all_reduce(values, group=group)
    return dict(zip(keys, values.tolist(), strict=True))


def meet_over_gloo(store: dist.Store, rank: int, world_size: int) -> None:
    """Have the ranks find each other over gloo before they do anything else, whatever they compute with. Collective.

    All later groups over gloo have time limits as long as their work may take: ranks that do not reach each other
    would notice only then, and some of them five times as late.

    Raises:
        LaunchError: they do not find each other.
    """
    if world_size == 1:
        return
    store = dist.PrefixStore("gloo", store)
    try:
        group = dist.ProcessGroupGloo(store, rank, world_size, _MEETING_TIMEOUT)
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{other}" for other in range(world_size)], _MEETING_TIMEOUT)
        del group  # not before: its connections end with it, which would fail ranks that are still connecting
    except RuntimeError as error:
        raise LaunchError(
            f"the ranks cannot reach each other over gloo, which checkpoints need ({error}): set GLOO_SOCKET_IFNAME to "
            "the network interface that they share, and check the machines' names in /etc/hosts and their firewalls"
        ) from error


def background_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """A gloo group of all ranks for collectives in another thread than the main one. Collective.

    Two threads that use one group would take part in each other's collectives.

    Args:
        timeout: of its collectives.

    Returns:
        The group; None, meaning the default group, for a single rank over gloo, which shares it with nobody.
    """
    if dist.get_world_size() == 1 and dist.get_backend() == "gloo":
        return None
    return dist.new_group(backend="gloo", timeout=timeout)


def all_reduce_max(value: int) -> int:
    """The largest of all ranks' values, on every rank."""
    if dist.get_world_size() == 1:
        return value
    largest = torch.tensor([value], dtype=torch.int64, device=device())
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def broadcast_object(value: Any, src: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Rank ``src``'s ``value`` on every rank (small control data between this job's own ranks only).

    Args:
        src: a rank of the default group.
        group: the default group unless given. Over gloo the value does not pass through the GPU.
    """
    if dist.get_world_size() == 1:
        return value
    box = [value]
    where = torch.device("cpu") if dist.get_backend(group) == "gloo" else device()
    dist.broadcast_object_list(box, src=src, group=group, device=where)
    return box[0]


def initialize_single_process() -> None:
    """torch.distributed for a tool that runs as one process: no address, no port, nobody to wait for."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    set_up_cuda_arithmetic()
    with excepthook_kept():
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def set_up_cuda_arithmetic() -> None:
    """Set how GPUs compute matrix products and attention, for the whole process; no effect without a GPU.

    fp32 operands are not rounded to TF32: reward and value heads, and ``trainer.precision=32``, need full precision,
    and NVIDIA's images allow TF32 by an environment variable.

    cuDNN's attention, which torch prefers on newer GPUs, is disabled: it makes a plan for every new shape, which takes
    up to seconds, and keeps it for ever, and packed rows and chunks of prompts have a new shape each time.
    """
    torch.backends.cuda.matmul.allow_tf32 = False  # sets the newer names, too; setting those alone would contradict it
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextlib.contextmanager
def single_process(seed: int = 1234) -> Iterator[ParallelLayout]:
    """Process groups of one process for the body of a ``with`` statement; see `initialize_single_process`."""
    from megatron.core import parallel_state

    initialize_single_process()
    try:
        yield initialize_model_parallel(1, 1, seed)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
