"""A job of several roles: ranks that train, and after them ranks set apart (`ranks_apart`), each with one thing to do.

torch.distributed and megatron-core build everything on one default group. So each role has a default group of its
own, and none sees another's collectives. A `Channel` connects them: messages in the store through which the ranks
found each other (polled, so that a wait can have any limit and a signal can end it), and one process group of the
first training rank and all rollout ranks, for weights.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import struct
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_style_aligner.trainer.config.schema import ActorLoop, ListedReward

_logger = logging.getLogger(__name__)

_PART_BYTES = 4 * 2**20  # torch's store takes values of 8 MiB at most
_POLL_SECONDS = 0.01
_PROGRESS_SECONDS = 1.0
_LEAVING_SECONDS = 30.0

TRAINING, ROLLOUT, CRITIC = "training", "rollout", "critic"
REFERENCE, TEACHER = "trainer.ppo.reference", "trainer.ppo.teacher"
"""Roles; a frozen model's is the key of its section, a reward model's ``trainer.ppo.rewards[N]``."""

_DEVICES = {ROLLOUT: "trainer.ppo.rollout_devices", CRITIC: "trainer.ppo.critic_devices"}


def devices_key(role: str) -> str:
    """The config key that says how many ranks a role has for itself."""
    return _DEVICES.get(role, f"{role}.devices")


def ranks_apart(ppo: ActorLoop) -> dict[str, int]:
    """The roles that have ranks of their own in an actor's job, and how many, in the ranks' order."""
    found = {ROLLOUT: ppo.rollout_devices, CRITIC: ppo.critic_devices}
    found |= {REFERENCE: ppo.reference.devices, TEACHER: ppo.teacher.devices}
    for place, reward in enumerate(ppo.rewards or ()):
        if isinstance(reward, ListedReward):  # else it is refused later, as is a wrong number
            found[f"trainer.ppo.rewards[{place}]"] = reward.devices
    return {role: count for role, count in found.items() if isinstance(count, int) and count > 0}


@dataclasses.dataclass(frozen=True)
class Channel:
    """This rank's connection to the ranks of the other roles.

    Attributes:
        rank, size: this rank's number in the whole job, and the job's number of ranks.
        role: this rank's.
        apart: see `ranks_apart`; the ranks that train come first.
        store: of the whole job.
        weights: process group of training rank 0 (its rank 0) and the rollout ranks; None on other training ranks.
    """

    rank: int
    size: int
    role: str
    apart: Mapping[str, int]
    store: dist.Store
    weights: Any

    @property
    def num_rollout_ranks(self) -> int:
        """How many do nothing but generate."""
        return self.apart.get(ROLLOUT, 0)

    @property
    def is_rollout_rank(self) -> bool:
        """Whether this rank does nothing but generate."""
        return self.role == ROLLOUT

    @property
    def serves(self) -> bool:
        """Whether this rank has a model that the ranks that train ask over HTTP."""
        return self.role not in (TRAINING, ROLLOUT)

    @property
    def generates(self) -> bool:
        """Whether this rank has an engine."""
        return self.role == (ROLLOUT if self.num_rollout_ranks else TRAINING)

    def ranks_of(self, role: str) -> range:
        """The ranks of a role that is set apart."""
        first = self.size - sum(self.apart.values())
        for name, count in self.apart.items():
            if name == role:
                return range(first, first + count)
            first += count
        return range(0)

    # ---- messages ---------------------------------------------------------------------------

    def put(self, name: str, content: bytes) -> None:
        """Leave a message of any length."""
        parts = [content[start : start + _PART_BYTES] for start in range(0, len(content), _PART_BYTES)] or [b""]
        for number, part in enumerate(parts[1:], 1):
            self.store.set(f"{name}/part{number}", part)  # type: ignore[arg-type]  # takes bytes as well
        # `has` looks for the first part alone, so that goes last.
        self.store.set(name, struct.pack("<I", len(parts)) + parts[0])  # type: ignore[arg-type]

    def has(self, name: str) -> bool:
        """Whether the message has been left."""
        return bool(self.store.check([name]))

    def read(self, name: str) -> bytes:
        """Read a message, which stays; wait for one that is not there yet, up to the store's timeout."""
        first = self.store.get(name)
        (count,) = struct.unpack_from("<I", first)
        return b"".join([first[4:], *(self.store.get(f"{name}/part{number}") for number in range(1, count))])

    def drop(self, name: str) -> None:
        """Delete a message, if it is there."""
        if self.has(name):
            (count,) = struct.unpack_from("<I", self.store.get(name))
            for number in range(1, count):
                self.store.delete_key(f"{name}/part{number}")
            self.store.delete_key(name)

    def add(self, name: str, amount: int) -> int:
        """Add to a counter, which starts at 0, and return the sum."""
        return int(self.store.add(name, amount))

    def count(self, name: str) -> int:
        """A counter's sum. To add 0 would create one that has been deleted."""
        return int(self.store.get(name)) if self.has(name) else 0

    # ---- commands, which every rollout rank carries out one after the other -------------------

    def post(self, command: dict[str, Any]) -> None:
        """Send the next command to all rollout ranks; on training rank 0 only."""
        number = self.add("commands", 1) - 1
        self.put(f"command/{number}", json.dumps(command).encode())

    def command(self, number: int) -> dict[str, Any]:
        """Wait for command ``number``, for as long as training takes; on rollout ranks."""
        while not self.has(f"command/{number}"):
            time.sleep(_POLL_SECONDS)
        command: dict[str, Any] = json.loads(self.read(f"command/{number}"))
        if self.add(f"command/{number}/taken", 1) == self.num_rollout_ranks:
            self.drop(f"command/{number}")
            self.store.delete_key(f"command/{number}/taken")
        return command

    # ---- weights ----------------------------------------------------------------------------

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Broadcast training rank 0's ``tensor`` into each rollout rank's, within the job's limit for collectives."""
        self.weights.broadcast(tensor, 0).wait()


