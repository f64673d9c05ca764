"""PPO runs with generation in its place and beside training, for test_staleness.py: ``python multirank_staleness.py
<folder> [name ...]``.

Imports torch and megatron-core once and forks the ranks. Everything is real but the critic job, whose scores depend on
the tokens alone. Each way leaves ``<folder>/<name>.safetensors`` (what every step trained on, and the weights at the
end) and its metrics in ``<folder>/logs/<name>``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.tensorboard  # slow: imported here once, for all ranks
from multirank_ppo import make_archives
from omegaconf import DictConfig, OmegaConf
from ranks import fork_processes, fork_ranks
from safetensors.torch import save_file

from nemo_style_aligner.engine.parallel.groups import initialize_model_parallel
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.engine.text.jsonl import write_jsonl
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.jobs.rl_setup import build_actor
from nemo_style_aligner.trainer.launch import roles
from nemo_style_aligner.trainer.launch.stop_signals import EXIT_REQUEUE, stops
from nemo_style_aligner.trainer.models.restore import open_base_model
from nemo_style_aligner.trainer.rl.experience import Experience
from nemo_style_aligner.trainer.rl.loop import RLTrainer
from nemo_style_aligner.trainer.rl.rewards import Reward
from nemo_style_aligner.trainer.rl.rollouts.collector import RolloutCollector
from nemo_style_aligner.trainer.rl.rollouts.prompts import build_prompt_sources
from nemo_style_aligner.trainer.rl.rollouts.setup import build_generator, build_rollout_rank, open_work_queue
from nemo_style_aligner.trainer.rl.sample import Rollouts, Sample
from nemo_style_aligner.trainer.rl.scoring import Scorer
from nemo_style_aligner.trainer.rl.settings import RLSettings
from nemo_style_aligner.trainer.rl.values import Save
from nemo_style_aligner.trainer.services.exactly_once.ledger import INITIAL_HISTORY, CriticPosition
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer
from nemo_style_aligner.trainer.training.run_control import RunControl

NUM_SAMPLES, UPDATES_PER_STEP, STEPS, MAX_NEW_TOKENS = 8, 2, 5, 12


@dataclasses.dataclass(frozen=True)
class Way:
    """How a run is laid out."""

    name: str
    rollout_ranks: int = 0
    staleness: int = 0
    in_flight: str = "wait"
    lr: float = 5e-3
    pp: int = 1
    generation_tp: int = 1
    logprobs: str = "trainer"
    group_size: int = 1
    ends: tuple[str, ...] = ()  # strings that end a response, so that lengths differ
    redraws: bool = False  # dynamic sampling, with rewards that are often equal
    stops: tuple[str, ...] = ()  # in turn: where the run gets a stop signal, before it is started again
    is_long: bool = False  # made with TEST_LONG alone

    @property
    def world_size(self) -> int:
        return self.pp + self.rollout_ranks


# Two samples to a prompt, of lengths that differ.
KEEP: dict[str, Any] = {
    "rollout_ranks": 1,
    "staleness": 1,
    "in_flight": "keep",
    "group_size": 2,
    "ends": ("a", "e", "1"),
}
STOPS = ("train 1", "score 3", "rollout rank 3", "score 5")
WAYS = (
    Way("together"),
    Way("together_lr0", lr=0.0),
    Way("engine_logprobs", logprobs="engine"),
    Way("apart", rollout_ranks=1),
    Way("stale_lr0", rollout_ranks=1, staleness=1, lr=0.0),
    Way("stale", rollout_ranks=1, staleness=1),
    Way("stale_stopped", rollout_ranks=1, staleness=1, stops=STOPS),
    Way("two", rollout_ranks=1, staleness=2),
    Way("two_stopped", rollout_ranks=1, staleness=2, stops=STOPS),
    Way("keep_lr0", lr=0.0, **KEEP),
    Way("keep", **KEEP),
    Way("keep_stopped", **KEEP, stops=STOPS),
    Way("redrawn", **KEEP | {"staleness": 2}, redraws=True),
    Way("redrawn_stopped", **KEEP | {"staleness": 2}, redraws=True, stops=STOPS),
    Way("redrawn_wait", **KEEP | {"in_flight": "wait"}, redraws=True, is_long=True),
    Way("redrawn_wait_stopped", **KEEP | {"in_flight": "wait"}, redraws=True, stops=STOPS, is_long=True),
    Way("keep_two", **KEEP | {"staleness": 2}, is_long=True),
    Way("keep_two_stopped", **KEEP | {"staleness": 2}, stops=STOPS, is_long=True),
    Way("restart", **KEEP | {"staleness": 2, "in_flight": "restart"}, is_long=True),
    Way("restart_stopped", **KEEP | {"staleness": 2, "in_flight": "restart"}, stops=STOPS, is_long=True),
    Way("keep_four", **KEEP | {"staleness": 4, "rollout_ranks": 2}, is_long=True),
    Way("keep_four_stopped", **KEEP | {"staleness": 4, "rollout_ranks": 2}, stops=STOPS, is_long=True),
    Way("apart_pp2_to_tp2", rollout_ranks=2, pp=2, generation_tp=2, is_long=True),
)


def config(folder: Path, way: Way) -> PPOActor:
    prompts = [str(folder / "prompts.jsonl")]
    cfg = OmegaConf.merge(
        load_defaults("gpt_ppo_actor"),
        {
            "trainer": {
                "precision": "32",
                "ppo": {
                    "max_steps": STEPS,
                    "val_check_interval": 2,
                    "save_interval": 2,
                    "staleness": way.staleness,
                    "in_flight": way.in_flight,
                    "num_rollouts_per_prompt": way.group_size,
                    "dynamic_sampling": {"enable": way.redraws},
                    "policy_logprobs": way.logprobs,
                    "rollout_devices": way.rollout_ranks,
                    "mask_truncated": False,
                    "importance_weight_cap": 2.0,
                    "trust_region": "both" if way.ends else "step",
                    "importance_sequence_bounds": [0.5, 2.0] if way.ends else [0.9, 1.1],
                    "generation": {"num_slots": 4, "tensor_parallel_size": way.generation_tp, "step": "torch"},
                    "batch_iterator": {"use_flask": way.rollout_ranks > 1, "port": 0},
                },
            },
            "model": {
                "pipeline_model_parallel_size": way.pp,
                "micro_batch_size": 2,
                "global_batch_size": NUM_SAMPLES // UPDATES_PER_STEP,
                "encoder_seq_length": 64,
                "ppo": {
                    "num_rollout_samples": NUM_SAMPLES // way.group_size,
                    "sampling_params": {"end_strings": list(way.ends)},
                    "num_val_samples": 4,
                    "rollout_micro_batch_size": 3,
                    "length_params": {"max_length": MAX_NEW_TOKENS},
                },
                "optim": {"lr": way.lr, "sched": {"name": "constant", "warmup_steps": 0, "min_lr": 0.0}},
                "data": {"data_prefix": {"train": prompts, "validation": prompts, "test": prompts}},
            },
        },
    )
    assert isinstance(cfg, DictConfig)
    return PPOActor.read(cfg)


class Critic:
    """In the critic's place: rewards and values that depend on a sequence's tokens alone; notes what it is sent."""

    part_names = ()
    last_progress = -math.inf

    def __init__(self, way: Way, stop_at: str | None) -> None:
        self._way = way
        self._stop_at = stop_at
        self.step = 0
        self.trainer: RLTrainer

    def score(self, samples: Sequence[Sample]) -> concurrent.futures.Future[list[Reward]]:
        answer: concurrent.futures.Future[list[Reward]] = concurrent.futures.Future()
        sums = [float(torch.sin(torch.tensor(s.token_ids).float()).sum()) for s in samples]
        answer.set_result([Reward(float(x > 0) if self._way.redraws else x) for x in sums])
        if self._stop_at == f"score {self.step}":
            os.kill(os.getpid(), signal.SIGUSR1)
        return answer

    def values(self, samples: Sequence[Sample]) -> concurrent.futures.Future[list[torch.Tensor]]:
        answer: concurrent.futures.Future[list[torch.Tensor]] = concurrent.futures.Future()
        answer.set_result([torch.cos(torch.tensor(s.token_ids[s.prompt_length :]).float()) for s in samples])
        return answer

    def values_of(self, share: Rollouts) -> None:
        """`values` gives them."""

    def give_back_memory(self) -> None:
        pass

    def close(self) -> None:
        pass

    def start_training(self, experience: Experience) -> Any:
        step = self.trainer.step
        if self._stop_at == f"train {step}":
            os.kill(os.getpid(), signal.SIGUSR1)
        if self._stop_at == f"rollout rank {step}":
            self._stop_the_rollout_rank()
        if self._way.staleness and step + 1 < STEPS and not (self._way.stops or self._way.redraws):
            self._see_the_next_responses(step)
        self.step = step + 1
        return self

    def _see_the_next_responses(self, step: int) -> None:
        """Before this step trains: the rollouts of the next ones are all made without its weights, and its end."""
        rounds = self.trainer.schedule._rounds
        assert [*rounds] == [*range(step, min(step + 1 + self._way.staleness, STEPS))]
        deadline = time.monotonic() + 60
        while not all(round_.is_complete() for number, round_ in rounds.items() if number > step):
            assert time.monotonic() < deadline, f"rollouts of the next steps are not made while step {step} is"
            time.sleep(0.01)

    def _stop_the_rollout_rank(self) -> None:
        channel = roles.channel()
        assert channel is not None
        os.kill(int(channel.read("pid")), signal.SIGUSR1)
        deadline = time.monotonic() + 60
        while not channel.has("signal"):
            assert time.monotonic() < deadline, "the rollout rank keeps its stop signal to itself"
            time.sleep(0.01)

    def result(self) -> dict[str, float]:
        return {"critic_loss": 0.0}

    def start_save(self) -> Save:
        return Save(CriticPosition("run", 1, INITIAL_HISTORY), lambda seconds: True)

    def confirm_save(self, save: Save) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def padded(experience: Experience) -> dict[str, torch.Tensor]:
    """All samples' columns on rank 0, each at the places of its response tokens; 0 elsewhere. Collective."""
    rollouts, batch = experience.rollouts, experience.value_batch()
    found = {}
    versions = torch.cat(
        [torch.zeros(0), *(rollouts.on_first_rank(rollouts.weight_versions, rollouts.sampled_lengths) or ())]
    )
    for name, column in experience.columns.items():
        rows = rollouts.on_first_rank(column, rollouts.sampled_lengths)
        if batch is not None and rows is not None:
            found[name] = torch.zeros_like(batch.mask).masked_scatter(batch.mask != 0, torch.cat(list(rows)))
    if batch is None:
        return {}
    facts = {"prompt_ids": rollouts.prompt_ids, "learns": experience.learns.float()}
    return found | facts | {"tokens": batch.tokens, "mask": batch.mask, "versions": versions}


