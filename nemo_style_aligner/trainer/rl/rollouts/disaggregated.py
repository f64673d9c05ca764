"""Disaggregated generation, from both sides: ranks that only generate (``trainer.ppo.rollout_devices``).

The training ranks send commands, prompts and weights (`RemoteGenerator`); the rollout ranks carry out one command after
the other (`RolloutRank`) and leave each response for one of the training ranks. What passes between them is JSON, in
which checkpoints keep responses as well.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from nemo_style_aligner import activity
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationResult
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.agreement import PATIENCE_SECONDS
from nemo_style_aligner.engine.parallel.groups import all_reduce_max, broadcast_object, device
from nemo_style_aligner.engine.weights.stream import export_weights, receive_weights, send_weights
from nemo_style_aligner.trainer.launch.roles import Channel, Wait
from nemo_style_aligner.trainer.launch.stop_signals import StopEarlyError, stops
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.rl.episodes.runner import Episode
from nemo_style_aligner.trainer.rl.rollouts.generator import LocalGenerator, Take
from nemo_style_aligner.trainer.rl.rollouts.in_flight import (
    Carried,
    EngineShare,
    Order,
    pack_carried,
    pack_order,
    unpack_carried,
    unpack_order,
)
from nemo_style_aligner.trainer.rl.sample import Prompt

logger = logging.getLogger(__name__)

_LISTEN_SECONDS = 0.2
_POLL_SECONDS = 0.02


# ---- training ranks ------------------------------------------------------------------------------


class RemoteGenerator:
    """Has the rollout ranks generate rounds, while the training ranks do something else if they want.

    Args:
        channel: to the rollout ranks.
        architecture, dtype: of the weights that `refit` sends.
        max_sequence_length: of prompt and response together.
        wait_seconds: the longest wait during which no response comes.
        staleness: steps that rounds are started ahead. With 2 or more the rollout ranks may get to weights later than
            training goes on, so that these are copied.

    Attributes:
        weight_version: of the weights that were sent last; -1 before that.
        is_ahead: weights are copied: nobody has to wait for rounds that are under way with earlier ones.
    """

    def __init__(
        self,
        channel: Channel,
        architecture: ModelArchitecture,
        dtype: torch.dtype,
        max_sequence_length: int,
        wait_seconds: float,
        staleness: int = 0,
    ) -> None:
        self.weight_version = -1
        self._channel = channel
        self._architecture = architecture
        self._dtype = dtype
        self._wait_seconds = wait_seconds
        self._num_rounds = 0
        self._sender = WeightSender(channel, architecture, dtype) if staleness > 1 and channel.rank == 0 else None
        self.is_ahead = staleness > 1
        if channel.rank == 0:
            channel.post({"kind": "build", "max_sequence_length": max_sequence_length})

    def refit(self, model: MegatronModel, version: int, history: str = "") -> None:
        """See `LocalGenerator.refit`."""
        channel = self._channel
        if channel.rank == 0:
            ready = "" if self._sender is None else self._sender.next_ready
            channel.post({"kind": "refit", "version": version, "history": history, "ready": ready})
        if model.layout.replica == 0 or model.computes_together:  # one replica's ranks export, the first of them sends
            # The receivers know tensors by the layout table's order: none is left out, none reordered (transient).
            weights = export_weights(model)
            if self._sender is not None:
                self._sender.send([(name, tensor.to("cpu", copy=True)) for name, tensor in weights])
            elif channel.rank == 0:
                send_weights(weights, self._architecture, self._dtype, channel.broadcast)
            else:
                for _ in weights:
                    pass
        self.weight_version = version

    def generate(self, prompts: list[Prompt], seed: int, take: Take) -> dict[str, float]:
        """See `LocalGenerator.generate` and `RemoteRound.run`."""
        return self.start(prompts, seed).run(take)

    def start(self, prompts: list[Prompt], seed: int) -> RemoteRound:
        """Begin a round; see `LocalGenerator.generate`."""
        name = self._begin("generate", pack_request(prompts, seed))
        return RemoteRound(self._channel, name, prompts, self._wait_seconds)

    def go_on(self, order: Order, prompts: dict[int, Prompt]) -> RemoteRound:
        """Begin a round of responses of which others stay under way.

        Args:
            order: what is to be done.
            prompts: of the samples under way, by number; those of the round are taken from it.
        """
        name = self._begin("go_on", pack_order(order))
        places = [Prompt(-1, [])] * order.count
        return RemoteRound(self._channel, name, places, self._wait_seconds, prompts)

    def _begin(self, kind: str, content: bytes) -> str:
        self._num_rounds += 1
        name = f"round/{self._num_rounds}"
        pass_on_signals(self._channel)
        if self._channel.rank == 0:
            self._channel.put(name, content)
            self._channel.post({"kind": kind, "round": name})
        return name

    def carried(self) -> list[Carried]:
        """What the rollout ranks have under way, once all rounds are complete. Collective."""
        name, samples = "carried", None
        if self._channel.rank == 0:
            self._channel.post({"kind": "tell", "name": name})
            ranks = self._channel.num_rollout_ranks
            wait = Wait(self._channel, self._wait_seconds, lambda: 0, "waiting for what is under way")
            parts = []
            for rank in range(ranks):
                wait.until_there(f"{name}/{rank}")
                parts += unpack_carried(self._channel.read(f"{name}/{rank}"))
                self._channel.drop(f"{name}/{rank}")
            samples = sorted(parts, key=lambda sample: sample.number)
        known: list[Carried] = broadcast_object(samples)
        return known

    def restore(self, samples: Sequence[Carried], group_size: int, steps: Sequence[tuple[int, int]]) -> None:
        """Give the rollout ranks what another run had under way; see `EngineShare.restore`."""
        if self._channel.rank == 0:
            name = "restored"
            self._channel.put(name, pack_carried(samples))
            self._channel.post({"kind": "restore", "name": name, "group_size": group_size, "steps": steps})


class WeightSender:
    """Sends copies of weights to the rollout ranks, in order, when these get to them, while training goes on.

    On training rank 0.
    """

    def __init__(self, channel: Channel, architecture: ModelArchitecture, dtype: torch.dtype) -> None:
        self._channel = channel
        self._architecture = architecture
        self._dtype = dtype
        self._num_given = 0
        self._copies = queue.SimpleQueue[tuple[str, list[tuple[str, torch.Tensor]]]]()
        self._error: Exception | None = None
        threading.Thread(target=self._run, name="weights", daemon=True).start()

    @property
    def next_ready(self) -> str:
        """Name of the counter by which rollout ranks say that they have come to the weights that are given next."""
        return f"weights/{self._num_given}"

    def send(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Send these after the earlier ones.

        Raises:
            RuntimeError: earlier ones could not be sent.
        """
        if self._error is not None:
            raise RuntimeError("weights could not be sent to the rollout ranks") from self._error
        self._copies.put((self.next_ready, weights))
        self._num_given += 1

    def _run(self) -> None:
        while True:
            ready, weights = self._copies.get()
            try:
                self._send(ready, weights)
            except dist.DistError:  # the job's rank 0 is ending, and with it the job
                return
            except Exception as error:  # raised where weights are sent next
                logger.exception("weights could not be sent to the rollout ranks")
                self._error = error
                return

    def _send(self, ready: str, weights: list[tuple[str, torch.Tensor]]) -> None:
        while self._channel.count(ready) < self._channel.num_rollout_ranks:  # the broadcasts have a time limit
            time.sleep(_POLL_SECONDS)
        self._channel.store.delete_key(ready)
        on_device = ((name, tensor.to(device())) for name, tensor in weights)
        send_weights(on_device, self._architecture, self._dtype, self._channel.broadcast)