class Wait:
    """Waits for messages, with a time limit that starts anew whenever the other side makes progress.

    Args:
        seconds: the time limit.
        progress: returns a value that changes when the other side makes progress.
        what: what is being waited for, for the error.
    """

    def __init__(self, channel: Channel, seconds: float, progress: Callable[[], object], what: str) -> None:
        self._channel = channel
        self._seconds = seconds
        self._progress = progress
        self._what = what
        self._seen = progress()
        self._since = self._looked = time.monotonic()

    def until_there(self, name: str, deadline: float = math.inf) -> bool:
        """Wait for a message, at most until ``deadline`` (`time.monotonic`); return whether it is there.

        Raises:
            TimeoutError: nothing came, and ``progress`` did not change, for longer than the limit.
        """
        while not self._channel.has(name):
            time.sleep(_POLL_SECONDS)
            now = time.monotonic()
            if now - self._looked >= min(_PROGRESS_SECONDS, self._seconds):
                self._look(now)
            if now >= deadline:
                return self._channel.has(name)
        return True

    def _look(self, now: float) -> None:
        self._looked = now
        if (present := self._progress()) != self._seen:
            self._seen, self._since = present, now
        elif now - self._since > self._seconds:
            raise TimeoutError(
                f"{self._what}: nothing came for {self._seconds:g} s (trainer.ppo.batch_iterator.wait_seconds); look "
                f"at the ranks of the job that generate: {[*self._channel.ranks_of(ROLLOUT)]}"
            )


_channel: Channel | None = None


def channel() -> Channel | None:
    """The connection to the ranks of the other roles; None in a job whose ranks all do the same."""
    return _channel


def is_rollout_rank() -> bool:
    """Whether this rank does nothing but generate."""
    return _channel is not None and _channel.is_rollout_rank


def initialize(
    store: dist.Store, rank: int, size: int, apart: Mapping[str, int], backend: str, timeout: timedelta
) -> None:
    """Set up torch.distributed for a job with ranks set apart (`ranks_apart`). Collective.

    Raises:
        ValueError: no rank is left to train.
    """
    global _channel
    first = size - sum(apart.values())
    if first < 1:
        raise ValueError(f"{dict(apart)} ranks set apart do not fit a job of {size}: at least one must train")
    whole = Channel(rank, size, TRAINING, apart, dist.PrefixStore("channel", store), None)
    role = next((name for name in apart if rank in whole.ranks_of(name)), TRAINING)
    ranks = whole.ranks_of(role) or range(first)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(role, store),
        rank=rank - ranks[0],
        world_size=len(ranks),
        timeout=timeout,
    )
    weights = None
    if ROLLOUT in apart and (role == ROLLOUT or rank == 0):
        place = rank - first + 1 if role == ROLLOUT else 0
        weights = _process_group(backend, dist.PrefixStore("weights", store), place, apart[ROLLOUT] + 1, timeout)
    _channel = dataclasses.replace(whole, role=role, weights=weights)


def _process_group(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group beside the default one, which does not contain all of its ranks."""
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def end(status: int) -> None:
    """Have the ranks set apart give up what they do and end with ``status``. Only rank 0's call has an effect."""
    if _channel is not None and _channel.rank == 0:
        if _channel.num_rollout_ranks:
            _channel.post({"kind": "end", "status": status})
        _channel.put("ending", str(status).encode())


def leave() -> None:
    """Close the channel, last of all: rank 0, which has the store, waits until the others set apart need it no more."""
    global _channel
    if _channel is None:
        return
    if _channel.role != TRAINING:
        _channel.add("left", 1)
    elif _channel.rank == 0:
        apart, deadline = sum(_channel.apart.values()), time.monotonic() + _LEAVING_SECONDS
        while _channel.count("left") < apart and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        if (left := _channel.count("left")) < apart:
            _logger.warning("of %d ranks set apart only %d have ended by themselves", apart, left)
    _channel = None


def barrier() -> None:
    """Wait for all ranks of this role. Without ``device_ids`` an unused NCCL group would guess the device by rank."""
    dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