# ---- a run --------------------------------------------------------------------------------------


def train(folder: Path, way: Way, stop_at: str | None) -> dict[str, torch.Tensor]:
    """A run of the training ranks, to its end or to its stop; what it trained on and where it came."""
    initialize_model_parallel(1, way.pp, seed=1)
    cfg = config(folder, way)
    base, cfg = open_base_model(str(folder / "sft.nemo"), cfg)
    train_prompts, val_prompts = build_prompt_sources(cfg, base.tokenizer)
    settings = RLSettings.from_config(cfg, train_prompts.batches_per_epoch)
    actor = build_actor(cfg, base, base.load(), settings)
    longest = train_prompts.longest + MAX_NEW_TOKENS
    critic: Any = Critic(way, stop_at)
    generator = build_generator(cfg, actor.model, base.tokenizer, longest, open_work_queue(cfg))
    scorer = Scorer(critic, critic, 60, "the critic")
    collector = RolloutCollector(generator, scorer, base.tokenizer, str, scoring_batch_size=3)
    log_dir = folder / "logs" / way.name
    checkpoints = CheckpointManager(log_dir / "checkpoints", CheckpointSettings())
    metrics, control = MetricsLogger(log_dir, dist.get_rank()), RunControl()
    trainer = RLTrainer(
        settings, actor, collector, train_prompts, val_prompts,
        checkpoints, metrics, control, ScopedTimer(),
    )  # fmt: skip
    critic.trainer = trainer
    steps: list[tuple[int, dict[str, torch.Tensor]]] = []
    start_critic = trainer.start_critic

    def noting(experience: Experience) -> Any:
        steps.append((trainer.step, padded(experience)))
        return start_critic(experience)

    trainer.start_critic = noting  # type: ignore[method-assign]
    state = checkpoints.resume(actor.model, actor.optimizer)
    if state is not None:
        trainer.load_state_dict(state)
    critic.step = trainer.step
    trainer.fit()
    trainer.close()
    metrics.close()
    assert control.status == (EXIT_REQUEUE if stop_at else 0)
    roles.end(control.status)
    tensors = {f"policy.{name}": tensor.clone() for name, tensor in export_weights(actor.model)}
    for step, columns in steps:
        tensors |= {f"{step}.{name}": tensor for name, tensor in columns.items()}
    return tensors


