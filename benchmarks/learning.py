"""Whether speed costs learning: the demo's PPO with single optimisations turned off or on, over several seeds.

    python benchmarks/learning.py [--variants default unpacked ...] [--seeds 1 2 3] [--plot FILE.svg] [--json FILE]

Data, base model, SFT and reward model are made once, as `make demo` does, and kept in the output folder, as are
finished runs, for the next time with the same options. Nothing here depends on how busy the machine is.
docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
from common import json_path, plot_path, print_table, write_json

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY / "examples" / "demo"))

import run_demo  # noqa: E402 (found by the line above)
from stages import Demo  # noqa: E402

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument, seed_argument  # noqa: E402
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm  # noqa: E402
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics  # noqa: E402

LAST = 3  # steps that the reward at the end is averaged over


@dataclasses.dataclass(frozen=True)
class Variant:
    """A description, and overrides of both jobs' configs in addition to the demo's."""

    what: str
    actor: Sequence[str] = ()
    critic: Sequence[str] = ()


_ONE_BY_ONE = ("model.micro_batch_size=1", "model.forward_micro_batch_size=1")
_ONE_UPDATE = ("model.global_batch_size=256",)
_NEVER = ("model.keep_activations=never",)
_BF16 = ("trainer.precision=bf16",)
_APART = ("trainer.ppo.rollout_devices=1",)
_AHEAD = (*_APART, "trainer.ppo.staleness=1", "trainer.ppo.in_flight=wait")
_OF_STEP = ("trainer.ppo.trust_region=step", "trainer.ppo.importance_weight_cap=2")
_OF_SAMPLING = ("trainer.ppo.trust_region=sampling", "trainer.ppo.importance_weight_cap=null")
_OF_BOTH = (*_OF_STEP[1:], "trainer.ppo.trust_region=both")
VARIANTS = {
    "default": Variant("the demo as it is"),
    "unpacked": Variant(
        "each sequence in a pass of its own",
        ("model.micro_batch_size=1", "model.ppo.forward_micro_batch_size=1"),
        _ONE_BY_ONE,
    ),
    "token-budget": Variant(
        "micro batches of at most 512 tokens",
        ("model.max_tokens_per_micro_batch=512",),
        ("model.max_tokens_per_micro_batch=512",),
    ),
    "no-queue": Variant("each rank generates its own share", ("trainer.ppo.batch_iterator.use_flask=False",)),
    "torch-step": Variant("generation without the native step", ("trainer.ppo.generation.step=torch",)),
    "engine-logprobs": Variant("the engine's log-probs as the policy's", ("trainer.ppo.policy_logprobs=engine",)),
    "bf16": Variant("bf16 in both jobs", _BF16, _BF16),
    "kept": Variant(
        "one update per step, of all rollouts, by the passes kept from log-probs and values", _ONE_UPDATE, _ONE_UPDATE
    ),
    "not-kept": Variant(
        "the same with forward passes of its own",
        (*_ONE_UPDATE, "model.ppo.keep_activations=never"),
        (*_ONE_UPDATE, *_NEVER),
    ),
    "kept-bf16": Variant("kept, in bf16", (*_ONE_UPDATE, *_BF16), (*_ONE_UPDATE, *_BF16)),
    "ahead": Variant(
        "rollouts a step old, made by a rank of its own: clipped around the step's weights, importance weights up to 2",
        (*_AHEAD, *_OF_STEP),
    ),
    "ahead-sampling": Variant("clipped around the weights that sampled instead", (*_AHEAD, *_OF_SAMPLING)),
    "ahead-engine": Variant(
        "the same, with the engine's log-probs as the policy's",
        (*_AHEAD, "trainer.ppo.policy_logprobs=engine", "trainer.ppo.importance_weight_cap=null"),
    ),
    "ahead-both": Variant("ahead, clipped around both", (*_AHEAD, *_OF_BOTH)),
    "ahead-tokens": Variant(
        "ahead, without tokens whose ratio is beyond [0.5, 2]",
        (*_AHEAD, *_OF_STEP, "trainer.ppo.importance_token_bounds=[0.5,2]"),
    ),
    "ahead-sequences": Variant(
        "ahead, without responses whose mean ratio is beyond [0.9, 1.1]",
        (*_AHEAD, *_OF_STEP, "trainer.ppo.importance_sequence_bounds=[0.9,1.1]"),
    ),
    "ahead-kl": Variant(
        "ahead-sampling, with a KL penalty of 0.1 towards what sampled",
        (*_AHEAD, *_OF_SAMPLING, "trainer.ppo.sampling_kl=0.1"),
    ),
    "ahead-tight": Variant(
        "ahead-sampling, with half the clip range", (*_AHEAD, *_OF_SAMPLING, "model.ppo.ratio_eps=0.1")
    ),
    **{
        f"in-flight-{k}-{name}": Variant(
            f"{k} steps ahead, responses go on with newer weights: clipped around {what}",
            (*_APART, f"trainer.ppo.staleness={k}", "trainer.ppo.in_flight=keep", *loss),
        )
        for k in (1, 2, 4)
        for name, what, loss in (
            ("step", "the step's weights", _OF_STEP),
            ("sampling", "the weights that sampled", _OF_SAMPLING),
            ("both", "both", _OF_BOTH),
            ("tight", "both, half as far", (*_OF_BOTH, "model.ppo.ratio_eps=0.1")),
            ("kl", "both, with a KL penalty of 0.1 towards what sampled", (*_OF_BOTH, "trainer.ppo.sampling_kl=0.1")),
        )
    },
    "ahead-half-rate": Variant(
        "ahead, with half the learning rate",
        (*_AHEAD, *_OF_STEP, "model.optim.lr=5e-5", "model.optim.sched.min_lr=2.5e-5"),
    ),
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one run learned.

    Attributes:
        rewards: mean reward of each step's rollouts.
        accuracy: share of held-out questions answered right, sampled.
        kl: KL penalty per token of the last step's rollouts.
    """

    rewards: list[float]
    accuracy: float
    kl: float

    @property
    def reward(self) -> float:
        """Mean reward of the last steps."""
        return statistics.fmean(self.rewards[-LAST:])


