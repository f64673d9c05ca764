"""A critic that is lost and comes back, and an actor job that goes back: nothing lost, nothing trained twice.

The service, the client and the journal are the real ones, over real HTTP; the critic's model is a number, and its
checkpoints are in memory. `test_faults.py` kills real jobs.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import errno
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from served_critic import CountingBackend, client_config, outputs, post, reward_client, serve, train_body, wait_for

from nemo_style_aligner import activity
from nemo_style_aligner.engine.parallel import agreement
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.errors import NotWrittenError
from nemo_style_aligner.guard import http_client
from nemo_style_aligner.guard.http_client import (
    ClientLimits,
    HttpClient,
    RequestRefusedError,
    ServerUnavailableError,
)
from nemo_style_aligner.guard.protocol import ProtocolError
from nemo_style_aligner.trainer.checkpoints import manifest
from nemo_style_aligner.trainer.rl.remote_critic import RemoteCritic
from nemo_style_aligner.trainer.rl.values import Training, ValueBatch
from nemo_style_aligner.trainer.services.client import CriticClient
from nemo_style_aligner.trainer.services.critic_endpoints import critic_endpoints
from nemo_style_aligner.trainer.services.critic_service import CriticService
from nemo_style_aligner.trainer.services.exactly_once import journal
from nemo_style_aligner.trainer.services.exactly_once import session as training_session
from nemo_style_aligner.trainer.services.exactly_once.journal import CriticJournal, JournalError
from nemo_style_aligner.trainer.services.exactly_once.ledger import (
    BATCH_ARRAYS,
    EXPECTED_SEQUENCE_HEADER,
    HISTORY_HEADER,
    INITIAL_HISTORY,
    INSTANCE_HEADER,
    MAX_RUNS,
    CriticPosition,
    TrainingLedger,
    batch_digest,
)
from nemo_style_aligner.trainer.services.exactly_once.session import SequenceConflictError
from nemo_style_aligner.trainer.services.model_server import DispatchSettings, ModelServer
from nemo_style_aligner.trainer.services.routes import HttpSettings
from nemo_style_aligner.trainer.services.scores import REWARDS, ScoreEndpoint

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_rank")]  # `RemoteCritic` is collective
LIMITS = ClientLimits(total_s=20.0, read_s=20.0, away_s=20.0, internal_errors=3, max_backoff_s=0.2)


class Checkpoints:
    """What `CriticService` needs of a `CheckpointManager`, in memory: it outlives the service, as a disk does."""

    def __init__(self) -> None:
        self.stored: dict[Path, tuple[float, dict[str, Any]]] = {}
        self.damaged: set[Path] = set()
        self.count = 0
        self.gate = threading.Event()  # a checkpoint becomes whole behind it, as files do that are slow to write
        self.gate.set()
        self.full_disk = False
        self.writing: list[concurrent.futures.Future[None]] = []

    def finish(self) -> None:
        while self.writing:
            self.writing.pop().result()

    def poll(self) -> None:
        if all(written.done() for written in self.writing):
            self.finish()

    def trainer_states(self) -> dict[Path, dict[str, Any]]:
        self.finish()
        return {path: state for path, (_, state) in reversed(self.stored.items())}

    def is_whole(self, path: Path) -> bool:
        if path in self.damaged:
            del self.stored[path]
        return path not in self.damaged

    def save(self, model, optimizer, state, metrics, *, protected, on_end) -> Any:
        self.finish()
        self.count += 1
        path, content = Path(f"{self.count}"), (model.weight, copy.deepcopy(state) | {"updates": optimizer.step_count})
        gate, written = self.gate, concurrent.futures.Future()

        def write() -> None:
            if not gate.wait(30) or self.full_disk:
                written.set_exception(OSError(errno.ENOSPC, "No space left on device"))
                return
            self.stored[path] = content
            for other in list(self.stored)[:-2]:
                if other not in protected:
                    del self.stored[other]
            written.set_result(None)

        self.writing.append(written)
        threading.Thread(target=write).start()
        return written

    def load(self, path: Path, model, optimizer) -> dict[str, Any]:
        model.weight, state = self.stored[path]
        optimizer.step_count = state["updates"]
        return state


class ToyCritic:
    """A critic of one weight, which depends on all batches and their order."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(weight=1.0)
        self.optimizer = SimpleNamespace(step_count=0, offload_states=lambda: None)
        self.trained: list[float] = []
        self.dies_at: float | None = None

    def values(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return torch.full((tokens.shape[0], tokens.shape[1] - 1), self.model.weight)

    def train(self, batch, origin: str) -> list[dict[str, float]]:
        value = float(batch.returns[0, 0])
        if value == self.dies_at:
            raise RuntimeError("out of memory")
        self.trained.append(value)
        self.model.weight = 0.5 * self.model.weight + value
        self.optimizer.step_count += 1
        return [{"loss": self.model.weight, "grad_norm": 1.0}]

    def weights_changed(self) -> None:
        """It keeps nothing that depends on them."""

    def reset(self) -> None:
        self.model.weight, self.optimizer.step_count = 1.0, 0


class CriticJob:
    """The service, which can be lost and started again on its port."""

    def __init__(self) -> None:
        self.port = free_port()
        self.checkpoints = Checkpoints()
        self.critic = ToyCritic()
        self.start()

    def start(self) -> None:
        server = ModelServer(critic_endpoints(combined=True), HttpSettings(port=self.port), DispatchSettings(8, 0))
        self.server, self.critic = server, ToyCritic()
        rewards = SimpleNamespace(
            rewards=lambda tokens, lengths: lengths[:, None].float(), is_in_place=False, leave=lambda **_: None
        )
        metrics = SimpleNamespace(log_metrics=lambda *_: None)
        service = CriticService(self.critic, rewards, server.ledger, self.checkpoints, metrics, self.critic.reset)
        for path, state in list(self.checkpoints.trainer_states().items()):
            if self.checkpoints.is_whole(path):
                self.checkpoints.load(path, self.critic.model, self.critic.optimizer)
                service.load_state_dict(state)
                break

        def run() -> None:
            with contextlib.suppress(RuntimeError, OSError):
                server.run(service)

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def lose(self) -> None:
        """All that is not in a checkpoint is gone."""
        if not self.checkpoints.gate.is_set():  # killed in the middle of a save: nothing of it is left
            gate, self.checkpoints.full_disk = self.checkpoints.gate, True
            gate.set()
            self.thread.join(30)
            self.checkpoints.full_disk = False
        self.server.request_stop()
        self.thread.join(30)
        self.checkpoints.writing.clear()

    def restart(self) -> None:
        self.lose()
        self.start()

    def next_number(self, run_id: str) -> int:
        return self.server.ledger.expected(run_id)


@pytest.fixture
def job() -> Iterator[CriticJob]:
    found = CriticJob()
    yield found
    found.lose()


@contextlib.contextmanager
def actor(
    job: CriticJob, folder: Path, state: dict[str, Any] | None = None, limits: ClientLimits = LIMITS, **options: Any
) -> Iterator[RemoteCritic]:
    """Rank 0 of an actor job that starts with this state of its checkpoint."""
    client = CriticClient(
        client_config(job.port), infer_limits=limits, train_limits=limits, on_lost=options.get("on_lost")
    )
    critic = RemoteCritic(client, CriticJournal(folder), options.get("trained_critic", "refuse"))
    try:
        client.wait_until_ready(20)
        if state is not None:
            critic.load_state_dict(state)
        critic.begin()
        yield critic
    finally:
        client.close()


def train(critic: RemoteCritic, *values: float) -> list[float]:
    """One training step for each value; the losses."""
    return [start_training(critic, value).result()["critic_loss"] for value in values]


def start_training(critic: RemoteCritic, value: float) -> Training:
    full = torch.full((2, 3), float(value))
    tokens = torch.ones(2, 4, dtype=torch.int64)
    return critic.start_training_on(ValueBatch(tokens, full, full, torch.ones(2, 3)))


def save(critic: RemoteCritic) -> dict[str, Any]:
    """A save of the pair; the state in the actor's checkpoint."""
    under_way = critic.start_save()
    state = critic.state_dict()
    assert under_way.wait(60)
    critic.confirm_save(under_way)
    return state


def value(critic: RemoteCritic) -> float:
    """The critic's weight, as scoring shows it."""
    scores = critic.client.infer_async(torch.ones(1, 3, dtype=torch.int64), torch.tensor([3])).result(30)
    return float(scores["values"][0, 0])


def weights(*values: float) -> list[float]:
    """Of a critic that was trained with these values and never disturbed, after each."""
    found = [1.0]
    for batch in values:
        found.append(0.5 * found[-1] + batch)
    return found[1:]


# ---- the critic is lost ------------------------------------------------------------------------------


def test_lost_training_is_sent_again_in_order(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        losses = train(critic, 1, 2)
        save(critic)
        losses += train(critic, 3, 4)
        job.restart()
        assert job.next_number(critic.client.position.run_id) == 3
        losses += train(critic, 5)
        assert job.critic.trained == [3, 4, 5]
        job.restart()
        assert value(critic) == weights(1, 2, 3, 4, 5)[-1]
        assert losses == weights(1, 2, 3, 4, 5)
        assert job.critic.trained == [3, 4, 5]


def test_a_critic_lost_before_its_first_save(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1, 2)
        job.restart()
        assert value(critic) == weights(1, 2)[-1]


def test_a_critic_without_its_newest_checkpoint_falls_back_to_the_one_before(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        for number in range(1, 6):
            train(critic, number)
            save(critic)
        assert len(list(tmp_path.glob("*.safetensors"))) == 2, "batches before all checkpoints are not needed"
        job.checkpoints.damaged.add(list(job.checkpoints.stored)[-1])
        job.restart()
        assert train(critic, 6) == weights(1, 2, 3, 4, 5, 6)[-1:]
        assert job.critic.trained == [5, 6]


def test_an_actor_that_has_lost_its_newest_checkpoint_goes_on_from_the_one_before(
    job: CriticJob, tmp_path: Path
) -> None:
    """It was killed between the critic's save and its own, and then the newest of its checkpoints was damaged."""
    with actor(job, tmp_path) as critic:
        states = []
        for number in range(1, 6):
            train(critic, number)
            states.append(save(critic))
        train(critic, 6)
        assert critic.start_save().wait(60)
    job.restart()
    with actor(job, tmp_path, states[-2]) as critic:
        assert value(critic) == weights(1, 2, 3, 4)[-1]
        assert train(critic, 5) == weights(1, 2, 3, 4, 5)[-1:]
        # The critic's checkpoint after the next save is damaged, too.
        save(critic)
        job.checkpoints.damaged.add(list(job.checkpoints.stored)[-1])
        job.restart()
        assert train(critic, 6) == weights(1, 2, 3, 4, 5, 6)[-1:]


def test_batches_stay_until_the_critic_has_gone_back(job: CriticJob, tmp_path: Path) -> None:
    """An actor that is sent too far back, and refused, has not lost what it needs in its proper place."""
    with actor(job, tmp_path) as critic:
        states = []
        for number in range(1, 6):
            train(critic, number)
            states.append(save(critic))
    with pytest.raises(SequenceConflictError, match="batches from 2 on"), actor(job, tmp_path, states[0]):
        pass
    job.checkpoints.damaged.add(list(job.checkpoints.stored)[-1])
    job.restart()
    with actor(job, tmp_path, states[-1]) as critic:
        assert train(critic, 6) == weights(1, 2, 3, 4, 5, 6)[-1:]
    assert sorted(path.name[:8] for path in tmp_path.glob("*.safetensors")) == ["00000004", "00000005", "00000006"]


def test_other_ranks_wait_for_a_level_critic(job: CriticJob, tmp_path: Path) -> None:
    """A rank that only scores gets nothing from a critic that has lost training; rank 0 brings it level by itself."""
    with actor(job, tmp_path) as critic:
        train(critic, 1, 2)
        position = critic.client.position
        critic.client.close()  # rank 0 is slow
        other = CriticClient(client_config(job.port), infer_limits=LIMITS, train_limits=LIMITS)
        other.follow(position)
        job.restart()
        asked = time.monotonic()
        scores = other.infer_async(torch.ones(1, 3, dtype=torch.int64), torch.tensor([3]))
        # Who waits for scores must learn that the critic gets on.
        wait_for(lambda: asked < other.last_progress)
        assert not scores.done()
        with actor(job, tmp_path, critic.state_dict()):
            assert float(scores.result(30)["values"][0, 0]) == weights(1, 2)[-1]
        other.close()


def test_the_watch_brings_an_idle_pair_level(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1, 2)
        job.restart()
        wait_for(lambda: job.critic.trained == [1, 2])
        run_id = critic.client.position.run_id
        assert job.next_number(run_id) == 3


def test_a_refusal_that_is_over_is_forgotten(job: CriticJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1)
        session, watch = critic.client._session, critic.client._watch
        assert watch is not None
        bring_level, failures = session.try_bring_level, []

        def refused_once() -> bool:
            failures.append(watch.failure)
            if len(failures) == 1:
                raise RequestRefusedError("no room for a moment", 500, {})
            return bring_level()

        monkeypatch.setattr(session, "try_bring_level", refused_once)
        job.restart()
        wait_for(lambda: job.critic.trained == [1])
        assert isinstance(failures[1], RequestRefusedError)
        wait_for(lambda: watch.failure is None)


def test_a_critic_that_is_lost_for_good_ends_a_job_that_waits_for_others(
    job: CriticJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 asks for nothing; the watch notices that the critic has come back in another directory."""
    monkeypatch.setattr(training_session, "_GIVE_UP_SECONDS", 0.2)
    lost: list[Exception] = []
    with actor(job, tmp_path, on_lost=lost.append) as critic:
        for number in range(1, 5):
            train(critic, number)
            save(critic)
        job.checkpoints.stored.clear()
        job.restart()
        wait_for(lambda: bool(lost))
        assert isinstance(lost[0], SequenceConflictError) and "cannot continue this run" in str(lost[0])


def test_a_critic_that_cannot_be_asked_to_go_back_ends_a_job_that_waits_for_others(
    job: CriticJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something between the two, or another program that has the port now, does not know the request."""
    monkeypatch.setattr(training_session, "_GIVE_UP_SECONDS", 0.2)
    lost: list[Exception] = []
    with actor(job, tmp_path, on_lost=lost.append) as critic:
        session = critic.client._session

        def unknown() -> bool:
            raise RequestRefusedError("no such model: critic_restore", 404, {})

        monkeypatch.setattr(session, "try_bring_level", unknown)
        job.restart()
        wait_for(lambda: bool(lost))
        assert isinstance(lost[0], RequestRefusedError)


def test_training_that_is_under_way_survives_the_critic(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1)
        job.lose()
        started = threading.Timer(1.0, job.start)
        started.start()
        assert train(critic, 2) == weights(1, 2)[-1:]


def test_a_wait_for_the_critic_is_progress_only_while_all_ranks_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The critic's limits are hours: a rank that is stopped meanwhile is missed after the watchdog's."""
    seen: list[activity.Activity] = []

    def meet(answer: Any, **_: Any) -> Any:  # the next one, or never
        seen.append(activity.current())
        return answer if len(seen) < 3 else (0.5, None)

    monkeypatch.setattr(agreement, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(agreement, "broadcast_object", meet)
    client = SimpleNamespace(position=CriticPosition("run", 1), follow=lambda _: None)
    critic: Any = SimpleNamespace(client=client)
    assert RemoteCritic.trained(critic, concurrent.futures.Future()) == {"critic_loss": 0.5}
    assert [now.bound for now in seen] == [0.0, 0.0, 0.0]
    assert seen[0].progress < seen[1].progress < seen[2].progress


def test_a_save_is_of_a_level_critic(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1, 2)
        job.restart()
        save(critic)
        (stored,) = job.checkpoints.stored.values()
        assert stored[0] == weights(1, 2)[-1]


def test_the_critic_goes_on_while_its_checkpoint_is_written(job: CriticJob, tmp_path: Path) -> None:
    """It scores meanwhile; it is trained again when the checkpoint is whole, which is of the state at the save."""
    with actor(job, tmp_path) as critic:
        train(critic, 1)
        job.checkpoints.gate.clear()
        under_way = critic.start_save()
        training = start_training(critic, 2)
        assert {value(critic) for _ in range(20)} == {*weights(1)}
        assert job.critic.trained == [1] and job.checkpoints.stored == {}
        job.checkpoints.gate.set()
        assert under_way.wait(60)
        training.result()
        ((weight, _),) = job.checkpoints.stored.values()
        assert job.critic.trained == [1, 2] and weight == weights(1)[-1]
        assert under_way.position.next_number == 2 and critic.client.position.next_number == 3
        critic.confirm_save(under_way)  # of the state at the save, though more was trained since
        state = critic.state_dict()
        assert state["saved_numbers"] == [2, 3]


def test_a_critic_lost_in_the_middle_of_a_save_is_asked_again(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1)
        save(critic)
        train(critic, 2)
        job.checkpoints.gate.clear()
        under_way = critic.start_save()
        assert value(critic) == weights(1, 2)[-1]  # the save was taken before
        wait_for(lambda: job.checkpoints.writing)
        job.lose()
        assert len(job.checkpoints.stored) == 1
        job.start()
        assert under_way.wait(60)
        assert [weight for weight, _ in job.checkpoints.stored.values()] == weights(1, 2)
        assert job.critic.trained == [2], "the batch since the save before was sent again"
        assert train(critic, 3) == weights(1, 2, 3)[-1:]


def test_a_service_asked_to_end_finishes_its_checkpoint(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1)
        job.checkpoints.gate.clear()
        under_way = critic.start_save()
        wait_for(lambda: job.checkpoints.writing)
        job.server.request_stop()
        threading.Timer(0.3, job.checkpoints.gate.set).start()
        assert under_way.wait(60)
        job.thread.join(20)
        assert not job.thread.is_alive() and len(job.checkpoints.stored) == 1


def test_a_batch_that_kills_the_critic_every_time_is_an_error(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        job.critic.dies_at = 1.0
        with pytest.raises((ServerUnavailableError, SequenceConflictError, RuntimeError)) as error:
            client = critic.client
            client._train_limits = ClientLimits(total_s=5, away_s=1.0, internal_errors=3)  # nobody starts it again
            train(critic, 1)
        assert "critic_train" in str(error.value) and str(job.port) in str(error.value)
        job.thread.join(30)  # the service that failed keeps its port for a moment
        job.start()


def test_a_critic_that_does_not_come_back_ends_the_wait(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path, limits=ClientLimits(total_s=30, away_s=1.0)) as critic:
        job.lose()
        began = time.monotonic()
        with pytest.raises(ServerUnavailableError, match=r"critic_infer/infer \(.*\): no answer after .*limit 1 s"):
            value(critic)
        assert time.monotonic() - began < 20
        job.start()


def test_a_separate_reward_model_that_is_lost_is_simply_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    service = {"endpoints": [ScoreEndpoint("reward_model", [REWARDS])], "http": {"port": port}}
    with reward_client(port, limits=LIMITS) as client:
        with serve(CountingBackend(), **service):
            client.wait_until_ready(20)
        caplog.set_level(logging.DEBUG, http_client.__name__)
        rewards = client.infer_async(torch.tensor([[4, 5, 6]]), torch.tensor([3]))
        wait_for(lambda: re.search(rf":{port}/.*next try in", caplog.text))
        assert not rewards.done()
        with serve(CountingBackend(), **service):
            assert rewards.result(20)["rewards"].tolist() == [15.0]


# ---- the actor job goes back -------------------------------------------------------------------------


def test_the_critic_goes_back_to_the_actors_checkpoint(job: CriticJob, tmp_path: Path) -> None:
    """The critic saved, the actor died before its own save was done, and trains on other samples from there on."""
    with actor(job, tmp_path) as critic:
        train(critic, 1, 2)
        state = save(critic)
        train(critic, 3, 4)
        assert critic.start_save().wait(60)
        train(critic, 5)
    with actor(job, tmp_path, state) as critic:
        assert value(critic) == weights(1, 2)[-1]
        assert train(critic, 33, 44) == weights(1, 2, 33, 44)[-2:]
        job.restart()  # from its newest checkpoint, which is as long, but of the life that was given up
        assert value(critic) == weights(1, 2, 33, 44)[-1]
        state = save(critic)
    with actor(job, tmp_path, state) as critic:
        assert train(critic, 5) == weights(1, 2, 33, 44, 5)[-1:]


@pytest.mark.parametrize("saves", [1, 2])
def test_saves_of_an_actor_that_cannot_save_do_not_push_out_the_checkpoint_it_needs(
    saves: int, job: CriticJob, tmp_path: Path
) -> None:
    """After its first save that was whole, and after its second, which the journal no longer leads to."""
    with actor(job, tmp_path) as critic:
        for number in range(1, saves + 1):
            train(critic, number)
            state = save(critic)
        for number in range(saves + 1, saves + 5):
            train(critic, number)
            assert critic.start_save().wait(60)  # and the actor's own fails
    with actor(job, tmp_path, state) as critic:
        assert value(critic) == weights(*range(1, saves + 1))[-1]


def test_saves_that_a_stranger_asks_for_do_not_either(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1)
        state = save(critic)
        train(critic, 2)
        stranger = CriticClient(client_config(job.port), infer_limits=LIMITS, train_limits=LIMITS)
        for _ in range(3):
            stranger.save_async().result(20)
            job.restart()
        stranger.close()
    with actor(job, tmp_path, state) as critic:
        assert value(critic) == weights(1)[-1]


def test_an_actor_without_a_checkpoint_begins_again_with_the_initial_critic(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1, 2)
        run_id = critic.client.position.run_id
    with actor(job, tmp_path) as critic:
        assert critic.client.position.run_id == run_id
        assert list(tmp_path.glob("*.safetensors")) == []
        assert train(critic, 7) == weights(7)
        job.restart()
        assert value(critic) == weights(7)[-1]


def test_a_new_run_refuses_a_trained_critic_unless_told_to_keep_it(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path / "a") as critic:
        train(critic, 1)
        of_a = save(critic)
    with pytest.raises(SequenceConflictError, match="trained_critic=keep") as refused, actor(job, tmp_path / "b"):
        pass
    assert "in which it was trained" not in str(refused.value)  # advice for a run that is not new
    job.restart()
    assert not (tmp_path / "b" / "run.json").exists()
    job.checkpoints.stored.clear()  # a's training is in the critic's memory alone: b has it saved
    with actor(job, tmp_path / "b", trained_critic="keep") as critic:
        job.restart()
        assert train(critic, 2) == weights(1, 2)[-1:]
    with actor(job, tmp_path / "b") as critic:  # the same run again, before any save: from a's critic, not from scratch
        assert value(critic) == weights(1)[-1]
        train(critic, 2)
    with pytest.raises(SequenceConflictError, match="cannot continue this run"), actor(job, tmp_path / "a", of_a):
        pass  # it would take back what b trained


def test_two_actors_with_one_critic_are_told_of_each_other(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path / "a") as one, actor(job, tmp_path / "b") as other:  # both find it untrained
        train(one, 1)
        with pytest.raises(SequenceConflictError, match=r"(?s)cannot continue .*if another actor trains this critic"):
            train(other, 2)
        train(one, 3)  # the first has nothing of it
        assert job.critic.trained == [1, 3]


def test_a_critic_of_another_directory_is_an_error_that_says_what_to_do(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        for number in range(1, 5):
            train(critic, number)
            state = save(critic)
    job.checkpoints.stored.clear()
    job.restart()
    refused = pytest.raises(SequenceConflictError, match=r"batches from 3 on .*\n  - start .*explicit_log_dir")
    with refused, actor(job, tmp_path, state):
        pass


def test_training_without_numbers_by_others_is_noticed(job: CriticJob, tmp_path: Path) -> None:
    """NeMo-Aligner's requests have none. The run goes on where nobody else was."""
    with actor(job, tmp_path) as critic:
        train(critic, 1)
        save(critic)
        outputs(post(SimpleNamespace(url=f"http://127.0.0.1:{job.port}"), "critic_train", train_body()))
        with pytest.raises(SequenceConflictError, match="has made 2 training steps and expects number 2"):
            train(critic, 2)


def test_training_by_another_run_is_noticed(job: CriticJob, tmp_path: Path) -> None:
    ones = torch.ones(1, 3)
    with actor(job, tmp_path) as critic:
        train(critic, 1)
        save(critic)
        stranger = CriticClient(client_config(job.port), infer_limits=LIMITS, train_limits=LIMITS)
        stranger.train_async(torch.ones(1, 4, dtype=torch.int64), ones, ones, ones).result(20)
        stranger.close()
        with pytest.raises(SequenceConflictError):
            value(critic)


# ---- the session and the watch, with a critic that is a function ---------------------------------------


def test_a_critic_that_is_lost_every_time_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request may meet it elsewhere ten times. Batches that are sent again are progress."""
    arrays = {name: np.zeros((1, 2), np.float32) for name in BATCH_ARRAYS}
    calls: list[str] = []
    losses, progress = {"train": 0, "save": 0}, []
    points_to_go_back = 0

    def call(model: str, inputs: Any, parameters: Any) -> dict[str, np.ndarray]:
        calls.append(model)
        if model == "critic_restore":
            return {"position": np.array([len(inputs["histories"]) - 1 - points_to_go_back])}
        if losses[model]:
            losses[model] -= 1
            raise RequestRefusedError("it was started again", 409, {EXPECTED_SEQUENCE_HEADER: "1"})
        return {"loss_mean": np.array([0.5]), "status": np.array([0])}

    monkeypatch.setattr(training_session, "activity", SimpleNamespace(progress=lambda: progress.append(len(calls))))
    session = training_session.TrainingSession(call, "train", "save", CriticPosition("run", 1, "initial"), "here")
    session.begin(CriticJournal(tmp_path), session.position)
    for _ in range(2):
        losses.update(train=10, save=10)
        session.save(None)
        assert session.train(arrays) == 0.5
    assert calls.count("train") == calls.count("save") == 22 and not progress
    points_to_go_back = 2
    assert session.try_bring_level() and calls[-3:] == ["critic_restore", "train", "train"] and len(progress) == 2
    points_to_go_back, losses["train"] = 0, 100
    with pytest.raises(SequenceConflictError, match="lost more than 10 times at training batch 3"):
        session.train(arrays)
    assert losses["train"] == 100 - 11
    with session._lock:  # a request is under way, which brings the critic level itself
        assert not session.try_bring_level()


def test_the_watch_says_that_the_critic_is_away_and_brings_it_level_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a clock that each question sets forward by 4 s. For 20 s a critic that is away is progress."""
    now, asked, brought, progress, lost = 1000.0, [], [], [], []
    instances = iter([*"a", *[None] * 10, *"b", *[None] * 2])
    troubles = iter([RequestRefusedError("no room", 500, {}), None, RequestRefusedError("not known", 404, {})])

    def answer(*_: object, **__: object) -> SimpleNamespace:
        nonlocal now
        now += 4.0
        asked.append(now)
        instance = next(instances, "b")
        if instance is None:
            raise ServerUnavailableError("connection refused")
        return SimpleNamespace(headers={INSTANCE_HEADER: instance})

    def bring_level() -> bool:
        brought.append(now)
        if trouble := next(troubles):
            raise trouble
        return True

    monkeypatch.setattr(training_session, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(training_session, "activity", SimpleNamespace(progress=lambda: progress.append(now)))
    monkeypatch.setattr(training_session, "_WATCH_SECONDS", 0.001)
    monkeypatch.setattr(training_session, "_GIVE_UP_SECONDS", 0.0)
    http: Any = SimpleNamespace(request=answer, base_url="here")
    session: Any = SimpleNamespace(try_bring_level=bring_level)
    watch = training_session.CriticWatch(http, session, 20.0, lost.append)
    try:
        wait_for(lambda: len(asked) >= 20)
        assert brought == [1048.0, 1060.0] and not lost  # a refusal with 500 may pass
        watch.wake()
        wait_for(lambda: lost)
        assert len(brought) == 3 and lost == [watch.failure] and not watch._wake.is_set()
    finally:
        watch.stop()
        watch._thread.join(20)
    said = [re.sub(": connection refused", "", record.getMessage()) for record in caplog.records]
    away = "waiting for the critic, away for {} s"
    back, cannot = "the critic at here is back after {} s", "the critic cannot be brought up to date: {}"
    expected = [*map(away.format, (0, 12, 24, 36)), back.format(40), cannot.format("no room")]
    assert said == [*expected, away.format(0), back.format(8), cannot.format("not known")]
    assert [moment - 1000.0 for moment in progress] == [8, 12, 16, 20, 24, 52, 56]


# ---- the journal -------------------------------------------------------------------------------------


def test_a_damaged_batch_is_named_and_a_truncated_one_is_not_counted(job: CriticJob, tmp_path: Path) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1, 2)
        state = critic.state_dict()
    path = tmp_path / "00000002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    job.restart()
    with pytest.raises(JournalError, match=r"00000002.*checksum"), actor(job, tmp_path, state):
        pass
    path.write_bytes(content[:50])
    job.restart()
    with pytest.raises(SequenceConflictError, match="batches from 3 on"), actor(job, tmp_path, state):
        pass


def test_batches_that_cannot_be_read_now_are_not_deleted(
    job: CriticJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1, 2)
        state = critic.state_dict()
    job.restart()
    monkeypatch.setattr(manifest, "_READ_PAUSES", (0.0,))
    unreadable, no_descriptors = OSError(errno.EIO, "Input/output error"), FileNotFoundError("as safetensors says")
    for place, name, trouble in (
        (journal, "safe_open", unreadable),
        (journal, "safe_open", no_descriptors),
        (Path, "read_bytes", unreadable),
    ):

        def fail(*_: object, trouble: OSError = trouble, **__: object) -> None:
            raise trouble

        with monkeypatch.context() as patch:
            patch.setattr(place, name, fail)
            with pytest.raises(JournalError, match=r"0000000\d.* cannot be read now"), actor(job, tmp_path, state):
                pass
    with actor(job, tmp_path, state) as critic:
        train(critic, 3)
    assert job.critic.trained == [1, 2, 3]
    cut = tmp_path / "00000002.safetensors"
    cut.write_bytes(cut.read_bytes()[:50])
    again = CriticJournal(tmp_path)
    again.scan()
    again.rewind(critic.client.position)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["00000002.safetensors.damaged", "00000003.safetensors", "run.json"]


def test_a_journal_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is its user's alone."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    leftover = tmp_path / "00000001.safetensors.unfinished"
    leftover.touch()
    monkeypatch.setattr(Path, "unlink", denied)
    with pytest.raises(NotWrittenError, match=rf"{leftover} cannot be deleted \(Permission denied\)"):
        CriticJournal(tmp_path).scan()
    for call in ("open", "read_text", "exists", "stat"):
        monkeypatch.setattr(Path, call, denied)
    monkeypatch.setattr(manifest, "_READ_PAUSES", ())
    with pytest.raises(JournalError, match=r"run\.json cannot be read now .*Permission denied"):
        CriticJournal(tmp_path).run_start()
    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(NotWrittenError, match=r"run\.json of .* \(Permission denied\).* Mend that and start"):
        CriticJournal(tmp_path).begin_run(CriticPosition("run", 1, "initial"))


def test_a_full_disk_is_an_error_before_the_batch_is_sent(
    job: CriticJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with actor(job, tmp_path) as critic:
        train(critic, 1)

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"00000002\.safetensors of .* cannot be written .*No space left.*Make room"):
            train(critic, 2)
        monkeypatch.undo()
        assert job.critic.trained == [1]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001.safetensors", "run.json"]


def test_batches_of_another_history_lead_nowhere(tmp_path: Path) -> None:
    arrays = {name: np.zeros((1, 1), np.float32) for name in BATCH_ARRAYS}
    journal, start = CriticJournal(tmp_path), CriticPosition("run", 1, "initial")
    journal.write(start, arrays, batch_digest(arrays))
    reached, other = start.after(batch_digest(arrays)), CriticPosition("run", 2, "other")
    assert journal.positions(reached) == [start, reached] and journal.positions(other) == [other]


# ---- limits of the client ----------------------------------------------------------------------------


@contextlib.contextmanager
def raw_server(answer: bytes, pause: float, hold: float = 0.0) -> Iterator[int]:
    """Sends ``answer`` byte by byte with a pause after each, then holds the connection open."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    def drip(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(65536)
            for byte in answer:
                connection.sendall(bytes([byte]))
                if stop.wait(pause):
                    return
            stop.wait(hold)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        listener.close()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "pause", "limits"),
    [
        (b"", 0.0, ClientLimits(read_s=0.2, total_s=1.0)),  # silent
        (HEAD[:20], 0.0, ClientLimits(read_s=0.2, total_s=1.0)),  # silent within the header
        (HEAD + b"x" * 10, 0.0, ClientLimits(read_s=0.2, total_s=1.0)),  # truncated
        (b"HTTP/1.1 200 OK\r\nX: xx", 0.0, ClientLimits(read_s=0.2, total_s=1.0)),  # truncated within the header
        (b"HTTP/1.1 200 OK\r\nX: xx\r\nContent-Length: ", 0.0, ClientLimits(read_s=0.2, total_s=1.0)),
        (b"HTTP/1.1 200 OK\r\nX: xx\r\nTransfer-Encoding: ", 0.0, ClientLimits(read_s=0.2, total_s=1.0)),
        (b"HTTP/1.1 409 Conflict \r\nX: xx", 0.0, ClientLimits(read_s=0.2, total_s=1.0)),
        (HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 2\r\n\r\nxx"), 0.0, ClientLimits(read_s=0.2, total_s=1.0)),
        (HEAD.replace(b"1000", b"9" * 5000) + b"xx", 0.0, ClientLimits(read_s=0.2, total_s=1.0)),  # no number to Python
        (HEAD + b"x" * 900, 0.01, ClientLimits(read_s=0.5, total_s=1.0)),  # ever slower than it would have to be
        (b"", 0.0, ClientLimits(read_s=0.2, total_s=1.0, away_s=100.0)),  # silent is not away
        (HEAD + b"x" * 10, 0.0, ClientLimits(read_s=0.2, total_s=100.0, away_s=1.0)),  # broken connections are
    ],
)
def test_no_request_outlives_its_limits(answer: bytes, pause: float, limits: ClientLimits) -> None:
    hold = 0.0 if b"xx" in answer and pause == 0.0 else 30.0
    with raw_server(answer, pause, hold) as port:
        client = HttpClient(f"http://127.0.0.1:{port}")
        began = time.monotonic()
        with pytest.raises(
            ServerUnavailableError,
            match=rf"GET http://127.0.0.1:{port}/v2/x \(request_id=\w+\): no answer after \d+\.\d s",
        ):
            client.request("GET", "/v2/x", limits=limits)
        assert time.monotonic() - began < 10.0  # ten times the limit
        client.close()


def test_ledgers_forget_nothing_in_a_checkpoint() -> None:
    ledger, again = TrainingLedger(), TrainingLedger()
    ledger.record("a", 1, 0.5, "x")
    ledger.record(None, 0, 0.5, "y")
    again.load_state_dict(ledger.state_dict())
    assert again.state_dict() == ledger.state_dict() and again.steps == 2 and again.expected("a") == 2


def test_ledgers_forget_the_run_that_came_longest_ago() -> None:
    ledger = TrainingLedger()
    for number in range(MAX_RUNS + 1):
        ledger.record(f"run{number}", 1, 0.0, "x")
    assert ledger.expected("run0") == 1 and ledger.expected(f"run{MAX_RUNS}") == 2
    ledger.record("run1", 2, 0.0, "x")
    ledger.record("new", 1, 0.0, "x")
    assert ledger.expected("run1") == 3 and ledger.expected("run2") == 1


def test_a_repeat_is_answered_where_the_histories_agree() -> None:
    ledger, start = TrainingLedger(), CriticPosition("a", 1, INITIAL_HISTORY)
    assert start.parameters() == {"run_id": "a", "sequence_number": 1, "history": INITIAL_HISTORY}
    assert ledger.stored_answer(start, "x") is None
    assert ledger.where("a") == {EXPECTED_SEQUENCE_HEADER: "1", HISTORY_HEADER: INITIAL_HISTORY}
    ledger.record("a", 1, 0.5, "x")
    assert start.after("x") == CriticPosition("a", 2, ledger.history) != start.after("y")
    unfollowed = CriticPosition("a", 1)
    assert unfollowed.after("x") == CriticPosition("a", 2)
    assert unfollowed.parameters() == {"run_id": "a", "sequence_number": 1}
    assert ledger.stored_answer(start, "x") == ledger.stored_answer(unfollowed, "x") == 0.5
    assert ledger.stored_answer(start.after("x"), "y") is None
    for number, history, digest, reason in (
        (1, INITIAL_HISTORY, "y", "is stale: expected 2"),
        (1, None, "y", "is stale: expected 2"),  # another batch, of a client that follows no history
        (1, "other", "x", "is stale: expected 2"),
        (3, None, "y", "is ahead of its predecessors: expected 2"),
        (2, "other", "y", "trained on other batches"),
    ):
        with pytest.raises(ProtocolError, match=reason) as refusal:
            ledger.stored_answer(CriticPosition("a", number, history), digest)
        assert refusal.value.status == 409
        assert refusal.value.headers == {EXPECTED_SEQUENCE_HEADER: "2", HISTORY_HEADER: ledger.history}
    assert ledger.where("b") == {EXPECTED_SEQUENCE_HEADER: "1", HISTORY_HEADER: ledger.history}


def test_a_run_may_undo_no_training_but_its_own() -> None:
    ledger = TrainingLedger()
    states = [ledger.state_dict()]
    for run, number in (("a", 1), ("a", 2), ("b", 1), ("a", 3), (None, 0)):
        ledger.record(run, number, 0.0, "x")
        states.append(ledger.state_dict())
    for since in range(len(states)):
        ledger.load_state_dict(states[4])
        assert ledger.is_ahead_by_run_alone(states[since], "a") == (since in (3, 4)), since
    ledger.load_state_dict(states[5])
    assert not ledger.is_ahead_by_run_alone(states[4], "a")
    ledger.load_state_dict(states[2])
    assert ledger.is_ahead_by_run_alone(states[0], "a") and not ledger.is_ahead_by_run_alone(states[0], "b")


def test_batches_of_the_same_bytes_are_told_apart_by_shape_and_dtype() -> None:
    kinds: list[tuple[tuple[int, int], Any]] = [((2, 3), np.float32), ((3, 2), np.float32), ((2, 3), np.int32)]
    digests = {batch_digest({name: np.zeros(shape, dtype) for name in BATCH_ARRAYS}) for shape, dtype in kinds}
    assert len(digests) == len(kinds)
