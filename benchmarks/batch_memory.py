"""What a step's samples and their training data take of each rank's memory, without padding, in shares.

    python benchmarks/batch_memory.py [--samples 1024] [--lengths 64 8192] [--ranks 1 2] [--json FILE]

Numbers are random; what is measured is the trainer's own `Rollouts` and `Experience` with a KL penalty and values, all
of which PPO needs. For comparison: token ids in int64 and nine fp32 tensors, all padded to the longest sample, as each
rank held them before. docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
import torch
import torch.distributed as dist
from common import Bounds, json_path, long_tailed, next_answer, positive_int, print_table, write_json
from sampled_memory import peak_extra_bytes

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.parallel.groups import initialize_model_parallel
from nemo_style_aligner.trainer.config.schema import ActorLoop
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.trainer.models.ragged import after_prompts
from nemo_style_aligner.trainer.models.sharing import Costs
from nemo_style_aligner.trainer.rl.estimators import ESTIMATORS
from nemo_style_aligner.trainer.rl.experience import AdvantageSettings, Experience, make_experience
from nemo_style_aligner.trainer.rl.rollouts.collector import deal
from nemo_style_aligner.trainer.rl.sample import Rollouts
from nemo_style_aligner.trainer.rl.scoring import Scores
from nemo_style_aligner.wording import counted

SECONDS = 600.0
PROMPT_TOKENS = 64
PADDED_COLUMNS = 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--samples", type=positive_int, default=1024)
    parser.add_argument(
        "--lengths", action=Bounds, default=(64, 8192 - PROMPT_TOKENS), metavar=("LOW", "HIGH"), help="of responses"
    )
    parser.add_argument("--ranks", type=positive_int, nargs="+", default=[1, 2], help="data-parallel ranks")
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    exit_on_sigterm()
    responses = torch.tensor(long_tailed(args.samples, args.lengths, random.Random(1)))
    found = {ranks: measure(responses, ranks) for ranks in args.ranks}
    longest = PROMPT_TOKENS + int(responses.max())
    padded = args.samples * (8 * longest + 4 * PADDED_COLUMNS * (longest - 1))
    print(
        f"{counted(args.samples, 'samples')} of {PROMPT_TOKENS} prompt tokens and {int(responses.min())} to "
        f"{int(responses.max())} response tokens, on average {responses.double().mean():.0f}; MiB of the fullest rank\n"
    )
    rows = [
        (counted(ranks, "ranks"), *(f"{row[key] / 2**20:.1f}" for key in ("held", "peak")), f"{padded / 2**20:.1f}")
        for ranks, row in found.items()
    ]
    print_table(("", "held", "peak while it is made", "padded"), rows)
    settings = {key: str(value) for key, value in vars(args).items()}
    tokens = int(responses.sum()) + PROMPT_TOKENS * args.samples
    write_json(args.json, {"settings": settings, "tokens": tokens, "padded_bytes": padded, "ranks": found})


def measure(responses: torch.Tensor, ranks: int) -> dict[str, int]:
    """Bytes of the rank that has most: ``held`` by all tensors, and the ``peak`` beyond those it began with."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            context.Process(target=run_rank, args=(rank, ranks, f"{folder}/store", responses, answers), daemon=True)
            for rank in range(ranks)
        ]
        for job in jobs:
            job.start()
        found = [next_answer(answers, jobs, SECONDS) for _ in jobs]
        for job in jobs:
            job.join()
    return {key: max(each[key] for each in found) for key in found[0]}


def run_rank(rank: int, ranks: int, store: str, responses: torch.Tensor, answers: Any) -> None:
    """Make a rank's share of the training data and report its memory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    initialize_model_parallel(1, 1, 1)
    rollouts = make_rollouts(responses)
    draw = torch.Generator().manual_seed(rank)
    names = ("old_logprobs", "reference_logprobs", "values")
    columns = {name: torch.randn(len(rollouts.engine_logprobs), generator=draw) for name in names}
    scores = Scores(torch.randn(len(rollouts), generator=torch.Generator().manual_seed(1)).double(), {}, [])
    made: list[Experience] = []
    peak = peak_extra_bytes(lambda: made.append(make_experience(rollouts, scores, columns, SETTINGS, 0)[0]))
    held = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(made[0])}.values())
    answers.put({"held": held, "peak": peak})
    answers.close()
    answers.join_thread()
    dist.destroy_process_group()


def make_rollouts(responses: torch.Tensor) -> Rollouts:
    """Random samples, dealt to the data-parallel ranks as a step deals them."""
    count = len(responses)
    prompts = torch.full_like(responses, PROMPT_TOKENS)
    lengths = prompts + responses
    own = deal(Costs.apart(lengths.tolist()), [list(range(count))])
    return Rollouts(
        prompt_ids=torch.arange(count),
        groups=torch.arange(count),
        prompt_lengths=prompts,
        lengths=lengths,
        sampled_lengths=responses,
        ended=torch.ones(count, dtype=torch.bool),
        counts=torch.ones(count, dtype=torch.bool),
        own=own,
        tokens=torch.randint(0, 1000, (int(lengths[own].sum()),), dtype=torch.int32),
        sampled=after_prompts(lengths[own], prompts[own]),
        engine_logprobs=torch.randn(int(responses[own].sum())),
        weight_versions=torch.zeros(int(responses[own].sum()), dtype=torch.int32),
    )


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a dataclass, and in dictionaries and dataclasses in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_of(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


SETTINGS = AdvantageSettings(ActorLoop(kl_estimator="k1"), ESTIMATORS["gae"], max_length=0)


if __name__ == "__main__":
    main()
