"""Disaggregated generation, from both sides: ranks that only generate (``trainer.ppo.rollout_devices``).

The training ranks send commands, prompts and weights (`RemoteGenerator`); the rollout ranks carry out one command after
the other (`RolloutRank`) and leave each response for one of the training ranks. What passes between them is JSON, in
which checkpoints keep responses as well.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from nemo_style_aligner import activity
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationResult
from nemo_style_aligner.engine.parallel.agreement import PATIENCE_SECONDS
from nemo_style_aligner.engine.parallel.groups import all_reduce_max, broadcast_object
from nemo_style_aligner.engine.weights.stream import export_weights, receive_weights, send_weights
from nemo_style_aligner.trainer.launch.roles import Channel, Wait
from nemo_style_aligner.trainer.launch.stop_signals import StopEarlyError, stops
from nemo_style_aligner.trainer.models.gpt import MegatronModel
from nemo_style_aligner.trainer.rl.episodes.runner import Episode
from nemo_style_aligner.trainer.rl.rollouts.generator import LocalGenerator, Take
from nemo_style_aligner.trainer.rl.sample import Prompt

logger = logging.getLogger(__name__)

_LISTEN_SECONDS = 0.2


# ---- training ranks ------------------------------------------------------------------------------


class RemoteGenerator:
    """Has the rollout ranks generate rounds, while the training ranks do something else if they want.

    Args:
        channel: to the rollout ranks.
        architecture, dtype: of the weights that `refit` sends.
        max_sequence_length: of prompt and response together.
        wait_seconds: the longest wait during which no response comes.

    Attributes:
        weight_version: of the weights that were sent last; -1 before that.
    """

    def __init__(
        self,
        channel: Channel,
        architecture: ModelArchitecture,
        dtype: torch.dtype,
        max_sequence_length: int,
        wait_seconds: float,
    ) -> None:
        self.weight_version = -1
        self._channel = channel
        self._architecture = architecture
        self._dtype = dtype
        self._wait_seconds = wait_seconds
        self._num_rounds = 0
        if channel.rank == 0:
            channel.post({"kind": "build", "max_sequence_length": max_sequence_length})

    def refit(self, model: MegatronModel, version: int, history: str = "") -> None:
        """See `LocalGenerator.refit`."""
        channel = self._channel
        if channel.rank == 0:
            channel.post({"kind": "refit", "version": version, "history": history})
        if model.layout.replica == 0 or model.computes_together:  # one replica's ranks export, the first of them sends
            # The receivers know tensors by the layout table's order: none is left out, none reordered (transient).
            weights = export_weights(model)
            if channel.rank == 0:
                send_weights(weights, self._architecture, self._dtype, channel.broadcast)
            else:
                for _ in weights:
                    pass
        self.weight_version = version

    def generate(self, prompts: Sequence[Prompt], seed: int, take: Take) -> dict[str, float]:
        """See `LocalGenerator.generate` and `RemoteRound.run`."""
        return self.start(prompts, seed).run(take)

    def start(self, prompts: Sequence[Prompt], seed: int) -> RemoteRound:
        """Begin a round; see `LocalGenerator.generate`."""
        self._num_rounds += 1
        name = f"round/{self._num_rounds}"
        pass_on_signals(self._channel)
        if self._channel.rank == 0:
            self._channel.put(name, pack_request(prompts, seed))
            self._channel.post({"kind": "generate", "round": name})
        return RemoteRound(self._channel, name, prompts, self._wait_seconds)


class RemoteRound:
    """A round that the rollout ranks generate from the moment it is started. All ranks call its methods together.

    The i-th response to finish goes to training rank i modulo the number of training ranks.
    """

    def __init__(self, channel: Channel, name: str, prompts: Sequence[Prompt], wait_seconds: float) -> None:
        self.prompts = prompts
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

    def wait(self) -> list[GenerationResult]:
        """Wait for this rank's whole share, ignoring stop signals, so that it can be kept; else as `run`."""
        wait, is_missing = self._wait(), True
        while is_missing:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while self._take_next(wait, deadline):
                pass
            is_missing = self._is_missing_anywhere()
        return self._results

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
        (result,) = unpack_results(self._channel.read(name))
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
            self._generator = self._build(int(command["max_sequence_length"]))
            return
        assert self._generator is not None, "the first command builds it"
        if command["kind"] == "refit":
            weights = receive_weights(self._architecture, self._dtype, self._channel.broadcast)
            self._generator.note_weights(str(command["history"]))
            self._generator.engine.refit(weights, int(command["version"]))
        else:
            self._generate(self._generator, command["round"])

    def _generate(self, generator: LocalGenerator, name: str) -> None:
        """Generate a round. Responses are numbered as they finish over all rollout ranks."""

        def publish(result: GenerationResult) -> None:
            number = self._channel.add(f"{name}/count", 1) - 1
            self._channel.put(f"{name}/{number}", pack_results([result]))

        prompts, seed = unpack_request(self._channel.read(name))
        started = time.monotonic()
        try:
            metrics = generator.generate(prompts, seed, publish)
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


def pack_results(results: Sequence[GenerationResult]) -> bytes:
    """Pack any number of responses."""
    return json.dumps([vars(result) for result in results]).encode()


def unpack_results(content: bytes | str) -> list[GenerationResult]:
    """Inverse of `pack_results`, to the last bit."""
    return [(Episode if "mask" in fields else GenerationResult)(**fields) for fields in json.loads(content)]


def pack_request(prompts: Sequence[Prompt], seed: int) -> bytes:
    """Pack a round's prompts, in sample order, and the seed of its random streams."""
    return json.dumps([seed, [list(vars(prompt).values()) for prompt in prompts]]).encode()


def unpack_request(content: bytes) -> tuple[list[Prompt], int]:
    """Inverse of `pack_request`."""
    seed, prompts = json.loads(content)
    return [Prompt(*fields) for fields in prompts], seed
