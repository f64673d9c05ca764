"""Plan a run of reinforcement learning before it is paid for: ``nsa plan`` (docs/scaling.md)."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.placement.candidates import (
    STRATEGIES,
    Candidate,
    Cluster,
    DoesNotFitError,
    Fit,
    Run,
    candidates,
    pass_tokens,
    predicted,
    scored_together,
)
from nemo_style_aligner.tools.placement.costs import Sample
from nemo_style_aligner.tools.placement.plan import Plan, PlannedJob
from nemo_style_aligner.tools.placement.rates import DEVICES, Device, measured_here
from nemo_style_aligner.tools.placement.run_rates import as_in_run
from nemo_style_aligner.tools.placement.workload import Lengths, draw_steps, find_model
from nemo_style_aligner.wording import counted

T = TypeVar("T")

Prediction = tuple[dict[str, float], Candidate]


def make_plan(options: SimpleNamespace) -> None:
    """Do what ``nsa plan`` has been asked for, by its options.

    Raises:
        UserError: options that cannot be, a line for each; or nothing fits.
    """
    run, cluster = _asked(options)
    found, reasons = plans(run, cluster, options.strategies or STRATEGIES, options.staleness)
    if options.json:
        listed = [
            dataclasses.asdict(plan) | {"in_flight": plan.in_flight, "seconds": phases, "bytes": memory_of(plan)}
            for phases, plan in found
        ]
        print(json.dumps({"plans": listed, "without": reasons}, indent=1))
    else:
        _report(run, cluster, found, reasons)
    if not found:
        raise UserError("nothing fits" + (f", so {options.write} is not written" if options.write else ""))
    if options.write:
        plan, comment = written_plan(run, cluster, options, recommended(found))
        plan.write(options.write, comment)
        launch = f"nsa launch {options.write} --with slurm"
        print(f"\nwrote {options.write}; with models and data filled in: {launch}", file=sys.stderr)


def _asked(options: SimpleNamespace) -> tuple[Run, Cluster]:
    """What is to be planned, on what."""
    problems: list[str] = []

    def read(reader: Callable[[], T]) -> T | None:
        try:
            return reader()
        except UserError as error:
            problems.append(str(error))
            return None

    if options.rollouts % options.global_batch_size or options.rollouts % options.group:
        problems.append(
            f"--rollouts {options.rollouts} must be a multiple of --global-batch-size {options.global_batch_size} "
            f"and of --group {options.group}"
        )
    parts = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x(\w+)", options.cluster.lower())
    if parts is None:
        problems.append(f"--cluster {options.cluster}: give nodes, devices of each and their type, such as 12x8xh100")
    itemsize = 2 if options.precision == "bf16" else 4
    kind = parts[3] if parts else ""
    if itemsize == 4 and kind != "here" and not options.as_in:
        problems.append("--precision 32: the tables have rates of bf16 alone; give --as-in, or `here` as the type")
    policy, prompts, responses = (
        read(lambda: find_model(options.model)),
        read(lambda: Lengths.parse(options.prompts, "--prompts")),
        read(lambda: Lengths.parse(options.lengths, "--lengths")),
    )
    critic = read(lambda: find_model(options.critic_model or options.model)) if options.estimator == "gae" else None
    device = DEVICES.get(kind)
    if parts and kind == "here":
        device = measured_here(itemsize, int(parts[2]))
    elif parts and device is None:
        problems.append(
            f"no rates of {kind!r}: give one of {', '.join(DEVICES)}, or `here`, which measures this machine"
        )
    if options.as_in and policy and device:
        known, shape = device, policy
        device = read(lambda: as_in_run(known, options.as_in, shape, itemsize))
    if problems or not (policy and prompts and responses and parts and device):
        raise UserError("\n  ".join(dict.fromkeys(problems)))
    count = options.steps + 2 * max(options.staleness)  # the first and the last are not counted
    steps = draw_steps(prompts, responses, options.rollouts, options.group, count, options.seed)
    batch = (options.global_batch_size, options.group, options.micro_batch_tokens, itemsize)
    run = Run(policy, critic, steps, *batch, Sample(prompts.most, responses.most))
    return run, Cluster(int(parts[1]), int(parts[2]), device, options.jobs == "two")


def plans(
    run: Run, cluster: Cluster, strategies: Sequence[str], staleness: Sequence[int]
) -> tuple[list[Prediction], dict[str, str]]:
    """All plans that fit with what they take, the fastest first; and why a strategy has none."""
    found: list[Prediction] = []
    reasons: dict[str, str] = {}
    for strategy in strategies:
        if strategy == "interleave" and run.critic is None:
            reasons[strategy] = "the same as flatten: there is no critic"
            continue
        try:
            found += [(predicted(run, cluster, plan), plan) for plan in candidates(run, cluster, strategy, staleness)]
        except DoesNotFitError as reason:
            reasons[strategy] = f"does not fit. {reason}"
    return sorted(found, key=lambda each: each[0]["step"]), reasons


def recommended(found: Sequence[Prediction]) -> Prediction:
    """The fastest of those whose rollouts are of the current weights; the fastest of all if there are no such."""
    return next((each for each in found if not each[1].staleness), found[0])


# ---- what is printed ----------------------------------------------------------------------------

_PRICE = "Older rollouts teach less, most from 2 steps on (docs/performance.md, Learning)"
_PHASES = ("generate", "score", "logprobs", "init_logprobs", "train", "critic_wait", "critic_train_wait", "refit")


def _report(run: Run, cluster: Cluster, found: Sequence[Prediction], reasons: dict[str, str]) -> None:
    device = cluster.device
    responses = [sample.response for step in run.steps for sample in step]
    mean = sum(responses) / len(responses)
    print(f"{cluster.nodes} x {cluster.devices} {device.name} ({device.source})")
    print(f"{len(run.steps[0])} responses per step, of {mean:.0f} tokens on average and {max(responses)} at most\n")
    best: dict[tuple[str, int], Prediction] = {}
    for each in found:
        best.setdefault((each[1].strategy, each[1].staleness), each)
    names = ["step", *(name for name in _PHASES if any(phases.get(name) for phases, _ in best.values()))]
    rows = [["seconds", *names, "GB", "engines idle"]]
    for phases, plan in best.values():
        fullest = max(sum(used.values()) for used in memory_of(plan).values()) + device.reserved
        seconds = [f"{phases.get(name, 0.0):.1f}" for name in names]
        name = plan.strategy + _aged(plan)
        rows.append([name, *seconds, f"{fullest / 1e9:.0f}", f"{phases['idle']:.0%}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows if found else []:
        print(
            first.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)),
            sep="  ",
        )
    for strategy, reason in reasons.items():
        print(f"{strategy}: {reason}")
    if found:
        (phases, plan), fastest = recommended(found), found[0]
        print(f"\nRecommended: {plan.strategy}{_aged(plan)}")
        print("\n".join(f"  {line}" for line in picture(plan, cluster)))
        if plan.staleness:
            print(f"  in_flight={plan.in_flight}: responses under way go on with newer weights. {_PRICE}")
        elif (aged := fastest[1]).staleness:
            instead = f"{aged.strategy} with --staleness {aged.staleness}, in_flight={aged.in_flight}"
            print(f"  {instead}: {fastest[0]['step']:.1f} s per step in place of {phases['step']:.1f}. {_PRICE}")


def _aged(plan: Candidate) -> str:
    return f", staleness {plan.staleness}" if plan.staleness else ""


def memory_of(plan: Candidate) -> dict[str, Mapping[str, float]]:
    """Bytes of a rank by kind of rank and use."""
    kinds = {"actor": plan.actor.used, "generating": plan.engine_used}
    if plan.critic_apart is not None:
        kinds["critic"] = plan.critic_apart.used
    return {kind: used for kind, used in kinds.items() if used}


def picture(plan: Candidate, cluster: Cluster) -> list[str]:
    """Who is where: a line for each kind of rank, with GB of each at its fullest and what is given up for memory."""
    training = plan.actor.layout.ranks
    lines = [_line(f"actor: ranks 0-{training - 1}", plan.actor, plan.actor.used, cluster.device)]
    if plan.generating:
        where = f"that only generate: ranks {training}-{training + plan.generating - 1}"
        lines.append(_line(where, None, plan.engine_used, cluster.device))
    if plan.critic_apart is not None:
        where = f"critic: {counted(plan.critic_ranks, 'ranks')} of its own"
        lines.append(_line(where, plan.critic_apart, plan.critic_apart.used, cluster.device))
    elif plan.critic is not None:
        lines.append(_line("critic: on the same ranks", plan.critic, {}, cluster.device))
    lines.append(f"{counted(plan.engines, 'engines')} of TP {plan.engine_tp} with {counted(plan.slots, 'slots')}")
    if idle := cluster.nodes * cluster.devices - plan.actor_ranks - plan.critic_ranks:
        lines.append(f"not used: {counted(idle, 'devices')}, over which updates cannot be divided evenly")
    return lines


def _line(who: str, fit: Fit | None, used: Mapping[str, float], device: Device) -> str:
    text = who + (f", {fit.layout}" if fit else "")
    if used:
        total = (sum(used.values()) + device.reserved) / 1e9
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in used.items() if size >= 5e7)
        text += f"; {total:.0f} of {device.memory / 1e9:.0f} GB ({parts})"
    given = [f"{name}={value}" for name, value in dataclasses.asdict(fit.saved).items() if value] if fit else []
    return text + (f"; {', '.join(given)}" if given else "")


# ---- what is written ----------------------------------------------------------------------------


def written_plan(run: Run, cluster: Cluster, options: SimpleNamespace, fastest: Prediction) -> tuple[Plan, str]:
    """A plan for ``nsa launch`` and the comment at its top; paths of models and data are the user's to fill in."""
    phases, plan = fastest
    archives, jobs = "pretrained_checkpoint.restore_from_path", dict[str, PlannedJob]()
    keys, ranks = _actor_keys(run, plan, options), plan.actor_ranks
    if plan.critic_apart is not None and cluster.two_jobs:
        size = _machines(plan.critic_ranks, cluster)
        of_critic = _critic_keys(run, plan.critic_apart)
        critic = {"script": "serve_ppo_critic.py", "overrides": of_critic, "serves": ["actor"]}
        jobs["critic"] = PlannedJob(**critic, **size)
    elif plan.critic is not None:
        archives, ranks = f"{archives}, critic.{archives}", ranks + plan.critic_ranks
        keys |= _keys_of_critic_in_job(run, plan, plan.critic)
    jobs["actor"] = PlannedJob(script="train_gpt_ppo_actor.py", overrides=keys, **_machines(ranks, cluster))
    lines = [f"Predicted: {phases['step']:.1f} seconds per step on {options.cluster} ({cluster.device.source})."]
    lines += [*picture(plan, cluster), f"Add {archives}, and the actor's model.data.data_prefix."]
    return Plan(Path(options.results_dir), jobs), "\n".join(lines)


