"""The same prompts on different ranks, engines and work sources: ``python multirank_rollouts.py <folder> <port>``.

Needs ``<folder>/sft.nemo`` and a critic service on 127.0.0.1:<port>. Each way leaves
``<folder>/rollouts_<name>.safetensors``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from ranks import fork_ranks
from safetensors.torch import save_file

from nemo_style_aligner.engine.parallel.groups import initialize_model_parallel
from nemo_style_aligner.engine.text.jsonl import write_jsonl
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.jobs.scoring_setup import build_critic_client
from nemo_style_aligner.trainer.launch.stop_signals import StopEarlyError, stops
from nemo_style_aligner.trainer.models.restore import open_base_model
from nemo_style_aligner.trainer.rl.remote_critic import RemoteCritic
from nemo_style_aligner.trainer.rl.rollouts.collector import RolloutCollector
from nemo_style_aligner.trainer.rl.rollouts.generator import LocalGenerator
from nemo_style_aligner.trainer.rl.rollouts.prompts import Prompt, build_prompt_sources
from nemo_style_aligner.trainer.rl.rollouts.setup import build_generator, open_work_queue
from nemo_style_aligner.trainer.rl.scoring import Scorer
from nemo_style_aligner.trainer.services.score_client import SequencesToScore

NUM_SAMPLES, MAX_NEW_TOKENS, SEED = 14, 16, 77


@dataclasses.dataclass(frozen=True)
class Way:
    """How rollouts are made; none of it may show in them."""

    name: str
    ranks: int = 1
    tp: int = 1
    pp: int = 1
    flask: bool = False
    slots: int = 4
    scoring_batch: int = 4
    reshard: bool = False
    generation_tp: int | None = None
    kv_cache_tokens: int | None = None


WAYS = (
    Way("static"),
    Way("flask", flask=True),
    Way("one_by_one", slots=1, scoring_batch=1),
    Way("static_2", ranks=2),
    Way("flask_2", ranks=2, flask=True, scoring_batch=3),
    Way("flask_pp2", ranks=2, pp=2, flask=True),
    Way("little_memory", kv_cache_tokens=64),
    Way("generation_tp2", ranks=2, tp=2, flask=True, generation_tp=2, kv_cache_tokens=64),
    Way("pp2_to_tp2", ranks=2, pp=2, generation_tp=2),
    Way("tp2_pp2", ranks=4, tp=2, pp=2),
    Way("reshard_tp2_pp2", ranks=4, tp=2, pp=2, flask=True, reshard=True),
)


def config(folder: Path, port: int, way: Way) -> PPOActor:
    prompts = str(folder / "prompts.jsonl")
    cfg = OmegaConf.merge(
        load_defaults("gpt_ppo_actor"),
        {
            "trainer": {
                "precision": "32",
                "ppo": {
                    "generation": {
                        "num_slots": way.slots,
                        "tensor_parallel_size": way.generation_tp,
                        "kv_cache_tokens": way.kv_cache_tokens,
                        "prefill_chunk_tokens": 16,
                    },
                    "trt_llm": {"reshard": way.reshard},
                    "batch_iterator": {"use_flask": way.flask, "port": 0},
                },
            },
            "remote_critic_rm": {"critic": {"ip": "127.0.0.1", "port": port}},
            "model": {
                "tensor_model_parallel_size": way.tp,
                "pipeline_model_parallel_size": way.pp,
                "encoder_seq_length": 64,
                "ppo": {
                    "num_rollout_samples": NUM_SAMPLES,
                    "rollout_micro_batch_size": way.scoring_batch,
                    "length_params": {"max_length": MAX_NEW_TOKENS},
                    "sampling_params": {"temperature": 0.8, "end_strings": ["4"]},
                },
                "data": {"data_prefix": {"train": [prompts], "validation": [prompts], "test": [prompts]}},
            },
        },
    )
    assert isinstance(cfg, DictConfig)
    return PPOActor.read(cfg)


def make_rollouts(folder: Path, port: int, way: Way) -> None:
    initialize_model_parallel(way.tp, way.pp, seed=1)
    cfg = config(folder, port, way)
    queue = open_work_queue(cfg)
    base, cfg = open_base_model(str(folder / "sft.nemo"), cfg)
    train_prompts, _ = build_prompt_sources(cfg, base.tokenizer)
    model = base.load(trainable=False)
    critic = RemoteCritic(build_critic_client(cfg.remote_critic_rm), None, "refuse")
    scorer = Scorer(critic, critic, 60, "the critic")
    fingerprint, longest = base.tokenizer.fingerprint(), train_prompts.longest + MAX_NEW_TOKENS
    scorer.wait_until_ready(60, SequencesToScore(longest, base.tokenizer.vocab_size, fingerprint))
    collector = RolloutCollector(
        build_generator(cfg, model, base.tokenizer, longest, queue), scorer, base.tokenizer,
        lambda ids: " " * (len(ids) == MAX_NEW_TOKENS) or str(ids),  # the longest responses count as empty
        scoring_batch_size=way.scoring_batch,
    )  # fmt: skip
    collector.generator.refit(model, 3)
    for step in range(2):  # a second round must find the queue ready for it
        prompts = train_prompts.batch(step * NUM_SAMPLES)
        collected, metrics = collector.collect(
            prompts, 1, functools.partial(collector.generator.generate, prompts, SEED + step)
        )
        rollouts = collected.dealt([range(NUM_SAMPLES)], lambda length, _: length)
        scores, values = collected.wait_for_rewards(), collected.column("values", rollouts)
    responses = rollouts.sampled_lengths
    assert metrics["empty_responses"] == (responses == MAX_NEW_TOKENS).double().mean()
    flat = {
        "tokens": rollouts.on_first_rank(rollouts.tokens, rollouts.lengths),
        "engine_logprobs": rollouts.on_first_rank(rollouts.engine_logprobs, responses),
        "values": rollouts.on_first_rank(values, responses),
    }
    if dist.get_rank() == 0:
        of_all = {k: v for k, v in vars(rollouts).items() if k not in flat and k != "own"} | {"rewards": scores.rewards}
        tensors = of_all | {name: torch.cat(list(rows)) for name, rows in flat.items() if rows is not None}
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / f"rollouts_{way.name}.safetensors")
    if way.flask and way.ranks == 2:
        stop_in_the_middle(collector, train_prompts.batch(0))
    collector.close()


def stop_in_the_middle(collector: RolloutCollector, prompts: Sequence[Prompt]) -> None:
    """One rank gets a stop signal: the round ends on all of them, and nobody waits for that rank's samples."""
    stops.install()
    stops.hold()
    generator = collector.generator
    assert isinstance(generator, LocalGenerator)
    engine = generator.engine
    if dist.get_rank() == 1:

        class Stopping:
            num_slots = engine.num_slots
            statistics = engine.statistics

            def generate(self, requests: Any, sampling: Any) -> Iterator[Any]:
                os.kill(os.getpid(), signal.SIGUSR1)  # at once: the other rank may take all samples
                yield from engine.generate(requests, sampling)

        generator.engine = Stopping()  # type: ignore[assignment]
    try:
        collector.collect(prompts, 1, functools.partial(generator.generate, prompts, SEED))
    except StopEarlyError as reason:
        assert "SIGUSR1" in str(reason)
    else:
        raise AssertionError("the round went on")
    finally:
        generator.engine = engine
        stops.received.clear()


def main() -> None:
    from megatron.core import parallel_state  # after nemo_style_aligner, which prepares it for the CPU

    folder, port, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    lines = [{"text": f"User: What is {a}*{a + 10 * (a % 3)}?\nAssistant:"[: 12 + 7 * (a % 4)]} for a in range(40)]
    write_jsonl(folder / "prompts.jsonl", lines)
    for ranks in (1, 2, 4):
        chosen = [way for way in WAYS if way.ranks == ranks and (not names or way.name in names)]

        def run(chosen: list[Way] = chosen) -> None:
            for way in chosen:
                make_rollouts(folder, port, way)
                parallel_state.destroy_model_parallel()

        if chosen:
            fork_ranks(ranks, run)


if __name__ == "__main__":
    main()