def main() -> None:
    args = parse_arguments()
    exit_on_sigterm()
    demo, sft, reward_model = prepare(args)
    outcomes: dict[str, list[Outcome]] = {}
    for name in args.variants:
        outcomes[name] = [run(demo, args, name, seed, sft, reward_model) for seed in args.seeds]
    print_report(outcomes)
    write_json(
        args.json,
        {
            "settings": {key: str(value) for key, value in vars(args).items()},
            "variants": {name: [dataclasses.asdict(run) for run in runs] for name, runs in outcomes.items()},
        },
    )
    if args.plot:
        plot(outcomes, args.plot)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=seed_argument, default=(1, 2, 3), help="of PPO")
    parser.add_argument("--output", type=output_folder_argument, default=REPOSITORY / "results" / "learning")
    parser.add_argument(
        "--plot", type=plot_path, help="write the reward curves here; the name's ending chooses the format"
    )
    parser.add_argument("--json", type=json_path)
    run_demo.add_options(parser)
    args = parser.parse_args()
    run_demo.check_options(parser, args)
    return args


def prepare(args: argparse.Namespace) -> tuple[Demo, Path, Path]:
    """Make what all runs start from, unless it is there: data, SFT model, reward model.

    Raises:
        SystemExit: what is there was made with other options.
    """
    output = args.output.resolve()
    sft = output / "sft" / "checkpoints" / "megatron_gpt_sft.nemo"
    reward_model = output / "reward_model" / "checkpoints" / "megatron_gpt.nemo"
    record, options = output / "options.json", demo_options(args)
    if reward_model.exists():
        written = json.loads(record.read_text()) if record.exists() else {}
        different = [f"--{name.replace('_', '-')}" for name in options if options[name] != written.get(name)]
        if different:
            what = f"another {', '.join(different)}" if written else "options that are not on record"
            raise SystemExit(f"what is in {output} was made with {what}: name another --output, or delete it")
        return Demo(output, num_stages=0, keep=True), sft, reward_model
    demo = Demo(output, num_stages=3)
    record.write_text(json.dumps(options))
    run_demo.train_sft(demo, args, run_demo.make_base_model(demo, args))
    run_demo.train_reward_model(demo, args, sft)
    return demo, sft, reward_model


def demo_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that models and runs in the output folder depend on."""
    parser = argparse.ArgumentParser()
    run_demo.add_options(parser)
    return {name: getattr(args, name) for name in vars(parser.parse_args([]))}


def run(demo: Demo, args: argparse.Namespace, name: str, seed: int, sft: Path, reward_model: Path) -> Outcome:
    """Make one PPO run and its evaluation, unless they are there; an interrupted run goes on."""
    folder, variant = f"{name}_{seed}", VARIANTS[name]
    evaluation = demo.directory / folder / "evaluation.json"
    if not evaluation.exists():
        policy = run_demo.run_ppo(
            demo,
            argparse.Namespace(**{**vars(args), "seed": seed}),
            sft,
            reward_model,
            folder,
            variant.actor,
            [*variant.critic, f"model.seed={seed}"],
        )
        run_demo.evaluate_model(demo, args, policy, reward_model, evaluation)
    summary = json.loads(evaluation.read_text())["summary"]
    curves = read_metrics(demo.directory / folder / "actor")
    rewards = [value for _, value in curves["train_rollouts/rewards"]]
    outcome = Outcome(rewards, summary["accuracy"], curves["train_rollouts/init_policy_kl"][-1][1])
    print(
        f"{name}, seed {seed}: reward {rewards[0]:.2f} -> {outcome.reward:.2f}, accuracy {outcome.accuracy:.1%}",
        file=sys.stderr,
        flush=True,
    )
    return outcome


def print_report(outcomes: dict[str, list[Outcome]]) -> None:
    """Means and standard deviations over the seeds, and differences to the first variant, seed by seed."""
    reference = next(iter(outcomes.values()))
    rows = []
    for name, runs in outcomes.items():
        row = [name]
        for figure in ("accuracy", "reward", "kl"):
            values = [getattr(one, figure) for one in runs]
            differences = [value - getattr(other, figure) for value, other in zip(values, reference, strict=True)]
            row += [mean_and_deviation(values), mean_and_deviation(differences) if runs is not reference else ""]
        rows.append([*row, VARIANTS[name].what])
    header = ("", "accuracy", "difference", "reward", "difference", "KL", "difference", "what")
    print_table(header, rows)


def mean_and_deviation(values: Sequence[float]) -> str:
    deviation = f" ±{statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{deviation}"


def plot(outcomes: dict[str, list[Outcome]], path: Path) -> None:
    """Each variant's reward by step: mean over the seeds, and the range."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.6))
    for name, runs in outcomes.items():
        steps: list[Any] = list(zip(*(one.rewards for one in runs), strict=True))
        numbers = range(1, len(steps) + 1)
        (line,) = axis.plot(numbers, [statistics.fmean(step) for step in steps], label=name)
        axis.fill_between(numbers, list(map(min, steps)), list(map(max, steps)), color=line.get_color(), alpha=0.15)
    axis.set(xlabel="PPO step", ylabel="mean reward")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
