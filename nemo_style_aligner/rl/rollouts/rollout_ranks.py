"""Ranks that only generate: they carry out the training ranks' commands (`remote`), one after the other."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.engine import GenerationResult
from nemo_style_aligner.parallel.stop_signals import StopEarlyError, stops
from nemo_style_aligner.parallel.worlds import Link
from nemo_style_aligner.rl.rollouts.generator import LocalGenerator
from nemo_style_aligner.rl.rollouts.wire import pack_results, unpack_request
from nemo_style_aligner.telemetry import activity
from nemo_style_aligner.weights.push import receive_weights

logger = logging.getLogger(__name__)

_LISTEN_SECONDS = 0.2


class RolloutRank:
    """Serves the training ranks until the job ends.

    Args:
        link: to the training ranks.
        architecture, dtype: of the weights that they send.
        build: makes this world's generator, given the maximum sequence length. Collective.
    """

    def __init__(
        self,
        link: Link,
        architecture: ModelArchitecture,
        dtype: torch.dtype,
        build: Callable[[int], LocalGenerator],
    ) -> None:
        self._link = link
        self._architecture = architecture
        self._dtype = dtype
        self._build = build
        self._generator: LocalGenerator | None = None
        self._idle_since = time.monotonic()

    def serve(self) -> int:
        """Carry out commands until the job ends; return its exit status."""
        number = 0
        signals = _Signals(self._link)
        while True:
            with activity.phase("waiting for training"):
                command = self._link.command(number)
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
        if self._generator is None:
            raise RuntimeError(f"{command['kind']!r} came before 'build'")
        if command["kind"] == "refit":
            weights = receive_weights(self._architecture, self._dtype, self._link.broadcast)
            self._generator.engine.refit(weights, int(command["version"]))
        elif command["kind"] == "generate":
            self._generate(self._generator, command["round"])
        else:
            raise RuntimeError(f"{command['kind']!r} is not a command that a rollout rank knows")

    def _generate(self, generator: LocalGenerator, name: str) -> None:
        prompts, seed = unpack_request(self._link.read(name))
        idle_seconds, started = time.monotonic() - self._idle_since, time.monotonic()
        generation = generator.start(prompts, seed)
        try:
            generation.run(_Publisher(self._link, name))
        except StopEarlyError:
            logger.info("the job is ending: responses in progress are dropped")
            return
        metrics = generation.metrics()
        self._idle_since = time.monotonic()
        metrics |= {"seconds": self._idle_since - started, "idle_seconds": idle_seconds}
        if dist.get_rank() == 0:
            self._link.put(f"{name}/metrics", json.dumps(metrics).encode())


class _Publisher:
    """Leaves responses in the store for the training ranks, numbered as they finish over all rollout ranks."""

    def __init__(self, link: Link, name: str) -> None:
        self._link = link
        self._name = name

    def add(self, result: GenerationResult) -> None:
        number = self._link.add(f"{self._name}/count", 1) - 1
        self._link.put(f"{self._name}/{number}", pack_results([result]))

    def flush(self) -> None:
        """Do nothing: `add` has published every response."""


class _Signals:
    """Stop signals at a rollout rank, where the training ranks decide whether the job stops.

    They may still need what is being generated, so a signal is only passed on to them. When the job does end, the
    process sends itself a stop signal, which interrupts what is under way.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
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
                    self._link.put("signal", str(self._unsent.pop()).encode())
                if self._link.has("ending"):
                    self._ending = True
                    os.kill(os.getpid(), signal.SIGUSR1)
                    return
            except dist.DistError:  # the job's rank 0 is gone, and with it the job
                return

    def close(self) -> None:
        """End the thread, which uses the store: rank 0 may close that next."""
        self._closed.set()
        self._thread.join()