class RemoteRound:
    """A round that the rollout ranks generate from the moment it is started. All ranks call its methods together.

    The i-th response to finish goes to training rank i modulo the number of training ranks.

    Args:
        prompts: of each sample. Of responses that stay under way it is known only with each whose it is: the list then
            fills as they come, and is complete after `run` or `wait`.
        under_way: prompts of all samples that are, by number, where that is so.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        prompts: list[Prompt],
        wait_seconds: float,
        under_way: dict[int, Prompt] | None = None,
    ) -> None:
        self.prompts = prompts
        self._under_way = under_way
        self._own_numbers: list[tuple[int, int]] = []  # place and number of the responses that came
        self._channel = channel
        self._name = name
        self._wait_seconds = wait_seconds
        self._numbers = range(dist.get_rank(), len(prompts), dist.get_world_size())
        self._results: list[GenerationResult] = []

    def run(self, take: Take) -> dict[str, float]:
        """Give ``take`` this rank's share of the responses as they come. Once: it deletes the round.

        Returns:
            `generation_metrics`, with rollout rank 0's ``seconds`` and ``idle_seconds``.

        Raises:
            StopEarlyError: a rank got a stop signal. `wait` can still get the responses that are missing.
            TimeoutError: no response came for ``wait_seconds``.
        """
        total, ranks = len(self.prompts), dist.get_world_size()
        # All ranks' shares grow alike, by less than one response apart.
        with activity.counting("responses", lambda: (min(total, ranks * len(self._results)), total)):
            self._receive(take)
        self._share_prompts()
        metrics = None
        if self._channel.rank == 0:
            self._wait().until_there(f"{self._name}/metrics")
            metrics = json.loads(self._channel.read(f"{self._name}/metrics"))
            for name in ("", "/metrics"):
                self._channel.drop(f"{self._name}{name}")
            self._channel.store.delete_key(f"{self._name}/count")
        known: dict[str, float] = broadcast_object(metrics)
        return known

    def _receive(self, take: Take) -> None:
        wait, num_given, is_missing = self._wait(), 0, True
        # Another rank's last responses, or a stop, may be further off than a collective's timeout: ranks meet every few
        # seconds.
        while is_missing:
            with stops.interruptible():
                if not stops.received:  # one that came before the block does not interrupt it
                    deadline = time.monotonic() + PATIENCE_SECONDS
                    while True:
                        for result in self._results[num_given:]:
                            take(result)
                            num_given += 1
                        if not self._take_next(wait, deadline):
                            break
            pass_on_signals(self._channel)
            stops.check()
            is_missing = self._is_missing_anywhere()

    def is_complete(self) -> bool:
        """Whether all responses are there, as far as training rank 0 knows; False on the others."""
        return self._channel.rank == 0 and self._channel.has(f"{self._name}/metrics")

    def wait(self) -> list[GenerationResult]:
        """Wait for this rank's whole share, ignoring stop signals, so that it can be kept; else as `run`."""
        wait, is_missing = self._wait(), True
        while is_missing:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while self._take_next(wait, deadline):
                pass
            is_missing = self._is_missing_anywhere()
        self._share_prompts()
        return self._results

    def _share_prompts(self) -> None:
        """Have all ranks know all prompts, once the responses are there."""
        if self._under_way is None:
            return
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self._own_numbers)
        for place, number in itertools.chain.from_iterable(parts):
            self.prompts[place] = self._under_way.pop(number)
        self._under_way = None

    def _is_missing_anywhere(self) -> bool:
        activity.progress()  # for the watchdog: these waits have a limit of their own
        return bool(all_reduce_max(int(len(self._results) < len(self._numbers))))

    def _take_next(self, wait: Wait, deadline: float) -> bool:
        """Receive this rank's next response; return whether one was missing and came before ``deadline``."""
        if len(self._results) == len(self._numbers):
            return False
        # Wherever a signal interrupts this, no response is lost: it is in `_results`, or still in the store.
        name = f"{self._name}/{self._numbers[len(self._results)]}"
        if not wait.until_there(name, deadline):
            return False
        number, result = unpack_response(self._channel.read(name))
        if self._under_way is not None:
            self.prompts[result.request_id] = self._under_way[number]
            self._own_numbers.append((result.request_id, number))
        self._results.append(result)
        self._channel.drop(name)
        activity.progress()
        return True

    def _wait(self) -> Wait:
        return Wait(self._channel, self._wait_seconds, self._progress, "waiting for responses")

    def _progress(self) -> int:
        """The number of responses so far; also passes on the rollout ranks' stop signals."""
        pass_on_signals(self._channel)
        return self._channel.count(f"{self._name}/count")


