"""The scenarios of test_checkpoints.py, run as a script: ``python multirank_checkpoints.py <folder>``.

It imports torch and megatron-core once and forks the ranks of every scenario, which saves most of the time that
starting them by torchrun takes. A rank can be killed for real. Results go to ``<folder>/results.json``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import gc
import hashlib
import json
import logging
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import RanksFailedError, fork_ranks

from nemo_style_aligner import activity
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import initialize_model_parallel
from nemo_style_aligner.engine.text.text_format import TextFormat
from nemo_style_aligner.errors import NonFiniteError, NotWrittenError
from nemo_style_aligner.guard.file_source import open_source
from nemo_style_aligner.trainer.checkpoints import background, contents, training
from nemo_style_aligner.trainer.checkpoints.nemo_archive import load_nemo_weights, save_nemo
from nemo_style_aligner.trainer.checkpoints.optimizer_state import optimizer_counters
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import MODEL_PREFIX, Part, _parts, stored_shapes
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager, NemoExport
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.schema import Updates
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.nonfinite import SkipCounter
from nemo_style_aligner.trainer.models.offload import AdamOffload
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, forward, train_step

VOCAB = 61
TIED = ModelArchitecture(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=VOCAB,
    tied_embeddings=True,
)
UNTIED = dataclasses.replace(TIED, tied_embeddings=False, qkv_bias=True, qk_layernorm=True)
TOKENS = torch.randint(0, VOCAB, (8, 9), generator=torch.Generator().manual_seed(5))
EVERYWHERE = torch.ones(8, 8, dtype=torch.bool)
IS_LONG = bool(os.environ.get("TEST_LONG"))


def unless_short(**jobs: Job) -> dict[str, Job]:
    """Jobs that are left out where tests must not take long; underscores are blanks."""
    return {name.replace("_", " "): job for name, job in jobs.items()} if IS_LONG else {}


@dataclasses.dataclass(frozen=True)
class Job:
    """A way to run a model: layout, precision, optimizer."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    dtype: torch.dtype = torch.float32
    distributed: bool = True
    sgd: bool = False
    reward: bool = False
    architecture: ModelArchitecture = UNTIED
    dropout: float = 0.0
    seed: int = 1
    divisor: int = 4

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def build(self) -> tuple[MegatronModel, Optimizer]:
        initialize_model_parallel(self.tp, self.pp, self.seed)
        name = "sgd" if self.sgd else "distributed_fused_adam" if self.distributed else "fused_adam"
        optim = {"name": name, "weight_decay": 0.1}
        config = {
            "optim": optim,
            "sequence_parallel": self.tp > 1,
            "hidden_dropout": self.dropout,
            "make_vocab_size_divisible_by": self.divisor,
        }
        head = RewardHeadConfig() if self.reward else None
        model = build_model(self.architecture, config, self.dtype, head=head)
        return model, Optimizer(model, schema.Optimizer(**optim), Schedule(lr=1e-3, warmup_steps=1, max_steps=8), 1.0)

    def run(self, action: Callable[..., Any], *args: Any, expect_death: bool = False) -> Any:
        """Fork the ranks, run ``action(model, optimizer, *args)`` on each; rank 0's result.

        None where ``expect_death``: a signal must have ended rank 0.
        """
        try:
            result = fork_ranks(self.world_size, lambda: action(*self.build(), *args), seconds=90.0)
        except RanksFailedError as error:
            if expect_death and (error.exit_codes[0] or 0) < 0:
                return None
            raise
        assert not expect_death, f"expected a killed rank, got {result}"
        return result


# ---- what ranks do --------------------------------------------------------------------------


def logprobs(model: MegatronModel) -> list[list[float]]:
    return forward(model, Tokens(TOKENS), EVERYWHERE, MicroBatching(4), lambda out, _: out, (8,), Scoring()).tolist()


def rewards(model: MegatronModel) -> list[list[float]]:
    return forward(model, Tokens(TOKENS), EVERYWHERE, MicroBatching(4), lambda out, _: out[..., 0], (8,)).tolist()


def train(model: MegatronModel, optimizer: Optimizer, steps: int) -> list[float]:
    """Train on batches that depend on the step and, for random streams to matter, on this process's generators."""
    losses = []
    for _ in range(steps):
        noise = random.random() + np.random.rand() + float(torch.rand(()))

        def loss(output: torch.Tensor, batch: Tokens, noise: float = noise) -> tuple[Any, Any, dict[str, Any]]:
            if model.has_reward_head:
                per_token = (output[..., 0] - 1.0) ** 2
            else:
                per_token = -output
            return per_token.sum() * (1 + noise), torch.tensor(per_token.numel()), {}

        optimizer.zero_grad()
        batch = Tokens((TOKENS + optimizer.step_count) % VOCAB)
        scoring = None if model.has_reward_head else Scoring()
        losses.append(train_step(model, batch, EVERYWHERE, MicroBatching(2), loss, scoring=scoring)["loss"])
        optimizer.step(losses[-1], "a batch")
    return losses