def _machines(ranks: int, cluster: Cluster) -> dict[str, Any]:
    """Nodes, and devices of each, for so many ranks: whole machines or a part of one."""
    nodes, devices = (ranks // cluster.devices, cluster.devices) if ranks > cluster.devices else (1, ranks)
    return {"nodes": nodes, "devices": devices}


def _actor_keys(run: Run, plan: Candidate, options: SimpleNamespace) -> dict[str, Any]:
    """Keys of the actor's config, without those of a critic in its job."""
    saved = plan.actor.saved
    keys = _model_keys(run, plan.actor) | {
        "model.ppo.num_rollout_samples": len(run.steps[0]) // run.group,
        "model.ppo.length_params.max_length": run.longest.response,
        "model.ppo.offload_adam_states": saved.offload,
        "trainer.ppo.estimator": options.estimator,
        "trainer.ppo.num_rollouts_per_prompt": run.group,
        "trainer.ppo.batch_iterator.use_flask": True,
        "trainer.ppo.reference_policy_placement": "swap" if saved.swap else "resident",
        "trainer.ppo.trt_llm.unload_engine_train": saved.unload and not plan.generating,
        "trainer.ppo.generation.tensor_parallel_size": plan.engine_tp,
        "trainer.ppo.generation.num_slots": plan.slots,
        "trainer.ppo.generation.kv_cache_tokens": max(_length(run), round(plan.slots * run.held_tokens)),
    }
    if plan.generating:
        keys |= {"trainer.ppo.rollout_devices": plan.generating, "trainer.ppo.staleness": plan.staleness}
    if plan.in_flight:
        keys["trainer.ppo.in_flight"] = plan.in_flight
    return keys


_SIZES = ("tensor_model", "context", "pipeline_model", "expert_model", "expert_tensor")


def _keys_of_critic_in_job(run: Run, plan: Candidate, critic: Fit) -> dict[str, Any]:
    """Keys of the actor's config about a critic in its job, with ranks of its own or on those that train."""
    of_policy = {"model.encoder_seq_length", "trainer.precision"}
    if plan.critic_apart is None:
        of_policy |= {f"model.{name}_parallel_size" for name in _SIZES}
        of_policy |= {"model.sequence_parallel", "trainer.ppo.inference_micro_batch_size"}
    keys = {f"critic.{key}": value for key, value in _critic_keys(run, critic).items() if key not in of_policy}
    where = {"trainer.ppo.critic_devices": plan.critic_ranks} if plan.critic_apart else {"placement": plan.strategy}
    return keys | where


def _critic_keys(run: Run, critic: Fit) -> dict[str, Any]:
    """Keys of the critic's job."""
    layout, together = critic.layout, scored_together(critic.layout)
    return _model_keys(run, critic) | {
        "model.offload_adam_states": critic.saved.offload,
        "model.rm_placement": "swap" if critic.saved.swap else "resident",
        "model.forward_max_tokens_per_micro_batch": pass_tokens(run, layout, together),
        "trainer.ppo.inference_micro_batch_size": together // layout.dp,
    }


def _model_keys(run: Run, fit: Fit) -> dict[str, Any]:
    of_experts = {
        "model.expert_model_parallel_size": fit.layout.ep,
        "model.expert_tensor_parallel_size": fit.layout.etp or None,
    }
    return (of_experts if fit.layout.ep > 1 else {}) | {
        "model.tensor_model_parallel_size": fit.layout.tp,
        "model.pipeline_model_parallel_size": fit.layout.pp,
        "model.context_parallel_size": fit.layout.cp,
        "model.sequence_parallel": fit.layout.tp > 1,
        "model.global_batch_size": run.update,
        "model.max_tokens_per_micro_batch": pass_tokens(run, fit.layout, run.update),
        "model.encoder_seq_length": _length(run),
        "model.activations_checkpoint_granularity": fit.saved.granularity,
        "trainer.precision": "bf16" if run.itemsize == 2 else 32,
    }


def _length(run: Run) -> int:
    return -(-run.longest.tokens // 64) * 64
