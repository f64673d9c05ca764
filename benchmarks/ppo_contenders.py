"""The contenders of `ppo_step.py`, of which those of `grpo_step.py` are kinds, each in processes of its own.

These sleep while it is not their turn.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import re
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ppo_memory import logged_peaks
from ppo_models import Models, Workload

from nemo_style_aligner.engine.parallel.machine import computes_in_bf16, free_port
from nemo_style_aligner.guard.secret import TOKEN_VARIABLE
from nemo_style_aligner.trainer.models.layer_kernels import best_kernels
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

BENCHMARKS = Path(__file__).resolve().parent
SCRIPTS = BENCHMARKS.parent / "examples" / "nlp" / "gpt"
START_SECONDS = 600.0
STEP_SECONDS = 3600.0
WAIT_POLICY = "PASSIVE"  # OMP_WAIT_POLICY that our jobs choose where nothing is set
MAX_STEPS = 1000
KL_COEF, LEARNING_RATE = 0.02, 1e-6

# A step's phases by the actor's timers. Timers that are not here are shown under their own names.
TIMERS = {
    "step/rollout_time/rollout_wait": "rollout_wait",
    "step/rollout_time/refit": "refit",
    "step/rollout_time/generate": "generate",
    "step/rollout_time/logprobs": "logprobs",
    "step/rollout_time/init_logprobs": "init_logprobs",
    "step/rollout_time/critic_wait": "wait_for_scores",
    "step/train_time": "train_policy",
    "step/critic_train_wait": "wait_for_critic",
}
BESIDE = ("score", "train_critic")  # phases of ours that run in the critic job while the actor's go on


@dataclasses.dataclass(frozen=True)
class TrlSetting:
    """Settings of TRL alone.

    Attributes:
        threads: of TRL; our jobs choose theirs as they do for users.
        micro_batch: sequences per forward-backward pass.
        rollout_batch: sequences at a time in generation and scoring; None: TRL does not let users choose.
        wait_policy: OMP_WAIT_POLICY; None: unset.
        stop_id, pad_id: tokens that end and fill up responses; ``pad_id`` is in no prompt.
        environment: of its process, without the wait policy.
        python: interpreter of the environment that has TRL.
    """

    threads: int
    micro_batch: int
    rollout_batch: int | None
    wait_policy: str | None
    stop_id: int
    pad_id: int
    environment: dict[str, str]
    python: str

    def described(self) -> dict[str, Any]:
        """The settings that can be chosen, for the report."""
        names = ("threads", "micro_batch", "rollout_batch", "wait_policy")
        return {name: getattr(self, name) for name in names}

    def halved(self, rollouts: int) -> TrlSetting | None:
        """With both batches halved, for ``rollouts`` sequences a step; None if they cannot become smaller."""
        micro_batch = max((n for n in range(1, self.micro_batch // 2 + 1) if rollouts % n == 0), default=1)
        rollout_batch = None if self.rollout_batch is None else max(1, self.rollout_batch // 2)
        smaller = dataclasses.replace(self, micro_batch=micro_batch, rollout_batch=rollout_batch)
        return None if smaller == self else smaller


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the contenders are run with.

    Attributes:
        models: policy, and critic and reward model.
        dtype: "bfloat16" or "float32".
        micro_batch: sequences per forward-backward pass of ours.
        actor, critic: more config overrides of ours.
        environment: of our processes.
        kl_coef: weight of the KL penalty.
        device: "cpu" or "cuda".
        step_seconds: a contender that needs longer for a step has failed.
        trl: None where TRL takes no part.
    """

    models: Models
    dtype: str
    micro_batch: int
    actor: Sequence[str]
    critic: Sequence[str]
    environment: dict[str, str]
    kl_coef: float = KL_COEF
    device: str = "cpu"
    step_seconds: float = STEP_SECONDS
    trl: TrlSetting | None = None


class ContenderFailed(Exception):
    """A contender cannot go on; the others can.

    Attributes:
        ran_out_of_memory: smaller batches may help.
    """

    def __init__(self, reason: str, *, ran_out_of_memory: bool = False) -> None:
        super().__init__(reason)
        self.ran_out_of_memory = ran_out_of_memory