def fingerprint(model: MegatronModel, optimizer: Optimizer) -> str:
    """A hash over every rank's weights, main weights, moments, steps and random streams, bit by bit."""
    digest = hashlib.sha256()
    tensors = [p.detach() for _, p in model.named_parameters()]
    inner = optimizer.megatron.chained_optimizers[0].optimizer
    for group in (group for group in inner.param_groups if group["params"]):  # a rank may have none of a group's
        digest.update(f"{group.get('step', 0)} {group['weight_decay']}".encode())
        for p in group["params"]:
            # SGD has no state.
            tensors += [p.detach(), *(inner.state[p][name] for name in ("exp_avg", "exp_avg_sq") if inner.state[p])]
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(f"{optimizer.step_count} {random.random()} {np.random.rand()} {float(torch.rand(()))}".encode())
    hashes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, digest.hexdigest())
    return " ".join(hashes)


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def manager(directory: Path, **settings: Any) -> CheckpointManager:
    return CheckpointManager(directory, CheckpointSettings(**settings))


def save(m: CheckpointManager, model: MegatronModel, optimizer: Optimizer | None, step: int, **metrics: float) -> None:
    start_save(m, model, optimizer, step, **metrics)
    m.finish()


def start_save(
    m: CheckpointManager, model: MegatronModel, optimizer: Any, step: int, **more: Any
) -> concurrent.futures.Future[None]:
    options = {name: more.pop(name) for name in ("on_end", "before_publishing") if name in more}
    return m.save(model, optimizer, {"step": step, "sampler": {"epoch": 1, "position": 7}}, more, **options)


# ---- scenarios ------------------------------------------------------------------------------


def archives(folder: Path) -> dict[str, Any]:
    """A language model through archives at other layouts, as a tar and unpacked."""
    results: dict[str, Any] = {}
    for name, architecture in (("tied", TIED), *([("untied", UNTIED)] if IS_LONG else [])):
        first, second = folder / f"{name}.nemo", folder / f"{name}_second.nemo"

        def write(model: MegatronModel, _: Optimizer, path: Path) -> Any:
            save_nemo(path, model, model.architecture.to_nemo_config(), None)
            return logprobs(model)

        def read(model: MegatronModel, _: Optimizer, path: Path) -> Any:
            load_nemo_weights(path, model)
            return logprobs(model)

        def read_and_write(model: MegatronModel, optimizer: Optimizer, source: Path, target: Path) -> Any:
            load_nemo_weights(source, model)
            return write(model, optimizer, target)

        job = Job(architecture=architecture)
        results[f"{name} written"] = job.run(write, first)
        other = dataclasses.replace(job, seed=9, divisor=16)
        results[f"{name} tp2 pp2"] = dataclasses.replace(other, tp=2, pp=2).run(read_and_write, first, second)
        shutil.unpack_archive(second, folder / name, "tar", filter="data")
        results[f"{name} from directory"] = other.run(read, folder / name)
        half = dataclasses.replace(other, pp=2, dtype=torch.bfloat16)
        results[f"{name} pp2 bf16"] = half.run(read, first)
    return results


def reward_model(folder: Path) -> dict[str, Any]:
    """A reward model from a language model's archive; a language model from a reward model's."""
    sft, rm = folder / "sft.nemo", folder / "rm.nemo"

    def write(model: MegatronModel, _: Optimizer, path: Path) -> None:
        save_nemo(path, model, model.architecture.to_nemo_config(), None)

    def from_sft(model: MegatronModel, _: Optimizer) -> dict[str, Any]:
        parameters = dict(model.named_parameters())
        before = {name: p.detach().clone() for name, p in parameters.items()}
        load_nemo_weights(sft, model)
        save_nemo(rm, model, model.architecture.to_nemo_config(), None)
        unchanged = [name for name, p in parameters.items() if "rm_head" in name and torch.equal(p, before[name])]
        changed = not torch.equal(
            parameters["embedding.word_embeddings.weight"], before["embedding.word_embeddings.weight"]
        )
        return {"head kept": unchanged, "body loaded": changed, "rewards": rewards(model)}

    def read(model: MegatronModel, _: Optimizer, path: Path) -> Any:
        load_nemo_weights(path, model)
        return rewards(model) if model.has_reward_head else None

    def fails(model: MegatronModel, _: Optimizer, path: Path) -> str:
        try:
            load_nemo_weights(path, model)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    Job(seed=3).run(write, sft)
    head = Job(reward=True)
    return {
        **head.run(from_sft),
        "tp2 pp2": dataclasses.replace(head, tp=2, pp=2, seed=4).run(read, rm),
        "language model from reward model": Job(tp=2).run(fails, rm),
        "other width": Job(architecture=dataclasses.replace(UNTIED, ffn_hidden_size=64)).run(fails, sft),
        "more tokens": Job(architecture=dataclasses.replace(UNTIED, vocab_size=VOCAB + 40)).run(fails, sft),
    }


