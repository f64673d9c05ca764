"""The actor job of the benchmarks: train_gpt_ppo_actor.py itself, with forced response lengths, one step at a time.

    python ppo_actor.py ADDRESS LENGTHS.json OVERRIDES...

The additions surround the trainer: its engine is asked for responses of given lengths, which no config key can set for
each sample; lengths are not remembered to predict those of later steps; and after each step rank 0 waits for its turn,
and the other ranks for rank 0. What is timed is untouched.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ppo_turns import Turns

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples" / "nlp" / "gpt"))

import train_gpt_ppo_actor as job  # noqa: E402 (found by the line above)

from nemo_style_aligner.engine.contract import (  # noqa: E402
    GenerationEngine,
    GenerationRequest,
    GenerationResult,
    SamplingParams,
)
from nemo_style_aligner.engine.embedded.scheduler import Task  # noqa: E402
from nemo_style_aligner.trainer.jobs import rl_setup  # noqa: E402
from nemo_style_aligner.trainer.rl.loop import RLTrainer  # noqa: E402
from nemo_style_aligner.trainer.rl.rollouts import setup as rollout_setup  # noqa: E402
from nemo_style_aligner.trainer.rl.rollouts.generator import LocalGenerator  # noqa: E402


class ForcedLengths:
    """An engine whose responses have the lengths that ``lengths`` says for their prompts; otherwise ``engine``.

    Args:
        lengths: of the samples of each prompt, which follow each other.
    """

    def __init__(self, engine: GenerationEngine, lengths: dict[tuple[int, ...], list[int]]) -> None:
        self._engine = engine
        self._lengths = lengths

    def _length(self, sample: GenerationRequest | GenerationResult) -> int:
        lengths = self._lengths[tuple(sample.prompt_token_ids)]
        return lengths[sample.request_id % len(lengths)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Iterable[GenerationRequest], sampling: SamplingParams) -> Iterator[GenerationResult]:
        """See `GenerationEngine.generate`; RuntimeError if a response has another length than forced."""
        forced = (dataclasses.replace(request, max_new_tokens=self._length(request)) for request in requests)
        for result in self._engine.generate(forced, _endless(sampling)):
            if len(result.token_ids) != self._length(result):
                raise RuntimeError(f"sample {result.request_id} has {len(result.token_ids)} tokens, not those forced")
            yield result

    def task(self, request: GenerationRequest, sampling: SamplingParams, **options: Any) -> Task:
        """See `EmbeddedEngine.task`."""
        forced = dataclasses.replace(request, max_new_tokens=self._length(request))
        task: Task = self._engine.task(forced, _endless(sampling), **options)
        return task


def _endless(sampling: SamplingParams) -> SamplingParams:
    return dataclasses.replace(sampling, ignore_eos=True, min_new_tokens=0)


def main() -> None:
    address = sys.argv[1]
    lengths: dict[tuple[int, ...], list[int]] = {}
    for prompt, length in json.loads(Path(sys.argv[2]).read_text()):
        lengths.setdefault(tuple(prompt), []).append(length)
    del sys.argv[1:3]
    build_ppo_trainer = rl_setup.build_ppo_trainer

    def build(*args: Any) -> RLTrainer:
        trainer: RLTrainer = build_ppo_trainer(*args)
        # Every step has the same prompts and lengths: once observed, they would be predicted exactly, and order of work
        # and balance of ranks would be an oracle's. Without observations all prompts are treated as new ones.
        trainer.train_prompts.observe = lambda rollouts: None  # type: ignore[method-assign]
        if trainer.metrics.rank != 0:
            return trainer
        turns, log_phases = Turns(address), trainer.log_phases

        def take_turns() -> None:
            log_phases()
            turns.report(trainer.step)
            turns.wait()

        trainer.log_phases = take_turns  # type: ignore[method-assign]
        turns.report(0)
        turns.wait()
        return trainer

    def generator(engine: GenerationEngine, *args: Any) -> LocalGenerator:
        return LocalGenerator(ForcedLengths(engine, lengths), *args)

    # Replaced where the script and the job look them up.
    rl_setup.build_ppo_trainer = build
    rollout_setup.LocalGenerator = generator  # type: ignore[assignment, misc]
    job.main()


if __name__ == "__main__":
    main()