@dataclasses.dataclass(frozen=True)
class Step:
    """One measured step.

    Attributes:
        seconds: the whole of it.
        phases: seconds by phase; of ours, those in `BESIDE` overlap the others.
        prompt_tokens, new_tokens: counted by the contender.
        metrics: what else it logged.
        cpu_seconds: processor time of all its processes, which hardly depends on what else the machine does.
    """

    seconds: float
    phases: dict[str, float]
    prompt_tokens: int
    new_tokens: int
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    cpu_seconds: float = 0.0

    def check_counts(self, name: str, workload: Workload) -> None:
        """Raise unless the step had exactly the workload's tokens: a contender that does less must not look fast."""
        got, wanted = (self.prompt_tokens, self.new_tokens), (workload.prompt_tokens, workload.new_tokens)
        if got != wanted:
            raise ContenderFailed(f"{name} made {got} prompt and response tokens instead of {wanted}")


class Player:
    """A process that makes a step when it is its turn (`ppo_turns.Turns`).

    Args:
        command: what to run; the word ADDRESS becomes that of the socket where it must report.
        log: file for the process's output.
        companion: a process that this one depends on, its name and its log.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: dict[str, str],
        companion: tuple[subprocess.Popen, str, Path] | None = None,
    ) -> None:
        self.name = name
        self._log = log
        self._companion = companion
        # Not beside the log: a socket's address must be short, and that path may be long.
        self._folder = tempfile.TemporaryDirectory(prefix="turns_")
        address = f"{self._folder.name}/socket"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(address)
        self._listening.listen()
        self._process = start([address if word == "ADDRESS" else word for word in command], log, environment)
        self._connection: Connection | None = None

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until the first step may be requested.

        Raises:
            ContenderFailed: it has ended, its companion has, or the time is over.
        """
        deadline = time.monotonic() + seconds
        self._listening.settimeout(0.5)
        while True:
            try:
                accepted, _ = self._listening.accept()
                break
            except TimeoutError:
                if self._process.poll() is not None:
                    raise failure(self.name, self._process, self._log) from None
                self._check_companion()
                if time.monotonic() > deadline:
                    raise ContenderFailed(f"{self.name}: not ready within {seconds:.0f} s") from None
        self._connection = Connection(accepted.detach())
        self._receive(deadline - time.monotonic())

    def step(self, seconds: float) -> Any:
        """Give the turn, wait at most so long, and return what the process reports.

        Raises:
            ContenderFailed: it has ended, its companion has, or the time is over.
        """
        assert self._connection is not None, "not ready"
        try:
            self._connection.send(True)
        except ConnectionError:
            raise failure(self.name, self._process, self._log) from None
        return self._receive(seconds)

    def _receive(self, seconds: float) -> Any:
        assert self._connection is not None
        deadline = time.monotonic() + seconds
        try:
            while not self._connection.poll(1.0):
                self._check_companion()
                if time.monotonic() > deadline:
                    raise ContenderFailed(f"{self.name}: no answer within {seconds:.0f} s:\n{tail(self._log)}")
            return self._connection.recv()
        except (EOFError, ConnectionError):
            raise failure(self.name, self._process, self._log) from None

    def _check_companion(self) -> None:
        if self._companion is not None and self._companion[0].poll() is not None:
            process, name, log = self._companion
            raise failure(name, process, log)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def stop(self) -> None:
        """End the process."""
        stop(self._process)
        self._listening.close()
        self._folder.cleanup()


