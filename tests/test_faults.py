"""Fault campaign on a real pair of jobs: whoever is killed when, the run ends as one that nobody disturbed.

Each trial is a run of the pair (an actor job of two ranks with the Flask work queue, and the critic job) that meets
several faults at random instants and is started again as a user would, with the same commands. Afterwards

- the critic's history (a hash over all its training batches in order) is that of the undisturbed run: every sample was
  trained once, and in its place;
- the logged numbers of every step are those of the undisturbed run;
- the weights of policy and critic are, bit for bit;
- no job ended that nobody killed or took the disk from.

``make faults`` runs 20 trials. Variables change what it does; a trial takes a minute or two, and without
``FAULT_TRIALS`` none is made:

- ``FAULT_TRIALS=50``: so many trials; ``FAULT_SEED=100``: others.
- ``FAULT_CRITIC_RANKS=2``: ranks of the critic job.
- ``FAULT_ACTOR="trainer.devices=3 trainer.ppo.rollout_devices=1 trainer.ppo.staleness=1"``: settings of the actor job,
  in the undisturbed run as well.
- ``FAULT_KINDS="critic,connections: cut"``: these faults in every trial.
- ``FAULT_ESTIMATOR=grpo``: an estimator that needs no critic. In the critic's place there is then a reward model's
  service, which has nothing on disk.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Artefacts
from cutting_proxy import CuttingProxy
from job_processes import Job, ranks_of, script, stored_weights

from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.trainer.checkpoints.directory import CheckpointDirectory
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.telemetry.log_files import METRICS_FILE
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

ONLY = [kind.strip() for kind in os.environ.get("FAULT_KINDS", "").split(",") if kind.strip()]
TRIALS = int(os.environ.get("FAULT_TRIALS", "0"))
SEED = int(os.environ.get("FAULT_SEED", "0"))
CRITIC_RANKS = int(os.environ.get("FAULT_CRITIC_RANKS", "1"))
ACTOR = os.environ.get("FAULT_ACTOR", "").split()
ESTIMATOR = os.environ.get("FAULT_ESTIMATOR", "gae")
HAS_CRITIC = ESTIMATOR == "gae"
RUN_SECONDS, FAULT_SECONDS = 300.0, 150.0  # limits of a run, and what each fault may add, on a busy machine
STEPS, WARMUP = 6, 2 if HAS_CRITIC else 0
TRAINED = ("actor", "critic") if HAS_CRITIC else ("actor",)  # jobs that leave curves and weights
GROUP = 1 if HAS_CRITIC else 4  # responses to a prompt
SAVED_EVERY = 2
KINDS = (
    "critic",
    "last rank",
    "queue's rank",
    "everything",
    "actor told to stop",
    "critic told to stop",
    "frozen",
    "damage",
    "connections",
    "critic's disk",
    "actor's disk",
)
FROZEN_SECONDS = 8.0
DISK_MEBIBYTES = 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(0),  # every run of a trial has a limit of its own
    pytest.mark.skipif(TRIALS == 0, reason="takes minutes: make faults"),
]


class Pair:
    """Actor and critic job in one folder, started again as often as they end too early.

    Args:
        artefacts: models and prompts.
        folder: for logs, checkpoints and journal.
        seed: of the proxy between the two.
    """

    def __init__(self, artefacts: Artefacts, folder: Path, seed: int) -> None:
        self.folder = folder
        self.starts = {"actor": 0, "critic": 0}
        self.jobs: dict[str, Job] = {}
        critic_port = free_port()
        self.proxy = CuttingProxy(critic_port, seed)
        self._commands = {
            "critic": _critic(artefacts, folder, critic_port, self.proxy)
            if HAS_CRITIC
            else _reward_model(artefacts, critic_port, self.proxy),
            "actor": script(
                "train_gpt_ppo_actor.py",
                "trainer.devices=2",
                f"pretrained_checkpoint.restore_from_path={artefacts.sft}",
                artefacts.data_prefix("prompts"),
                f"exp_manager.explicit_log_dir={folder / 'actor'}",
                f"remote_critic_rm.{'critic' if HAS_CRITIC else 'reward_model'}.ip={self.proxy.HOST}",
                f"remote_critic_rm.{'critic' if HAS_CRITIC else 'reward_model'}.port={critic_port}",
                f"trainer.ppo.estimator={ESTIMATOR}",
                f"trainer.ppo.num_rollouts_per_prompt={GROUP}",
                "remote_critic_rm.timeouts.ready_seconds=200",
                "remote_critic_rm.timeouts.restart_seconds=200",
                "trainer.precision=32",
                f"trainer.ppo.max_steps={STEPS}",
                "trainer.ppo.val_check_interval=3",
                f"trainer.ppo.save_interval={SAVED_EVERY}",
                f"trainer.ppo.critic_warmup_steps={WARMUP}",
                "trainer.ppo.num_table_rows=0",
                # With the queue it depends on timing which rank makes a response; the C++ step makes the same bits.
                f"trainer.ppo.batch_iterator.use_flask={shutil.which('g++') is not None}",
                "trainer.ppo.batch_iterator.port=0",
                "model.encoder_seq_length=64",
                "model.global_batch_size=8",
                "model.micro_batch_size=2",
                f"model.ppo.num_rollout_samples={16 // GROUP}",
                "model.ppo.num_val_samples=8",
                "model.ppo.rollout_micro_batch_size=1",
                "model.ppo.forward_micro_batch_size=4",
                "model.ppo.length_params.max_length=8",
                "model.optim.lr=1e-3",
                "model.optim.sched.min_lr=1e-4",
                "model.optim.sched.warmup_steps=2",
                "model.optim.sched.constant_steps=3",
                "model.hidden_dropout=0.1",
                *ACTOR,
            ),
        }

    def keep_running(self) -> bool:
        """Start whoever has ended; False when the actor job has ended well."""
        for name, command in self._commands.items():
            job = self.jobs.get(name)
            if name == "actor" and job is not None and job.process.poll() == 0:
                return False
            if job is None or job.process.poll() is not None:
                if job is not None:
                    job.kill()  # whatever of it is left
                self.starts[name] += 1
                self.jobs[name] = Job(command, self.folder / f"{name}_{self.starts[name]}.log")
        return True

    def output(self) -> str:
        """The ends of all logs, for failures."""
        logs = sorted(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return "\n".join(f"---- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def close(self) -> None:
        """End everything."""
        for job in self.jobs.values():
            job.kill()
        self.proxy.close()

    # ---- what a run leaves ------------------------------------------------------------------

    def ledger(self) -> dict[str, Any]:
        """Of the critic's newest checkpoint; empty without a critic."""
        if not HAS_CRITIC:
            return {}
        (newest,) = (self.folder / "critic" / "checkpoints").glob("*-last")
        return json.loads((newest / "trainer_state.json").read_text())["trainer"]["ledger"]

    def curves(self, name: str) -> dict[str, list[tuple[int, float]]]:
        """A job's numbers, apart from times and from how busy the engines were."""
        varying = ("timers/", "memory/", "generation/")
        curves = read_metrics(self.folder / name).items()
        return {key: points for key, points in curves if not key.removeprefix("warm_up/").startswith(varying)}

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        """Of the job's archive."""
        archive = {"actor": "megatron_gpt_ppo_actor.nemo", "critic": "megatron_gpt_critic.nemo"}[name]
        return stored_weights(self.folder / name / "checkpoints" / archive)