class KeptRound:
    """In a `RemoteRound`'s place: one that an earlier run generated, from its checkpoint.

    Args:
        results: this rank's share.
    """

    def __init__(self, prompts: Sequence[Prompt], results: list[GenerationResult]) -> None:
        self.prompts = prompts
        self._results = results

    def run(self, take: Take) -> dict[str, float]:
        """See `RemoteRound.run`. There are no metrics: this run did not generate it."""
        for result in self._results:
            take(result)
        return {}

    def is_complete(self) -> bool:
        """See `RemoteRound.is_complete`."""
        return True

    def wait(self) -> list[GenerationResult]:
        """See `RemoteRound.wait`."""
        return self._results


def pass_on_signals(channel: Channel) -> None:
    """Raise on training rank 0 a stop signal that a rollout rank got, if there is one."""
    if channel.rank == 0 and channel.has("signal"):
        number = int(channel.read("signal"))
        channel.drop("signal")
        signal.raise_signal(signal.Signals(number))


# ---- rollout ranks -------------------------------------------------------------------------------


class RolloutRank:
    """Serves the training ranks until the job ends.

    Args:
        channel: to the training ranks.
        architecture, dtype: of the weights that they send.
        build: makes the generator of the rollout ranks, given the maximum sequence length. Collective.
    """

    def __init__(
        self,
        channel: Channel,
        architecture: ModelArchitecture,
        dtype: torch.dtype,
        build: Callable[[int], LocalGenerator],
    ) -> None:
        self._channel = channel
        self._architecture = architecture
        self._dtype = dtype
        self._build = build
        self._generator: LocalGenerator | None = None
        self._share: EngineShare | None = None
        self._idle_since = time.monotonic()

    def serve(self) -> int:
        """Carry out commands until the job ends; return its exit status."""
        number = 0
        signals = _Signals(self._channel)
        while True:
            with activity.phase("waiting for training"):
                command = self._channel.command(number)
            number += 1
            if command["kind"] == "end":
                if self._generator is not None:
                    self._generator.close()
                signals.close()
                return int(command["status"])
            with activity.phase(command["kind"]):
                self._obey(command)

    def _obey(self, command: dict[str, Any]) -> None:
        if command["kind"] == "build":
            self._generator = generator = self._build(int(command["max_sequence_length"]))
            engine = cast(EmbeddedEngine, generator.engine)  # the config's checks have seen to it
            group = generator.group
            self._share = EngineShare(engine, generator.sampling, group.index, group.count)
            return
        assert self._generator is not None and self._share is not None, "the first command builds it"
        if command["kind"] == "tell":
            own = self._share.carried.values() if self._generator.group.is_leader else ()
            self._channel.put(f"{command['name']}/{dist.get_rank()}", pack_carried(own))
        elif command["kind"] == "restore":
            self._restore(self._share, command)
        elif command["kind"] == "refit":
            if command["ready"]:
                self._channel.add(command["ready"], 1)
            weights = receive_weights(self._architecture, self._dtype, self._channel.broadcast)
            self._generator.note_weights(str(command["history"]))
            self._generator.engine.refit(weights, int(command["version"]))
        else:
            self._generate(self._generator, self._share, command)

    def _restore(self, share: EngineShare, command: dict[str, Any]) -> None:
        name = command["name"]
        share.restore(unpack_carried(self._channel.read(name)), command["group_size"], command["steps"])
        if self._channel.add(f"{name}/taken", 1) == self._channel.num_rollout_ranks:
            self._channel.drop(name)
            self._channel.store.delete_key(f"{name}/taken")

    def _generate(self, generator: LocalGenerator, share: EngineShare, command: dict[str, Any]) -> None:
        """Generate a round. Responses are numbered as they finish over all rollout ranks."""
        name = command["round"]

        def publish(number: int, result: GenerationResult) -> None:
            place = self._channel.add(f"{name}/count", 1) - 1
            self._channel.put(f"{name}/{place}", pack_response(number, result))

        content, started = self._channel.read(name), time.monotonic()
        try:
            if command["kind"] == "go_on":
                metrics = generator.go_on(share, unpack_order(content), publish)
            else:
                prompts, seed = unpack_request(content)
                metrics = generator.generate(prompts, seed, lambda result: publish(result.request_id, result))
        except StopEarlyError:
            logger.info("the job is ending: responses in progress are dropped")
            return
        metrics |= {"seconds": time.monotonic() - started, "idle_seconds": started - self._idle_since}
        self._idle_since = time.monotonic()
        if dist.get_rank() == 0:
            self._channel.put(f"{name}/metrics", json.dumps(metrics).encode())


