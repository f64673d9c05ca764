"""Generation on dedicated rollout ranks: the training ranks' side. `rollout_ranks` is the other side."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.engine import GenerationResult
from nemo_style_aligner.models.gpt import MegatronModel
from nemo_style_aligner.parallel.agreement import PATIENCE_SECONDS
from nemo_style_aligner.parallel.groups import all_reduce_max, broadcast_object, current_layout
from nemo_style_aligner.parallel.stop_signals import stops
from nemo_style_aligner.parallel.worlds import Link, Wait
from nemo_style_aligner.rl.rollouts.generator import ResponseSink
from nemo_style_aligner.rl.rollouts.wire import pack_request, unpack_results
from nemo_style_aligner.rl.sample import Prompt
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.weights.push import send_weights
from nemo_style_aligner.weights.stream import export_weights


class RemoteGenerator:
    """Has the rollout ranks generate rounds, concurrently with whatever the training ranks do.

    The rollout ranks carry out one command after the other. Each training rank receives a share of the responses.

    Args:
        link: to the rollout ranks.
        architecture, dtype: of the weights that `refit` sends.
        max_sequence_length: of prompt and response together.
        wait_seconds: the longest wait during which no response comes.
    """

    def __init__(
        self,
        link: Link,
        architecture: ModelArchitecture,
        dtype: torch.dtype,
        max_sequence_length: int,
        wait_seconds: float,
    ) -> None:
        self._link = link
        self._architecture = architecture
        self._dtype = dtype
        self._wait_seconds = wait_seconds
        self._version = -1
        self._num_rounds = 0
        if link.rank == 0:
            link.post({"kind": "build", "max_sequence_length": max_sequence_length})

    @property
    def weight_version(self) -> int:
        """See `Generator.weight_version`; the version that was sent last."""
        return self._version

    def refit(self, model: MegatronModel, version: int) -> None:
        """See `Generator.refit`."""
        link = self._link
        if link.rank == 0:
            link.post({"kind": "refit", "version": version})
        if current_layout().dp_rank == 0:  # one replica's ranks export, the first of them sends
            # The receivers know tensors by the layout table's order: none is left out, none reordered (transient).
            weights = export_weights(model)
            if link.rank == 0:
                send_weights(weights, self._architecture, self._dtype, link.broadcast)
            else:
                for _ in weights:
                    pass
        self._version = version

    def unload(self) -> None:
        """Do nothing: the rollout ranks share their memory with nobody."""

    def reload(self) -> None:
        """Do nothing; see `unload`."""

    def start(self, prompts: Sequence[Prompt], seed: int) -> RemoteRound:
        """See `Generator.start`."""
        self._num_rounds += 1
        name = f"round/{self._num_rounds}"
        pass_on_signals(self._link)
        if self._link.rank == 0:
            self._link.put(name, pack_request(prompts, seed))
            self._link.post({"kind": "generate", "round": name})
        return RemoteRound(self._link, name, prompts, self._wait_seconds)

    def close(self) -> None:
        """Do nothing: the rollout ranks end with the job (`worlds.end`)."""


class RemoteRound:
    """A `Round` that the rollout ranks generate from the moment it is started.

    The i-th response to finish goes to training rank i modulo the number of training ranks.
    """

    def __init__(self, link: Link, name: str, prompts: Sequence[Prompt], wait_seconds: float) -> None:
        self.prompts = prompts
        self._link = link
        self._name = name
        self._wait_seconds = wait_seconds
        self._numbers = range(dist.get_rank(), len(prompts), dist.get_world_size())
        self._results: list[GenerationResult] = []

    def run(self, sink: ResponseSink) -> None:
        """See `Round.run`; raises TimeoutError if no response comes for ``wait_seconds``."""
        with activity.counting("responses of this rank", lambda: (len(self._results), len(self._numbers))):
            self._receive(sink)

    def _receive(self, sink: ResponseSink) -> None:
        wait, num_given, is_missing = self._wait(), 0, True
        # Another rank's last responses, or a stop, may be further off than a collective's timeout: ranks meet every few
        # seconds.
        while is_missing:
            with stops.interruptible():
                if not stops.received:  # one that came before the block does not interrupt it
                    deadline = time.monotonic() + PATIENCE_SECONDS
                    while True:
                        for result in self._results[num_given:]:
                            sink.add(result)
                            num_given += 1
                        if not self._take_next(wait, deadline):
                            break
                    sink.flush()
            pass_on_signals(self._link)
            stops.check()
            is_missing = self._is_missing_anywhere()

    def wait(self) -> list[GenerationResult]:
        """See `Round.wait`; raises TimeoutError as `run` does."""
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
        (result,) = unpack_results(self._link.read(name))
        self._results.append(result)
        self._link.drop(name)
        activity.progress()
        return True

    def _wait(self) -> Wait:
        return Wait(self._link, self._wait_seconds, self._progress, "waiting for responses")

    def _progress(self) -> int:
        """The number of responses so far; also passes on the rollout ranks' stop signals."""
        pass_on_signals(self._link)
        return self._link.count(f"{self._name}/count")

    def metrics(self) -> dict[str, float]:
        """See `Round.metrics`; adds rollout rank 0's ``seconds`` and ``idle_seconds``. Once: it deletes the round."""
        metrics = None
        if self._link.rank == 0:
            self._wait().until_there(f"{self._name}/metrics")
            metrics = json.loads(self._link.read(f"{self._name}/metrics"))
            for name in ("", "/metrics"):
                self._link.drop(f"{self._name}{name}")
            self._link.store.delete_key(f"{self._name}/count")
        known: dict[str, float] = broadcast_object(metrics)
        return known


def pass_on_signals(link: Link) -> None:
    """Raise on training rank 0 a stop signal that a rollout rank got, if there is one."""
    if link.rank == 0 and link.has("signal"):
        number = int(link.read("signal"))
        link.drop("signal")
        signal.raise_signal(signal.Signals(number))