def exact_resume(folder: Path) -> dict[str, Any]:
    """Five steps with a save after the third against a new process that takes up from there; bit by bit."""
    jobs = {
        "fp32 distributed dp2": Job(dp=2, dropout=0.1),
        "bf16 distributed tp2": Job(tp=2, dtype=torch.bfloat16, dropout=0.1),
        "bf16 distributed reward dp2": Job(dp=2, dtype=torch.bfloat16, reward=True),
        **unless_short(
            bf16_distributed_pp2_tied=Job(pp=2, dtype=torch.bfloat16, architecture=TIED),
            fp32_plain=Job(distributed=False, dropout=0.1),
            bf16_sgd_dp2=Job(dp=2, dtype=torch.bfloat16, distributed=False, sgd=True),
            bf16_plain_reward=Job(distributed=False, dtype=torch.bfloat16, reward=True),
        ),
    }

    def straight(model: MegatronModel, optimizer: Optimizer, directory: Path | None) -> Any:
        losses = train(model, optimizer, 3)
        if directory is not None:
            save(manager(directory), model, optimizer, 3)
        return losses + train(model, optimizer, 2), fingerprint(model, optimizer)

    def resumed(model: MegatronModel, optimizer: Optimizer, directory: Path) -> Any:
        state = manager(directory).resume(model, optimizer)
        return train(model, optimizer, 2), fingerprint(model, optimizer), state

    results: dict[str, Any] = {}
    for name, job in jobs.items():
        directory = folder / name.replace(" ", "_")
        losses, whole = job.run(straight, directory)
        # Another seed: nothing may depend on what the new process starts with.
        last_losses, again, state = dataclasses.replace(job, seed=77).run(resumed, directory)
        results[name] = {"straight": [losses[3:], whole], "resumed": [last_losses, again], "state": state}
    # Saving itself changes nothing.
    results["without a save"] = next(iter(jobs.values())).run(straight, None)[1]
    return results


def shared_out(folder: Path) -> dict[str, Any]:
    """What each data-parallel rank writes; checkpoints of which the first rank wrote everything."""

    def of_megatron_core(optimizer: Optimizer, model: MegatronModel) -> list[Part]:
        (inner,) = optimizer.megatron.chained_optimizers
        form = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": True,
        }
        weights = model.gpt.sharded_state_dict(prefix=MODEL_PREFIX)
        state = inner.sharded_state_dict(weights, False, metadata=form)["param_state"] or {}
        return [part for entry in state.values() for t in entry.values() for part in _parts(t) if part.is_main]

    def run(model: MegatronModel, optimizer: Optimizer) -> dict[str, Any]:
        train(model, optimizer, 2)
        parts = contents.take(model, optimizer, {}, 2).tensors
        own = [sum(part.num_bytes for part in parts if part.key.startswith(prefix)) for prefix in ("optimizer.", "")]
        written: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(written, own)
        stored = {}
        for name in ("ours", "megatron-core's"):
            save(manager(folder / name), model, optimizer, 2)
            stored[name] = fingerprint(model, optimizer)
            contents.optimizer_parts = of_megatron_core
        loaded = {}
        for name in stored:
            train(model, optimizer, 1)
            manager(folder / name).resume(model, optimizer)
            loaded[name] = fingerprint(model, optimizer)
        with open_source(next((folder / "ours").iterdir())) as a, open_source(next((folder / name).iterdir())) as b:
            same_keys = stored_shapes(a, "state") == stored_shapes(b, "state")
        return {"written": written, "same": loaded == stored and same_keys}

    jobs = {
        "dp2": Job(dp=2, dtype=torch.bfloat16, reward=True),
        "pp2 dp2 tied": Job(pp=2, dp=2, architecture=TIED, dtype=torch.bfloat16),
        **unless_short(tp2_dp2=Job(tp=2, dp=2, divisor=16)),
    }
    return {name: job.run(run) for name, job in jobs.items()}


def layout_change(folder: Path) -> dict[str, Any]:
    """Training at TP2 x PP2 that goes on at DP2, plain and bf16 forms included, against one layout throughout."""
    base = folder / "base.nemo"

    def start(model: MegatronModel, _: Optimizer) -> None:
        save_nemo(base, model, {}, None)

    def straight(model: MegatronModel, optimizer: Optimizer) -> Any:
        load_nemo_weights(base, model)
        optimizer.megatron.reload_model_params()
        seed_everything(0)
        return train(model, optimizer, 3)

    def first_part(model: MegatronModel, optimizer: Optimizer, directory: Path) -> Any:
        losses = straight(model, optimizer)
        save(manager(directory), model, optimizer, 3)
        return losses

    def second_part(model: MegatronModel, optimizer: Optimizer, source: Path, target: Path | None = None) -> Any:
        manager(source).resume(model, optimizer)
        if target is not None:
            save(manager(target), model, optimizer, 3)
        seed_everything(1)
        return train(model, optimizer, 2)

    def of_rank_1(model: MegatronModel, optimizer: Optimizer, source: Path) -> float:
        """The largest difference of the ranks' weights after resuming."""
        manager(source).resume(model, optimizer)
        difference = 0.0
        for _, parameter in model.named_parameters():
            others = parameter.detach().clone()
            dist.broadcast(others, 1)
            difference = max(difference, (parameter.detach() - others).abs().max().item())
        return difference

    Job().run(start)
    wide, flat = Job(tp=2, pp=2), Job(dp=2, divisor=16)
    in_bf16, in_fp32 = Job(dp=2, dtype=torch.bfloat16), Job(dp=2)
    in_bf16.run(first_part, folder / "bf16")
    original, moved, again = folder / "original", folder / "moved", folder / "again"
    results = {
        "first": wide.run(first_part, original),
        "same layout": wide.run(second_part, original),
        "dp2": flat.run(second_part, original, moved),
        "and back": wide.run(second_part, moved, again),
        "difference in fp32": in_fp32.run(of_rank_1, folder / "bf16"),
    }
    others = unless_short(
        plain=dataclasses.replace(flat, dp=1, distributed=False), tp2=dataclasses.replace(flat, dp=1, tp=2)
    )
    return results | {name: job.run(second_part, again) for name, job in others.items()}