def _critic(artefacts: Artefacts, folder: Path, port: int, proxy: CuttingProxy) -> list[str]:
    return script(
        "serve_ppo_critic.py",
        f"pretrained_checkpoint.restore_from_path={artefacts.rm}",
        f"exp_manager.explicit_log_dir={folder / 'critic'}",
        f"trainer.devices={CRITIC_RANKS}",
        f"trainer.ppo.port={port}",
        f"trainer.ppo.known_as=['{proxy.HOST}:{port}']",
        "trainer.precision=32",
        "model.encoder_seq_length=64",
        "model.global_batch_size=8",
        "model.micro_batch_size=4",
        "model.forward_micro_batch_size=1",  # what a sequence is computed with depends on timing otherwise
        "trainer.ppo.inference_micro_batch_size=4",
        "model.optim.lr=1e-3",
        "model.optim.sched.warmup_steps=2",
        "model.hidden_dropout=0.1",  # random streams matter, too
        "exp_manager.checkpoint_callback_params.always_save_nemo=True",
    )


def _reward_model(artefacts: Artefacts, port: int, proxy: CuttingProxy) -> list[str]:
    return script(
        "serve_reward_model.py",
        f"rm_model_file={artefacts.rm}",
        f"trainer.devices={CRITIC_RANKS}",
        f"inference.port={port}",
        f"inference.known_as=['{proxy.HOST}:{port}']",
        "trainer.precision=32",
        "model.forward_micro_batch_size=1",  # as the critic's
    )