def generate(folder: Path, way: Way) -> None:
    """A run of the rollout ranks."""
    channel = roles.channel()
    assert channel is not None
    channel.put("pid", str(os.getpid()).encode())
    cfg = config(folder, way)
    base, cfg = open_base_model(str(folder / "sft.nemo"), cfg)
    build_rollout_rank(cfg, channel, base.architecture, base.dtype, base.tokenizer).serve()


def run_ways(folder: Path, ways: Sequence[Way], store: dist.Store, rank: int, world_size: int) -> None:
    from megatron.core import parallel_state  # after nemo_style_aligner, which prepares it for the CPU

    stops.install()
    for way in ways:
        tensors: dict[str, torch.Tensor] = {}
        for number, stop_at in enumerate((*way.stops, None)):
            own_store = dist.PrefixStore(f"{way.name}/{number}", store)
            timeout = timedelta(seconds=60)
            if way.rollout_ranks:
                roles.initialize(own_store, rank, world_size, {roles.ROLLOUT: way.rollout_ranks}, "gloo", timeout)
            else:
                dist.init_process_group("gloo", store=own_store, rank=rank, world_size=world_size, timeout=timeout)
            if roles.is_rollout_rank():
                generate(folder, way)
            else:
                tensors |= train(folder, way, stop_at)
                parallel_state.destroy_model_parallel()
            dist.barrier()
            dist.destroy_process_group()
            roles.leave()
            # The next run of this process has not got the signals of this one.
            stops.received.clear()
            stops._diversion = None
        if rank == 0:
            save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"{way.name}.safetensors")


def fork(folder: Path, ways: Sequence[Way], world_size: int) -> None:
    """Run ``ways`` on forked ranks, whose roles are theirs to take."""
    port = free_port()

    def rank_main(rank: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=60))
        run_ways(folder, ways, store, rank, world_size)
        if rank == 0:
            time.sleep(0.5)  # with this process the store goes

    fork_processes(world_size, rank_main, seconds=300.0)


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    fork_ranks(1, lambda: make_archives(folder))
    lines = [{"text": f"User: What is {a}*{a + 10 * (a % 3)}?\nAssistant:"[: 12 + 7 * (a % 4)]} for a in range(40)]
    write_jsonl(folder / "prompts.jsonl", lines)
    wanted = [way for way in WAYS if (way.name in names if names else not way.is_long or os.environ.get("TEST_LONG"))]
    for world_size in sorted({way.world_size for way in wanted}):
        chosen = [way for way in wanted if way.world_size == world_size]
        if chosen:
            fork(folder, chosen, world_size)


if __name__ == "__main__":
    main()
