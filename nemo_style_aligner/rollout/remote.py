"""The training ranks' side of generation on ranks set apart for it; `rollout_ranks` is the other side."""

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
from nemo_style_aligner.parallel import stop_points, stop_signals
from nemo_style_aligner.parallel.agreement import PATIENCE_SECONDS
from nemo_style_aligner.parallel.groups import all_reduce_max, broadcast_object, current_layout
from nemo_style_aligner.parallel.worlds import Link, Wait
from nemo_style_aligner.rollout.intake import ResponseSink
from nemo_style_aligner.rollout.prompts import Prompt
from nemo_style_aligner.rollout.wire import RoundRequest, pack_request, unpack_results
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.weights.push import send_weights
from nemo_style_aligner.weights.stream import export_weights


class RemoteGenerator:
    """Has rounds made by the rollout ranks, side by side with whatever the training ranks do meanwhile.

    The rollout ranks do one thing after the other. Each training rank takes over a share of the responses.

    Args:
        link: to the rollout ranks.
        architecture, dtype: of the weights that are pushed.
        max_sequence_length: of prompt and response together.
        wait_seconds: the longest wait for any response to come.
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
        """See `Generator.weight_version`; of what was sent last."""
        return self._version

    def refit(self, model: MegatronModel, version: int) -> None:
        """See `Generator.refit`."""
        link = self._link
        if link.rank == 0:
            link.post({"kind": "refit", "version": version})
        if current_layout().dp_rank == 0:  # one replica's ranks export, the first of them sends
            # The other side knows tensors by the table's order: none is left out, and nothing is transient.
            weights = export_weights(model)
            send_weights(weights, self._architecture, self._dtype, link.broadcast if link.rank == 0 else None)
        self._version = version

    def unload(self) -> None:
        """The rollout ranks' memory is nobody else's."""

    def reload(self) -> None:
        """See `unload`."""

    def start(self, prompts: Sequence[Prompt], seed: int) -> RemoteRound:
        """See `Generator.start`."""
        self._num_rounds += 1
        name = f"round/{self._num_rounds}"
        pass_on_signals(self._link)
        if self._link.rank == 0:
            self._link.put(name, pack_request(RoundRequest(list(prompts), seed)))
            self._link.post({"kind": "generate", "round": name})
        return RemoteRound(self._link, name, prompts, self._wait_seconds)

    def close(self) -> None:
        """The rollout ranks end with the job (`worlds.end`)."""


class RemoteRound:
    """A `Round` that the rollout ranks work at from the moment it is started.

    The response that finishes as number i goes to training rank i modulo their number.
    """

    def __init__(self, link: Link, name: str, prompts: Sequence[Prompt], wait_seconds: float) -> None:
        self.prompts = prompts
        self._link = link
        self._name = name
        self._wait_seconds = wait_seconds
        self._numbers = range(dist.get_rank(), len(prompts), dist.get_world_size())
        self._results: list[GenerationResult] = []

    def run(self, sink: ResponseSink) -> None:
        """See `Round.run`; TimeoutError when no response comes for ``wait_seconds``."""
        wait, num_given, is_missing = self._wait(), 0, True
        while is_missing:  # on any rank: its last responses, or a stop, may be far off, and a collective has a limit
            with stop_signals.interruptible():
                if not stop_signals.received():  # a signal that came before interrupts nothing
                    deadline = time.monotonic() + PATIENCE_SECONDS
                    while True:
                        for result in self._results[num_given:]:
                            sink.add(result)
                            num_given += 1
                        if not self._take_next(wait, deadline):
                            break
                    sink.flush()
            pass_on_signals(self._link)
            stop_points.check()
            is_missing = self._is_missing_anywhere()

    def wait(self) -> list[GenerationResult]:
        """See `Round.wait`; TimeoutError as in `run`."""
        wait, is_missing = self._wait(), True
        while is_missing:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while self._take_next(wait, deadline):
                pass
            is_missing = self._is_missing_anywhere()
        return self._results

    def _is_missing_anywhere(self) -> bool:
        activity.progress()  # these waits have a limit of their own
        return bool(all_reduce_max(int(len(self._results) < len(self._numbers))))

    def _take_next(self, wait: Wait, deadline: float) -> bool:
        """Take over a response, if one comes in time and is missing."""
        if len(self._results) == len(self._numbers):
            return False
        # Wherever a signal interrupts this, nothing is lost: what is taken over counts, what is not is still there.
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
        """How many responses there are; and a look at what else the rollout ranks have to say."""
        pass_on_signals(self._link)
        return self._link.add(f"{self._name}/count", 0)

    def metrics(self) -> dict[str, float]:
        """See `Round.metrics`. Once: it clears away what is left of the round."""
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
    """A stop signal that only a rollout rank got becomes one of training rank 0."""
    if link.rank == 0 and link.has("signal"):
        number = int(link.read("signal"))
        link.drop("signal")
        signal.raise_signal(signal.Signals(number))