class OwnJobs:
    """The critic job and the actor job, started by the scripts that users start.

    Attributes:
        name: in the report.
        has_critic: otherwise there is only the actor job.
        takes_all: each step has all of the workload's responses; else some are other steps'.
        options: overrides of the actor job that make it this contender.
    """

    name = "ours"
    has_critic = True
    takes_all = True
    options: tuple[str, ...] = ("trainer.ppo.kl_estimator=k1",)

    def __init__(self, workload: Workload, setting: Setting, folder: Path) -> None:
        self._workload, self._setting, self._folder = workload, setting, folder
        self._port = free_port()
        self._steps = 0
        self._critic_before: dict[str, float] = {}
        prompts, lengths = folder / "prompts.jsonl", folder / "lengths.json"
        prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in workload.texts))
        lengths.write_text(json.dumps(list(zip(workload.prompts, workload.lengths, strict=True))))
        critic = None
        if self.has_critic:
            command = [sys.executable, str(SCRIPTS / "serve_ppo_critic.py"), *self.critic_overrides()]
            critic = start(command, folder / "critic.log", setting.environment)
        self._critic = critic
        command = [sys.executable, str(BENCHMARKS / "ppo_actor.py"), "ADDRESS", str(lengths)]
        self._actor = Player(
            "actor",
            [*command, *self.actor_overrides(prompts)],
            folder / "actor.log",
            setting.environment,
            None if critic is None else (critic, "critic", folder / "critic.log"),
        )

    def _common(self) -> list[str]:
        rate = f"model.optim.lr={LEARNING_RATE}", f"model.optim.sched.min_lr={LEARNING_RATE}"
        room = max(map(len, self._workload.prompts)) + max(self._workload.lengths)  # or jobs would drop prompts
        return [
            *("trainer.precision=" + ("bf16" if self._setting.dtype == "bfloat16" else "32"),),
            *(f"model.encoder_seq_length={room}", *rate),
            *("model.optim.sched.warmup_steps=0", "model.optim.sched.constant_steps=0"),
            f"model.global_batch_size={len(self._workload.prompts)}",
            f"model.micro_batch_size={self._setting.micro_batch}",
            "exp_manager.watchdog_minutes=null",  # a job that waits for its turn makes no progress
        ]

    def critic_overrides(self) -> list[str]:
        """The critic's command line."""
        return [
            f"pretrained_checkpoint.restore_from_path={self._setting.models.reward_model_nemo}",
            f"trainer.ppo.port={self._port}",
            f"exp_manager.explicit_log_dir={self._folder / 'critic'}",
            f"trainer.ppo.max_steps={MAX_STEPS}",
            *self._common(),
            *self._setting.critic,
        ]

    def actor_overrides(self, prompts: Path) -> list[str]:
        """The actor's command line."""
        count, group = len(self._workload.prompts), self._workload.group
        return [
            f"pretrained_checkpoint.restore_from_path={self._setting.models.policy_nemo}",
            f"model.data.data_prefix={{train: [{prompts}]}}",
            f"remote_critic_rm.critic.port={self._port}",
            f"exp_manager.explicit_log_dir={self._folder / 'actor'}",
            *(f"trainer.ppo.max_epochs={MAX_STEPS}", f"trainer.ppo.max_steps={MAX_STEPS}"),
            *("trainer.ppo.val_check_interval=0", "trainer.ppo.save_interval=0"),
            *(f"model.ppo.num_rollout_samples={count // group}", f"trainer.ppo.num_rollouts_per_prompt={group}"),
            f"trainer.ppo.generation.num_slots={count}",
            f"model.ppo.rollout_micro_batch_size={self._setting.micro_batch}",
            f"model.ppo.length_params.max_length={max(self._workload.lengths)}",
            # Responses of forced length look truncated, but must give a policy gradient all the same.
            *("model.ppo.sampling_params.end_strings=[]", "trainer.ppo.mask_truncated=False"),
            f"trainer.ppo.initial_policy_kl_penalty={self._setting.kl_coef}",
            *self._common(),
            *self.options,
            *self._setting.actor,
        ]

    def wait_until_ready(self) -> None:
        """Wait until the first step may be requested."""
        self._actor.wait_until_ready(START_SECONDS)
        self._critic_before = self._critic_seconds()

    def step(self) -> Step:
        """One step."""
        self._actor.step(self._setting.step_seconds)
        self._steps += 1
        curves = read_metrics(self._folder / "actor")

        def values(prefix: str, step: int) -> dict[str, float]:
            found = {name.removeprefix(prefix): dict(points) for name, points in curves.items()}
            return {name: points[step] for name, points in found.items() if prefix + name in curves and step in points}

        timers, rollouts = values("timers/", self._steps), values("train_rollouts/", self._steps)
        phases = {phase: timers[timer] for timer, phase in TIMERS.items() if timer in timers}
        known = [timer for timer in timers if timer in TIMERS]
        for timer in timers.keys() - TIMERS.keys():  # those that a later version may add
            is_part = any(timer.startswith(f"{other}/") for other in known)
            has_parts = any(other.startswith(f"{timer}/") for other in timers)
            if timer.startswith("step/") and not is_part and not has_parts:
                phases[timer.removeprefix("step/")] = timers[timer]
        phases["rest"] = timers["step"] - sum(phases.values())
        critic, before = self._critic_seconds(), self._critic_before
        if self.has_critic:
            for command, phase in (("infer", "score"), ("train", "train_critic")):
                phases[phase] = critic.get(command, 0.0) - before.get(command, 0.0)
        self._critic_before = critic
        count = rollouts["rollout_size"]
        return Step(
            timers["step"],
            phases,
            round(count * rollouts["prompt_lengths"]),
            round(count * rollouts["generation_length"]),
            rollouts | values("train_optim/", self._steps - 1),
        )

    def _critic_seconds(self) -> dict[str, float]:
        """Seconds that the critic job, if there is one, has computed so far, by command, from its /metrics."""
        if not self.has_critic:
            return {}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/metrics",
            headers={"Authorization": f"Bearer {self._setting.environment[TOKEN_VARIABLE]}"},
        )
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy leads to this machine
        with direct.open(request, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        start = 'aligner_server_command_seconds_sum{command="'
        pairs = (line.removeprefix(start).split('"} ') for line in lines if line.startswith(start))
        return {command: float(seconds) for command, seconds in pairs}

    def roots(self) -> dict[str, int]:
        """Process ids by name."""
        return {"actor": self._actor.pid} | ({} if self._critic is None else {"critic": self._critic.pid})

    def device_peaks(self) -> dict[str, int]:
        """The most of the GPU's memory that was allocated so far, by process."""
        return logged_peaks({name: self._folder / name for name in self.roots()})

    def facts(self) -> dict[str, Any]:
        """What the jobs compute with, by their logs."""
        logs = {name: (self._folder / f"{name}.log").read_text(errors="replace") for name in self.roots()}

        def said(name: str, pattern: str) -> str | None:
            found = re.findall(pattern, logs[name])
            return found[-1] if found else None

        # Jobs warn if they do without; without a warning they have the best that this processor can run.
        refused = said("actor", "training passes run without compiled layer kernels: (.*)")
        kernels = best_kernels() if self._setting.device == "cpu" else None
        return {
            "threads": {name: said(name, r"(\d+) threads? each") for name in logs},
            "generation_step": said("actor", "embedded engine: (.*)"),
            "layer_kernels": f"torch's: {refused}" if refused else kernels.kernel if kernels else "torch's",
            "wait_policy": self._setting.environment.get("OMP_WAIT_POLICY", WAIT_POLICY),
        }

    def stop(self) -> None:
        """End the jobs."""
        self._actor.stop()
        if self._critic is not None:
            stop(self._critic)


class EngineLogprobs(OwnJobs):
    """Ours with the engine's log-probs in place of a pass of the policy, as in TRL."""

    name = "ours_engine_logprobs"
    options = (*OwnJobs.options, "trainer.ppo.policy_logprobs=engine")


def own_steps(
    workload: Workload,
    models: Models,
    folder: Path,
    *,
    actor: Sequence[str],
    micro_batch: int,
    warm_up: int,
    rounds: int,
    kind: type[OwnJobs] = OwnJobs,
    critic: Sequence[str] = (),
    threads: int | None = None,
) -> list[Step]:
    """Steps of our jobs alone, made one after the other in the machine's better dtype; without warm-up steps.

    Args:
        threads: of each rank; None: as many as jobs choose by themselves.
    """
    setting = Setting(
        models=models,
        dtype="bfloat16" if computes_in_bf16() else "float32",
        micro_batch=micro_batch,
        actor=actor,
        critic=critic,
        environment={**os.environ, "CUDA_VISIBLE_DEVICES": "", TOKEN_VARIABLE: secrets.token_hex(16)}
        | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
    )
    jobs = kind(workload, setting, folder)
    try:
        jobs.wait_until_ready()
        steps = [jobs.step() for _ in range(warm_up + rounds)][warm_up:]
        for step in steps if kind.takes_all else ():
            step.check_counts(jobs.name, workload)
    except ContenderFailed as error:
        raise SystemExit(str(error)) from None
    finally:
        jobs.stop()
    return steps


def typical_phases(steps: Sequence[Step]) -> dict[str, float]:
    """Seconds of each phase in the step nearest to the median."""
    median = statistics.median(step.seconds for step in steps)
    return min(steps, key=lambda step: abs(step.seconds - median)).phases


class Trl:
    """TRL's PPO trainer, policy and critic in one process.

    Attributes:
        name: in the report.
        script: what it runs.
        version, install: of trl that the script is written for, and how to get it.
    """

    name = "trl"
    script = "ppo_trl.py"
    version = "1.12.0"
    install = "pip install -e '.[bench-trl]'"

    def __init__(self, workload: Workload, setting: Setting, folder: Path) -> None:
        trl = setting.trl
        assert trl is not None, "TRL takes no part"
        settings = {
            "policy": str(setting.models.policy),
            "reward_model": str(setting.models.reward_model),
            "texts": workload.texts,
            "group": workload.group,
            "output": str(folder / "trl"),
            "dtype": setting.dtype,
            "device": setting.device,
            "threads": trl.threads,
            "micro_batch": trl.micro_batch,
            "rollout_batch": trl.rollout_batch,
            "stop_id": trl.stop_id,
            "pad_id": trl.pad_id,
            "kl_coef": setting.kl_coef,
            "lr": LEARNING_RATE,
            "max_steps": MAX_STEPS,
            "prompts": list(zip(workload.prompts, workload.lengths, strict=True)),
        }
        file = folder / "trl.json"
        file.write_text(json.dumps(settings))
        command = [trl.python, str(BENCHMARKS / self.script), "ADDRESS", str(file)]
        policy = {"OMP_WAIT_POLICY": trl.wait_policy} if trl.wait_policy else {}
        self._setting, self._device_peak = setting, 0
        self._process = Player("TRL", command, folder / "trl.log", trl.environment | policy)

    def wait_until_ready(self) -> None:
        """Wait until the first step may be requested."""
        self._process.wait_until_ready(START_SECONDS)

    def step(self) -> Step:
        """One step."""
        answer = self._process.step(self._setting.step_seconds)
        self._device_peak = max(self._device_peak, answer["device_peak_bytes"])
        phases = dict(answer["phases"])
        seconds = phases.pop("step")
        phases["rest"] = seconds - sum(phases.values())
        return Step(seconds, phases, answer["prompt_tokens"], answer["new_tokens"])

    def roots(self) -> dict[str, int]:
        """Process id by name."""
        return {"trl": self._process.pid}

    def device_peaks(self) -> dict[str, int]:
        """The most of the GPU's memory that was allocated so far."""
        return {"trl": self._device_peak, "together": self._device_peak}

    def facts(self) -> dict[str, Any]:
        """What it is run with."""
        assert self._setting.trl is not None
        return self._setting.trl.described()

    def stop(self) -> None:
        """End the process."""
        self._process.stop()


def trl_obstacle(kind: type[Trl], python: str) -> str | None:
    """Why TRL cannot take part, and what would help; None if it can."""
    script = "import importlib.metadata; print(importlib.metadata.version('trl'))"
    try:
        asked = subprocess.run([python, "-c", script], capture_output=True, text=True)
    except OSError as error:
        return f"{python} cannot be started: {error}"
    help_ = f"{kind.install} (or name another environment with --trl-python)"
    if asked.returncode:
        return f"{python} has no trl: {help_}"
    version = asked.stdout.strip()
    return None if version == kind.version else f"{python} has trl {version}, not {kind.version}: {help_}"


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """Another process that wants a core all the time, for the body of the ``with`` statement."""
    process = start([sys.executable, "-c", "while True: pass"], Path(os.devnull), dict(os.environ))
    try:
        yield
    finally:
        stop(process)


# ---- processes ----------------------------------------------------------------------------------


_started: list[subprocess.Popen] = []  # not stopped so far


def start(words: Sequence[str], log: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Start a process in a session of its own, with its output in ``log``."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        _started.append(process)
    return process


def stop(process: subprocess.Popen) -> None:
    """End the process and its children. Nothing is worth saving."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process in _started:
        _started.remove(process)


@atexit.register
def _stop_all() -> None:
    """End what a signal left running that came before its owner knew of it."""
    for process in [*_started]:
        stop(process)


def failure(name: str, process: subprocess.Popen, log: Path) -> ContenderFailed:
    """How a process ended, with the end of its output."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    status, said = process.returncode, tail(log)
    was_killed = status == -signal.SIGKILL
    what = f"ended with status {status}"
    if was_killed:
        what = "was killed, as the system does where memory runs out (smaller batches need less)"
    lacks_memory = was_killed or any(words in said for words in ("out of memory", "allocate memory", "MemoryError"))
    return ContenderFailed(f"{name} {what}; the end of its output:\n{said}", ran_out_of_memory=lacks_memory)


def tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-25:])