def killed(folder: Path) -> dict[str, Any]:
    """SIGKILL at every instant at which a save forces something to disk or renames it."""
    job = Job()
    before = folder / "before"

    def prepare(model: MegatronModel, optimizer: Optimizer) -> str:
        train(model, optimizer, 1)
        save(manager(before), model, optimizer, 1)
        return fingerprint(model, optimizer)

    def save_and_die(model: MegatronModel, optimizer: Optimizer, directory: Path, instant: int) -> Any:
        count = 0

        def dying(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == instant:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        m = manager(directory)
        m.resume(model, optimizer)
        train(model, optimizer, 1)
        os.fsync, os.replace, os.rename = dying(os.fsync), dying(os.replace), dying(os.rename)
        start_save(m, model, optimizer, 2)
        saved = fingerprint(model, optimizer)
        train(model, optimizer, 1)  # while it is written
        m.finish()
        return count, saved

    def look(model: MegatronModel, optimizer: Optimizer, directories: list[Path]) -> Any:
        outcomes = []
        for directory in directories:
            left = sorted(p.name for p in directory.iterdir())
            state = manager(directory).resume(model, optimizer)
            names = sorted(p.name for p in directory.iterdir())
            outcomes.append((state and state["step"], fingerprint(model, optimizer), left, names))
        return outcomes

    first = job.run(prepare)
    instants, second = job.run(save_and_die, shutil.copytree(before, folder / "undisturbed"), 0)
    # Every fifth one, for time's sake, and all of the last, where names change.
    chosen = [n for n in range(1, instants + 1) if n % 5 == 1 or n > instants - 5 or IS_LONG]
    directories = [shutil.copytree(before, folder / f"instant_{n}") for n in chosen]
    for instant, directory in zip(chosen, directories, strict=True):
        job.run(save_and_die, directory, instant, expect_death=True)
    return {"first": first, "second": second, "outcomes": job.run(look, directories)}


def behind(folder: Path) -> dict[str, Any]:
    """Checkpoints written while training goes on; rank 0's writer is held up where a test wants to look."""

    def names(directory: Path) -> list[str]:
        dist.barrier()
        return sorted(os.listdir(directory))

    def run(model: MegatronModel, optimizer: Optimizer) -> dict[str, Any]:
        results: dict[str, Any] = {}
        directory, ended = folder / "checkpoints", []
        m = manager(directory)
        gate = threading.Event()
        save(m, model, optimizer, 1)
        train(model, optimizer, 1)
        save(manager(folder / "blocking", async_save=False), model, optimizer, 2)
        export = NemoExport(model.architecture.to_nemo_config(), None)
        m = CheckpointManager(directory, CheckpointSettings(always_save_nemo=True), export)
        packing, write_nemo = threading.Event(), training.write_nemo
        training.write_nemo = lambda *args, **kwargs: (packing.wait(), write_nemo(*args, **kwargs))
        whole = start_save(m, model, optimizer, 2, before_publishing=gate.wait, on_end=ended.append)
        train(model, optimizer, 2)
        m.poll()
        written = {"meanwhile": names(directory), "noticed before the end": len(ended)}
        dist.barrier()
        gate.set()
        whole.result()
        written["whole before the archive"] = names(directory)
        packing.set()
        while not ended:
            m.poll()
        written |= {"noticed": len(ended), "afterwards": names(directory)}
        written["trained on"] = fingerprint(model, optimizer)
        for name, source in (("expected", folder / "blocking"), ("resumed", directory)):
            manager(source).resume(model, optimizer)
            written[name] = fingerprint(model, optimizer)
        saved = logprobs(model)
        train(model, optimizer, 1)
        load_nemo_weights(directory / "megatron_gpt.nemo", model)
        written["archive is of then"] = logprobs(model) == saved
        optimizer.megatron.reload_model_params()
        (directory / "megatron_gpt.nemo").unlink(missing_ok=True)
        results["written"] = written

        order: list[int] = []
        polled: list[float] = []

        def may_publish(_: float) -> bool:
            polled.append(activity.current().progress)
            time.sleep(0.1)
            return len(polled) == 3

        m = manager(directory, save_last_n=2)
        start_save(m, model, optimizer, 2, before_publishing=may_publish, on_end=lambda _: order.append(2))
        start_save(m, model, optimizer, 3, on_end=lambda _: order.append(3))
        m.finish()
        shutil.rmtree(directory / "megatron_gpt-step=2", ignore_errors=True)
        dist.barrier()
        results["two"] = {"order": order, "names": [n.replace("-v1", "") for n in names(directory)]}
        results["each poll is progress"] = len(polled) == 3 and polled == sorted(set(polled))

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
        start_save(m, model, optimizer, 4)
        error = "none"
        try:
            while True:  # until it is noticed
                train(model, optimizer, 1)
                m.poll()
        except OSError as problem:
            error = str(problem)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        errors: list[Any] = [None] * 2
        dist.all_gather_object(errors, error)
        results["failed"] = (errors, [n.replace("-v1", "") for n in names(directory)])

        failure = "none"
        try:
            with m.last_chance():
                start_save(m, model, optimizer, 5, before_publishing=lambda _: not time.sleep(0.2))
                failure = str(1 // 0)
        except ZeroDivisionError as problem:
            failure = type(problem).__name__
        results["last chance"] = [failure, names(directory)[-1]]

        def fail(*_: Any, **__: Any) -> None:
            packing.wait()
            raise OSError("no room")

        class Records(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                logged.append(record.getMessage())

        logging.disable(logging.NOTSET)
        logged: list[str] = []
        background.logger.addHandler(Records())
        training.write_nemo, background._LAST_CHANCE_SECONDS = fail, 0.2
        m = CheckpointManager(folder / "no archive", CheckpointSettings(always_save_nemo=True), export)
        for is_slow in (True, False):
            packing.clear() if is_slow else packing.set()
            with contextlib.suppress(ZeroDivisionError), m.last_chance():
                start_save(m, model, optimizer, 6).result()
                1 // 0  # noqa: B018
            packing.set()
        start_save(m, model, optimizer, 7).result()
        try:
            m.finish()
        except OSError as problem:
            logged.append(str(problem))
        results["no archive"] = [*logged, names(m.directory)[-1]]
        logging.disable(logging.WARNING)

        blocking = {"async_save=False": manager(folder / "no wish", async_save=False)}
        training.available_memory = lambda: 100
        blocking["no memory"] = manager(folder / "no memory")
        results["blocking"] = {}
        for case, m in blocking.items():
            ended.clear()
            assert start_save(m, model, optimizer, 6, on_end=ended.append).done()
            results["blocking"][case] = [ended[0].background, names(m.directory) == ["megatron_gpt-step=6-last"]]
        return results

    return Job(dp=2).run(run)


def damaged(folder: Path) -> dict[str, Any]:
    """Files of the newest checkpoint cut short, changed in one bit, or gone."""
    whole, newest = folder / "whole", "megatron_gpt-step=2-last"

    def damage(path: Path, kind: str) -> None:
        content = bytearray(path.read_bytes())
        if kind == "gone":
            path.unlink()
        elif kind == "truncated":
            path.write_bytes(content[:-1])
        else:
            content[len(content) // 2] ^= 4
            path.write_bytes(content)

    def run(model: MegatronModel, optimizer: Optimizer) -> Any:
        m = manager(whole)
        for step in (1, 2):
            train(model, optimizer, 1)
            save(m, model, optimizer, step)
        outcomes = {}
        files = sorted(p for p in (whole / newest).rglob("*") if p.is_file())
        kinds = ("gone", "truncated", "flipped")
        for number, name in enumerate(p.relative_to(whole / newest) for p in files):
            chosen = kinds if name.name == "__0_0.distcp" else kinds[number % 3 :][:1]
            for kind in chosen if (whole / newest / name).stat().st_size else ("gone",):
                directory = folder / f"{name.name}_{kind}"
                if dist.get_rank() == 0:
                    shutil.copytree(whole, directory)
                    damage(directory / newest / name, kind)
                dist.barrier()
                m = manager(directory)
                try:
                    by_name = f"loaded {m.load(directory / newest, model, optimizer)}"
                except ValueError as error:
                    by_name = f"{type(error).__name__}: {error}"
                state = m.resume(model, optimizer)
                outcomes[f"{name} {kind}"] = (by_name, state and state["step"], sorted(os.listdir(directory)))
        save(m, model, optimizer, 3)
        return outcomes, sorted(os.listdir(directory))

    outcomes, names = Job(dp=2).run(run)
    return {"outcomes": outcomes, "after another save": names}


def full_disk(folder: Path) -> dict[str, Any]:
    """No room, found out before and while writing."""

    def try_to_save(model: MegatronModel, optimizer: Optimizer) -> Any:
        directory = folder / "full"
        m = manager(directory)
        save(m, model, optimizer, 1)
        errors = []
        usage = shutil.disk_usage
        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(100, 99, 1)
        try:
            save(m, model, optimizer, 2)
        except OSError as error:
            errors.append(str(error))
        shutil.disk_usage = usage
        for owner, call in ((Path, "mkdir"), (os, "replace")):  # those that make its folders, and that give it its name
            with unittest.mock.patch.object(owner, call, side_effect=OSError(errno.EIO, "Input/output error")):
                try:
                    save(m, model, optimizer, 4)
                except NotWrittenError as error:
                    errors.append(str(error))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        try:
            save(m, model, optimizer, 3)
        except OSError as error:
            errors.append(str(error))
        dist.barrier()
        return errors, sorted(p.name for p in directory.iterdir())

    errors, names = Job(tp=2).run(try_to_save)
    return {"errors": errors, "names": names, "tmpfs": full_tmpfs(folder) if os.geteuid() == 0 else None}


def full_tmpfs(folder: Path) -> dict[str, Any]:
    """A disk that is really full: not enough room to begin with, or just enough for the tensors and nothing more."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=True)

    def run(model: MegatronModel, optimizer: Optimizer) -> Any:
        m = manager(disk / "checkpoints")
        train(model, optimizer, 1)
        save(m, model, optimizer, 1)
        first = fingerprint(model, optimizer)
        size = contents.take(model, optimizer, {}, 1).size
        outcomes = []
        for room in (size // 2, size + 4096):
            if dist.get_rank() == 0:
                (disk / "filler").write_bytes(b"")
                (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - room))
            dist.barrier()
            train(model, optimizer, 1)
            try:
                save(m, model, optimizer, 2)
                error = "saved"
            except OSError as problem:
                error = str(problem)
            names = sorted(os.listdir(m.directory))
            manager(m.directory).resume(model, optimizer)
            outcomes.append((error, names, fingerprint(model, optimizer) == first))
        dist.barrier()
        (disk / "filler").unlink(missing_ok=True)
        dist.barrier()
        train(model, optimizer, 1)
        save(m, model, optimizer, 2)
        return {"size": size, "outcomes": outcomes, "with room again": sorted(os.listdir(m.directory))}

    try:
        return Job(dp=2).run(run) | {"directory": str(disk / "checkpoints")}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def not_trusted(folder: Path) -> dict[str, Any]:
    """What the disk gives back is not what was written; every checkpoint damaged; archives cut and changed."""

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)

    def error_of(action: Callable[[], Any]) -> str:
        try:
            return f"no error: {action()}"
        except (OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    def run(model: MegatronModel, optimizer: Optimizer) -> dict[str, Any]:
        results: dict[str, Any] = {}
        directory = folder / "checkpoints"
        m = manager(directory, save_last_n=1)
        save(m, model, optimizer, 1)
        sync_tree = contents.sync_tree
        contents.sync_tree = lambda staging: (sync_tree(staging), flip(staging / "state" / "__0_0.distcp"))  # type: ignore[assignment, return-value]
        results["bad disk"] = error_of(lambda: save(m, model, optimizer, 2)), sorted(os.listdir(directory))
        contents.sync_tree = sync_tree
        save(m, model, optimizer, 2)
        save(manager(directory), model, optimizer, 3)
        dist.barrier()
        if dist.get_rank() == 0:
            for path in directory.iterdir():
                flip(path / "trainer_state.json")
        dist.barrier()
        results["all damaged"] = (
            error_of(lambda: manager(directory).resume(model, optimizer)),
            sorted(os.listdir(directory)),
        )
        results["again"] = error_of(lambda: manager(directory).resume(model, optimizer))
        results["told not to resume"] = manager(directory, resume_if_exists=False).resume(model, optimizer)

        archive = folder / "model.nemo"
        save_nemo(archive, model, model.architecture.to_nemo_config(), None)
        whole = archive.read_bytes()
        at = whole.rindex(b"model_weights/__0_0.distcp")  # its header
        cases = {
            "cut in the weights": whole[: at + 3000],
            "cut between files": whole[:at],
            "flipped": bytes([*whole[: at + 5000], whole[at + 5000] ^ 1, *whole[at + 5001 :]]),
        }
        for name, content in cases.items():
            dist.barrier()
            if dist.get_rank() == 0:
                archive.write_bytes(content)
            dist.barrier()
            results[name] = error_of(lambda: load_nemo_weights(archive, model))
        return results

    return Job(dp=2).run(run)


def offloaded(folder: Path) -> dict[str, Any]:
    """Adam's states in other memory between updates, and during a save. On a CPU both are host memory."""
    jobs = {
        "bf16 distributed dp2": Job(dp=2, dtype=torch.bfloat16),
        "fp32 distributed": Job(),
        **unless_short(bf16_plain_reward=Job(distributed=False, dtype=torch.bfloat16, reward=True)),
    }

    def places(model: MegatronModel, optimizer: Optimizer) -> dict[str, list[int]]:
        inner = optimizer.megatron.chained_optimizers[0].optimizer
        parameters = [p for group in inner.param_groups for p in group["params"]]
        return {
            "moments": [t.data_ptr() for p in parameters for t in inner.state[p].values()],
            "main weights": [p.data_ptr() for p in parameters],
            "weights": [p.data_ptr() for p in model.gpt.parameters()],
            "gradients": [p.main_grad.untyped_storage().size() for p in model.gpt.parameters()],
        }

    def run(model: MegatronModel, optimizer: Optimizer, directory: Path, away: bool) -> Any:
        seed_everything(0)
        m, losses, moved = manager(directory), [], {}
        if away:
            optimizer._offload = AdamOffload(optimizer.parts(), model.module)
        optimizer.offload_states()  # before there are any
        for step in range(1, 4):
            losses += train(model, optimizer, 1)
            before = places(model, optimizer)
            optimizer.offload_states()
            optimizer.offload_states()  # twice is once
            after = places(model, optimizer)
            moved = {k: sum(a != b for a, b in zip(before[k], after[k], strict=True)) / len(before[k]) for k in before}
            if step == 2:
                save(m, model, optimizer, 2)
        result = [losses, fingerprint(model, optimizer)]
        m.resume(model, optimizer)  # into states that are away
        result += [train(model, optimizer, 2), fingerprint(model, optimizer)]
        offload = optimizer._offload
        present = set() if offload is None else set(offload._states())
        return moved | {"orphans": 0 if offload is None else len(offload._resting.keys() - present)}, result

    results = {}
    for name, job in jobs.items():
        both = [job.run(run, folder / f"{name} {away}", away) for away in (False, True)]
        results[name] = {"moved": [moved for moved, _ in both], "runs": [run for _, run in both]}
    return results


def pruning(folder: Path) -> dict[str, Any]:
    """What is left after saves with these monitored values."""

    def names(directory: Path) -> list[str]:
        return sorted(p.name for p in directory.iterdir())

    def write(model: MegatronModel, optimizer: Optimizer) -> dict[str, Any]:
        results = {}
        cases = {
            "top 2 min": {"monitor": "val_loss", "save_top_k": 2, "save_last_n": 1},
            "top 1 max": {"monitor": "val_loss", "save_top_k": 1, "mode": "max", "save_last_n": 1},
            "none": {"monitor": "val_loss", "save_top_k": 0, "save_last_n": 1},
            "none but two": {"monitor": "val_loss", "save_top_k": 0},
            "all": {"monitor": "val_loss", "save_top_k": -1},
            "unmonitored": {"save_top_k": 3, "save_last_n": 1},
        }
        values = [0.5, 0.1, 0.9, float("nan"), 0.4]
        for name, settings in cases.items():
            directory = folder / name.replace(" ", "_")
            for step, value in enumerate(values, 1):
                # A new manager each time: ranking outlives the process.
                save(manager(directory, filename="m-{step}", **settings), model, None, step, val_loss=value)
            results[name] = names(directory)
        directory = folder / "another"
        save(manager(directory, filename="m-{step}", monitor="train_loss"), model, None, 1, train_loss=0.01)
        for step, value in enumerate(values[:3], 2):
            settings = {"monitor": "val_loss", "save_last_n": 1}
            save(manager(directory, filename="m-{step}", **settings), model, None, step, val_loss=value)
        results["another monitor"] = names(directory)
        return results

    return Job().run(write)


def resuming(folder: Path) -> dict[str, Any]:
    """The keys of exp_manager, and .nemo archives at the end of training."""

    class FakeTokenizer:
        format = TextFormat()

        def __init__(self) -> None:
            self.folders: list[Path] = []

        def save(self, directory: Path) -> None:
            directory.mkdir()
            (directory / "tokenizer.json").write_text("{}")
            self.folders.append(directory)

    def error_of(action: Callable[[], Any]) -> str:
        try:
            return f"no error: {action()}"
        except (OSError, ValueError, TypeError) as error:
            return f"{type(error).__name__}: {error}"

    def exported(m: CheckpointManager, model: MegatronModel, made: list[Any]) -> int:
        """Which of the models the archive has."""
        other = build_model(model.architecture, {}, torch.float32, trainable=False)
        load_nemo_weights(m.directory / "megatron_gpt.nemo", other)
        return made.index(logprobs(other))

    def run(model: MegatronModel, optimizer: Optimizer) -> dict[str, Any]:
        directory = folder / "checkpoints"
        results: dict[str, Any] = {
            "nothing, ignored": manager(directory).resume(model, optimizer),
            "nothing, not ignored": error_of(
                lambda: manager(directory, resume_ignore_no_checkpoint=False).resume(model, optimizer)
            ),
        }
        settings = {"monitor": "val_loss", "save_best_model": True, "filename": "m--{val_loss:.3f}-{step}"}
        tokenizer = FakeTokenizer()
        export = NemoExport({"num_layers": 2}, tokenizer)  # type: ignore[arg-type]
        best = logprobs(model)
        m = CheckpointManager(directory, CheckpointSettings(**settings), export)
        save(m, model, optimizer, 1, val_loss=0.1)
        train(model, optimizer, 2)
        save(m, model, optimizer, 3, val_loss=0.7)
        m.export_at_end(model)
        results["names"] = sorted(p.name for p in directory.iterdir())
        results["exported"] = {"top 1": exported(m, model, [best])}

        m = CheckpointManager(folder / "all", CheckpointSettings(**settings, save_top_k=-1), export)
        made = []
        for step, value in enumerate((0.3, 0.1, 0.2, 0.9, math.nan), 1):
            train(model, optimizer, 1)
            made.append(logprobs(model))
            save(m, model, optimizer, step, val_loss=value)
        m.export_at_end(model)
        results["exported"]["all kept"] = exported(m, model, made)
        results["model kept"] = logprobs(model) == made[-1]
        file = m.directory / "m--val_loss=0.100-step=2" / "state" / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
        m.export_at_end(model)
        results["exported"]["damaged"] = exported(m, model, made)
        m = CheckpointManager(folder / "always", CheckpointSettings(always_save_nemo=True), export)
        tempfile.tempdir = str(folder / "missing")  # as if all folders for temporary files were full
        for step in (1, 2):
            save(m, model, None, step)
        tempfile.tempdir = None
        results["tokenizers"] = [len(tokenizer.folders), sum(path.exists() for path in tokenizer.folders)]
        results["put aside"] = sorted(p.name for p in (folder / "all").glob("*.damaged"))
        results["newest"] = manager(directory).resume(model, optimizer)
        results["off"] = manager(directory, resume_if_exists=False).resume(model, optimizer)
        explicit = str(directory / "m--val_loss=0.100-step=1")
        results["explicit"] = manager(directory, resume_from_checkpoint=explicit).resume(model, optimizer)
        back = folder / "back"  # and again, by the same command
        shutil.copytree(directory, back)
        named = {"resume_from_checkpoint": str(back / Path(explicit).name)}
        m = manager(back, **named)
        results["back, steps"] = [m.resume(model, optimizer)["step"]]
        save(m, model, optimizer, 2)
        m.finish()
        for setting in (named, {"resume_from_checkpoint": str(next(back.glob("*step=3")))}, named):
            results["back, steps"].append(manager(back, **setting).resume(model, optimizer)["step"])
        moved = back.rename(folder / "moved")
        named = {"resume_from_checkpoint": str(moved / Path(explicit).name)}
        results["back, steps"].append(manager(moved, **named).resume(model, optimizer)["step"])
        moved.rename(back)
        last = next(back.glob("*-last"))  # loses its -last to a newer one, which is damaged then
        named = {"resume_from_checkpoint": str(last)}
        m = manager(back, **named)
        m.resume(model, optimizer)
        save(m, model, optimizer, 7)
        same = {"resume_from_checkpoint": str(last).removesuffix("-last")}
        results["lost its last"] = [manager(back, **same).resume(model, optimizer)["step"]]
        next(back.glob("*step=7-last/trainer_state.json")).unlink()
        results["lost its last"].append(manager(back, **named).resume(model, optimizer)["step"])
        results["explicit, wrong"] = error_of(
            lambda: manager(directory, resume_from_checkpoint=str(folder / "nothing")).resume(model, optimizer)
        )
        save(manager(directory), model, None, 5)
        results["no optimizer"] = error_of(lambda: manager(directory).resume(model, optimizer))
        return results

    return Job().run(run)


def nonfinite(folder: Path) -> dict[str, Any]:
    """NaN in one rank's gradients or loss; NaN in the weights when a checkpoint is due."""

    def run(model: MegatronModel, optimizer: Optimizer, bad_rank: int | None) -> Any:
        optimizer.skips = SkipCounter(Updates(on_nonfinite="skip", max_consecutive_skips=3))
        seed_everything(dist.get_rank())
        losses = train(model, optimizer, 2)
        if bad_rank is not None:

            def loss(output: torch.Tensor, batch: Tokens) -> tuple[Any, Any, dict[str, Any]]:
                factor = math.nan if dist.get_rank() == bad_rank else 1.0
                return output.float().square().sum() * factor, torch.tensor(batch.tokens.numel()), {}

            optimizer.zero_grad()
            batch, batching = Tokens(TOKENS[:4]), MicroBatching(2)
            means = train_step(model, batch, EVERYWHERE[:4], batching, loss, scoring=Scoring())
            optimizer.step(means["loss"], "a batch")  # loss and gradients
            optimizer.zero_grad()
            harmless: Any = lambda output, batch: (output.sum(), torch.tensor(8), {})  # noqa: E731
            train_step(model, batch, EVERYWHERE[:4], batching, harmless, scoring=Scoring())
            for parameter in model.gpt.parameters() if dist.get_rank() == bad_rank else ():
                parameter.main_grad.fill_(math.inf)  # gradients of one rank only, after their reduction
            optimizer.step(1.0, "a batch")
        losses += train(model, optimizer, 2)
        counters = optimizer_counters(optimizer)
        return losses, fingerprint(model, optimizer), [counters["step_count"], counters["skipped_updates"]]

    def save_nan(model: MegatronModel, optimizer: Optimizer) -> Any:
        m = manager(folder)
        save(m, model, optimizer, 1)
        if dist.get_rank() == 1:
            next(model.gpt.parameters()).data.view(-1)[3] = math.nan
        try:
            save(m, model, optimizer, 2)
        except NonFiniteError as error:
            return str(error), sorted(os.listdir(folder))

    jobs = {
        "bf16 distributed tp2": Job(tp=2, dtype=torch.bfloat16),
        **unless_short(fp32_plain_pp2=Job(pp=2, distributed=False), fp32_distributed_dp2=Job(dp=2)),
    }
    results: dict[str, Any] = {
        name: {"clean": job.run(run, None), "with NaN": job.run(run, 1)} for name, job in jobs.items()
    }
    return {"jobs": results, "saving NaN": Job(tp=2).run(save_nan)}


SCENARIOS = (
    *(archives, reward_model, exact_resume, layout_change, killed, behind, offloaded, damaged, full_disk),
    *(shared_out, pruning, resuming, nonfinite, not_trusted),
)


def main() -> None:
    folder = Path(sys.argv[1])
    results: dict[str, Any] = {}
    logging.disable(logging.WARNING)  # of the ranks: most scenarios give cause to warn
    gc.freeze()  # a collection in a forked rank would touch, and so copy, all that is imported
    for scenario in SCENARIOS:
        if sys.argv[2:] and scenario.__name__ not in sys.argv[2:]:
            continue
        directory = folder / scenario.__name__
        directory.mkdir()
        start = time.monotonic()
        try:
            results[scenario.__name__] = scenario(directory)
        except RuntimeError as error:  # the other scenarios have something to say too
            results[scenario.__name__] = {"error": str(error)}
        print(f"{scenario.__name__}: {time.monotonic() - start:.1f} s", file=sys.stderr)
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