class Campaign:
    """Chooses faults and instants, and does the harm."""

    def __init__(self, pair: Pair, seed: int, disks: dict[str, Path]) -> None:
        self.pair = pair
        self.random = random.Random(seed)
        self.disks = disks
        self.injected: list[str] = []
        self.harmed: collections.Counter[str] = collections.Counter()  # how often each job was given a reason to end

    def run(self, kinds: list[str]) -> None:
        """The pair's run with these faults, to its end."""
        deadline = time.monotonic() + RUN_SECONDS + FAULT_SECONDS * len(kinds)
        for kind in kinds:
            if not self._wait_for_an_instant(deadline):
                break  # it was faster than we
            self._inject(kind, deadline)
        while self.pair.keep_running():
            assert time.monotonic() < deadline, f"not done: {self.injected}\n{self.pair.output()}"
            time.sleep(0.05)

    def _wait_for_an_instant(self, deadline: float) -> bool:
        """Until something that a fault could spoil is under way; False when the run is over."""
        folder = self.pair.folder
        seen = set(self._batches())
        of_critic = ["critic saves"] if HAS_CRITIC else []
        what = self.random.choice(["batch", "batch", *of_critic, "actor saves", "any time"])
        patience = time.monotonic() + self.random.uniform(0.0, 15.0) if what == "any time" else deadline
        while time.monotonic() < patience:
            if not self.pair.keep_running():
                return False
            if what == "batch" and set(self._batches()) - seen:
                break
            if what == "critic saves" and list(folder.glob("critic/checkpoints/*.unfinished*")):
                break
            if what == "actor saves" and list(folder.glob("actor/checkpoints/*.unfinished*")):
                break
            time.sleep(0.002)
        assert time.monotonic() < deadline, f"no instant for a fault: {self.injected}\n{self.pair.output()}"
        time.sleep(self.random.choice([0.0, 0.0, self.random.uniform(0.0, 1.0)]))
        return True

    def _batches(self) -> list[str]:
        """What is new when a batch has been scored: a file in the critic's journal, or more in the actor's log."""
        if HAS_CRITIC:
            return [path.name for path in self.pair.folder.glob("actor/critic_journal/*.safetensors")]
        return [str(path.stat().st_size) for path in self.pair.folder.glob(f"actor/{METRICS_FILE}")]

    def _inject(self, kind: str, deadline: float) -> None:
        jobs = self.pair.jobs
        self.injected.append(kind)
        if kind.startswith("connections"):
            fault = kind.partition(": ")[2] or self.random.choice(["cut", "delay", "truncate", "truncate bodies"])
            self.injected[-1] = f"connections: {fault}"
            if fault == "cut":
                self.pair.proxy.cut()
            elif fault == "delay":
                self.pair.proxy.delay(3.0)
            elif fault == "truncate":
                self.pair.proxy.truncate(self.random.randrange(1, 8))
            else:
                self.pair.proxy.truncate_bodies(self.random.randrange(1, 8))
        elif kind.endswith("disk"):
            self.harmed[kind.removesuffix("'s disk")] += 1
            self._fill_disk(kind.removesuffix("'s disk"), deadline)
        elif kind == "everything":
            self.harmed.update(list(jobs))
            for job in jobs.values():
                job.kill()
        elif kind.endswith("told to stop"):
            name = kind.split()[0]
            self.harmed[name] += 1
            jobs[name].stop(120, signal.SIGUSR1 if name == "actor" else signal.SIGTERM)
        elif kind == "frozen":
            self._freeze()
        elif kind == "damage":
            self._damage(deadline)
        else:
            name = "critic" if kind == "critic" else "actor"
            is_alone = name == "critic" and CRITIC_RANKS == 1
            ranks = [] if is_alone else ranks_of(jobs[name])
            ranks = ranks or [jobs[name].process.pid]  # the only rank, or the supervisor before it has started any
            chosen = {"last rank": ranks[-1], "queue's rank": ranks[0], "critic": self.random.choice(ranks)}[kind]
            self.harmed[name] += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(chosen, signal.SIGKILL)
            jobs[name].wait(60)  # its other ranks notice

    def _freeze(self) -> None:
        """Hold a process, or a whole job, for a while, as a busy machine or a debugger does. Nobody may end of it."""
        name, job = self.random.choice(list(self.pair.jobs.items()))
        processes = [job.process.pid, *ranks_of(job)]
        chosen = self.random.choice([*([process] for process in processes), processes])
        self.injected[-1] = f"frozen: {name}, {len(chosen)} of {len(processes)} processes"
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in chosen:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            if number == signal.SIGSTOP:
                time.sleep(self.random.uniform(0.5, FROZEN_SECONDS))

    def _damage(self, deadline: float) -> None:
        """Kill a job as soon as it has two checkpoints, and spoil a file of the newer one."""
        name = self.random.choice(TRAINED)
        directory = CheckpointDirectory(self.pair.folder / name / "checkpoints", CheckpointSettings())
        self.injected[-1] = f"damage: {name}, too late"
        while len(directory.entries()) < 2:
            if not self.pair.keep_running() or time.monotonic() > deadline:
                return
            time.sleep(0.05)
        self.harmed[name] += 1
        self.pair.jobs[name].kill()
        checkpoints = directory.entries()
        files = sorted(path for path in checkpoints[0].path.rglob("*") if path.is_file())
        chosen, how = self.random.choice(files), self.random.choice(["a bit", "cut short", "gone"])
        self.injected[-1] = f"damage: {name}, {chosen.relative_to(checkpoints[0].path)}, {how}"
        content = bytearray(chosen.read_bytes())
        if how == "gone" or not content:
            chosen.unlink()
        elif how == "a bit":
            content[self.random.randrange(len(content))] ^= 1 << self.random.randrange(8)
            chosen.write_bytes(content)
        else:
            chosen.write_bytes(content[: self.random.randrange(len(content))])

    def _fill_disk(self, name: str, deadline: float) -> None:
        """Leave no room on a job's disk until it has ended for want of it; then make room."""
        filler, job = self.disks[name] / "filler", self.pair.jobs[name]
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(2**14))
        while job.process.poll() is None and time.monotonic() < deadline:
            if name == "critic" and self.pair.jobs["actor"].process.poll() is not None:
                break  # over, or ended by itself
            time.sleep(0.01)
        filler.unlink()
        if job.process.poll() not in (None, 0):
            assert "No space left" in job.output() or "does not fit" in job.output(), job.describe()