class _Signals:
    """Stop signals at a rollout rank, where the training ranks decide whether the job stops.

    They may still need what is being generated, so a signal is only passed on to them. When the job does end, the
    process sends itself a stop signal, which interrupts what is under way.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._unsent: list[int] = []
        self._ending = False
        self._closed = threading.Event()
        stops.hold()
        stops.divert(self._take)
        self._unsent += map(int, stops.received)  # those that came before
        self._thread = threading.Thread(target=self._listen, name="end of the job", daemon=True)
        self._thread.start()

    def _take(self, number: signal.Signals) -> bool:
        """Called in the signal handler; return whether the signal is to have no effect on this process itself."""
        if not self._ending:
            self._unsent.append(int(number))
        return not self._ending

    def _listen(self) -> None:
        while not self._closed.wait(_LISTEN_SECONDS):
            try:
                if self._unsent:
                    self._channel.put("signal", str(self._unsent.pop()).encode())
                if self._channel.has("ending"):
                    self._ending = True
                    os.kill(os.getpid(), signal.SIGUSR1)
                    return
            except dist.DistError:  # the job's rank 0 is gone, and with it the job
                return

    def close(self) -> None:
        """End the thread, which uses the store: rank 0 may close that next."""
        self._closed.set()
        self._thread.join()


# ---- prompts and responses as JSON ---------------------------------------------------------------


def pack_response(number: int, result: GenerationResult) -> bytes:
    """Pack a response, and the number of its sample, which may be another than its place in the step."""
    return json.dumps([number, vars(result)]).encode()


def unpack_response(content: bytes) -> tuple[int, GenerationResult]:
    """Inverse of `pack_response`, to the last bit."""
    number, fields = json.loads(content)
    return number, _response(fields)


def _response(fields: dict[str, Any]) -> GenerationResult:
    return (Episode if "mask" in fields else GenerationResult)(**fields)


def pack_results(results: Sequence[GenerationResult]) -> bytes:
    """Pack any number of responses."""
    return json.dumps([vars(result) for result in results]).encode()


def unpack_results(content: bytes | str) -> list[GenerationResult]:
    """Inverse of `pack_results`, to the last bit."""
    return [_response(fields) for fields in json.loads(content)]


def pack_request(prompts: Sequence[Prompt], seed: int) -> bytes:
    """Pack a round's prompts, in sample order, and the seed of its random streams."""
    return json.dumps([seed, [list(vars(prompt).values()) for prompt in prompts]]).encode()


def unpack_request(content: bytes) -> tuple[list[Prompt], int]:
    """Inverse of `pack_request`."""
    seed, prompts = json.loads(content)
    return [Prompt(*fields) for fields in prompts], seed