@contextlib.contextmanager
def small_disks(folder: Path) -> Iterator[dict[str, Path]]:
    """A small file system for each job's checkpoints; none where this user may not mount."""
    mounted: dict[str, Path] = {}
    try:
        for name in ("critic", "actor"):
            place = folder / name
            place.mkdir(parents=True)
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MEBIBYTES}m,mode=700", "tmpfs", str(place)]
            if os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0:
                mounted[name] = place
        yield mounted if len(mounted) == 2 else {}
    finally:
        for place in mounted.values():
            subprocess.run(["umount", "-l", str(place)], check=False)


@dataclasses.dataclass(frozen=True)
class Reference:
    """What the undisturbed run left."""

    ledger: dict[str, Any]
    curves: dict[str, dict[str, list[tuple[int, float]]]]
    weights: dict[str, dict[str, torch.Tensor]]


def outcome(pair: Pair) -> Reference:
    """What a run left."""
    return Reference(
        pair.ledger(), {name: pair.curves(name) for name in TRAINED}, {name: pair.weights(name) for name in TRAINED}
    )


def _wrong_in_ledger(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    wrong = []
    (last,) = found["runs"].values()
    batches = STEPS + WARMUP
    if found["steps"] != batches or last["sequence_number"] != batches:
        wrong.append(f"the critic trained {found['steps']} batches, the last number {last['sequence_number']}")
    if found["history"] != expected["history"]:
        wrong.append("other batches were trained")
    return wrong


def differences(found: Reference, expected: Reference) -> list[str]:
    """In what a disturbed run differs from the undisturbed one."""
    wrong = [] if not HAS_CRITIC else _wrong_in_ledger(found.ledger, expected.ledger)
    for name, curves in expected.curves.items():
        wrong += [f"{name}: {key}" for key, points in curves.items() if found.curves[name].get(key) != points]
        weights = found.weights[name]
        wrong += [
            f"{name}: {key}" for key, tensor in expected.weights[name].items() if not torch.equal(tensor, weights[key])
        ]
    return wrong


@pytest.fixture(scope="module")
def reference(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The run that nobody disturbs."""
    pair = Pair(artefacts, tmp_path_factory.mktemp("reference"), seed=0)
    try:
        Campaign(pair, 0, {}).run([])
        assert pair.starts == {"actor": 1, "critic": 1}, pair.output()
        return outcome(pair)
    finally:
        pair.close()


def test_whoever_dies_when_nothing_is_lost(reference: Reference, artefacts: Artefacts, tmp_path: Path) -> None:
    injected: dict[str, int] = {}
    met: collections.Counter[str] = collections.Counter()
    lost: list[str] = []
    started = time.monotonic()
    for trial in range(SEED, SEED + TRIALS):
        folder = tmp_path / f"trial_{trial}"
        folder.mkdir()
        with small_disks(folder) as disks:
            pair = Pair(artefacts, folder, seed=trial)
            choice = random.Random(trial)
            possible = [kind for kind in KINDS if disks or not kind.endswith("disk")]
            possible = [kind for kind in possible if HAS_CRITIC or kind != "critic's disk"]
            if ONLY:
                kinds = ONLY
            elif TRIALS == 1:  # one of each sort
                kinds = ["connections", "critic", choice.choice(["last rank", "queue's rank"])]
            else:
                kinds = choice.choices(possible, k=choice.randrange(1, 6))
            campaign = Campaign(pair, trial, disks)
            try:
                campaign.run(kinds)
                wrong = differences(outcome(pair), reference)
                wrong += [
                    f"{name} ended {number - 1} times, with reason {campaign.harmed[name]} times at most"
                    for name, number in pair.starts.items()
                    if number > 1 + campaign.harmed[name]
                ]
            except AssertionError as error:
                wrong = [str(error)]
            finally:
                pair.close()
            if wrong:
                lost.append(f"trial {trial}, {campaign.injected}: {'; '.join(wrong[:10])}\n{pair.output()}")
        met.update(pair.proxy.counts)
        for kind in campaign.injected:
            injected[kind] = injected.get(kind, 0) + 1
        print(
            f"trial {trial}: {campaign.injected}, starts {pair.starts}: {'LOST' if wrong else 'survived'}", flush=True
        )
        if not wrong:
            shutil.rmtree(folder, ignore_errors=True)
    if not disks:
        print("SKIPPED: full disks; they need root, to mount small file systems")
    print(
        f"{TRIALS} trials in {time.monotonic() - started:.0f} s: {sum(injected.values())} faults injected {injected}, "
        f"{TRIALS - len(lost)} runs survived, {len(lost)} lost; at the proxy: {dict(met)}"
    )
    assert not lost, "\n\n".join(lost)
