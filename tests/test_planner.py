"""The planner as a user starts it, and the simulator under it against what can be computed by hand."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.tools.cli.main import nsa, run
from nemo_style_aligner.tools.placement.costs import Model, Sample, largest_share
from nemo_style_aligner.tools.placement.plan import read_plan
from nemo_style_aligner.tools.placement.rates import DEVICES, Device, measured_here
from nemo_style_aligner.tools.placement.run_rates import as_in_run
from nemo_style_aligner.tools.placement.simulator import Engines, SimulatedJob, StepCosts, simulate
from nemo_style_aligner.tools.placement.workload import MODELS, Lengths, draw_steps
from nemo_style_aligner.trainer.config.loading import check_config, load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.jobs.placement import critic_config
from nemo_style_aligner.trainer.models.sizes import Layout

Main = Callable[..., None]

REPOSITORY = Path(__file__).parents[1]
H100, H200 = DEVICES["h100"], DEVICES["h200"]


def steady(count: int, slots: int = 1, **settings: object) -> Engines:
    """Engines whose every pass takes a second, and whose prompts take none."""
    return Engines(count, slots, decode=lambda batch, tokens: 1.0, prefill=lambda tokens: 0.0, **settings)  # type: ignore[arg-type]


def samples(*responses: int) -> list[Sample]:
    return [Sample(10, response) for response in responses]


def nothing(_: object) -> StepCosts:
    return StepCosts()


# ---- the simulator ------------------------------------------------------------------------------


def test_a_slot_is_filled_again_as_soon_as_its_response_ends() -> None:
    lengths = samples(5, 1, 1, 1, 1)
    (step,) = simulate(SimulatedJob(steady(1, 2), nothing), [lengths])
    assert step["generate"] == 5  # the short ones follow each other beside the long one
    (step,) = simulate(SimulatedJob(steady(1, 2, in_flight=False), nothing), [lengths])
    assert step["generate"] == 5 + 1 + 1


def test_decoding_is_charged_by_responses_and_the_tokens_before_them() -> None:
    def decode(batch: int, tokens: float) -> float:
        return 100 * batch + tokens

    (step,) = simulate(SimulatedJob(Engines(1, 2, decode, lambda tokens: 1000 * tokens), nothing), [samples(2, 4)])
    # Two passes with both: on average (10 + 1) tokens before each; then two with one: 10 + 2 + 1.
    assert step["generate"] == 20 * 1000 + 2 * (200 + 2 * 11) + 2 * (100 + 13)


def test_samples_of_one_prompt_compute_it_once() -> None:
    engines = Engines(1, 4, lambda batch, tokens: 0.0, lambda tokens: tokens, samples_per_prompt=2)
    (step,) = simulate(SimulatedJob(engines, nothing), [samples(3, 3, 3, 3)])
    assert step["generate"] == 20


def test_a_straggler_gets_less_from_the_queue_and_holds_up_fixed_shares() -> None:
    lengths = samples(*[10] * 40)
    times = {
        queue: simulate(SimulatedJob(steady(4, slowness=(4.0,), queue=queue), nothing), [lengths])[0]["generate"]
        for queue in (True, False)
    }
    assert times[False] == 400
    assert times[True] <= 160


@pytest.mark.parametrize("workers", [2, 16, 128, 1024])
def test_the_queue_comes_within_5_percent_of_the_lower_bound(workers: int) -> None:
    """Longest first, 16 long-tailed items for each worker; in order of arrival it does not (docs/scaling.md)."""
    lengths = Lengths(330, 1.0, 2048).draw(16 * workers, random.Random(1))
    bound = max(sum(lengths) / workers, max(lengths))
    (step,) = simulate(SimulatedJob(steady(workers), nothing, foresight=True), [samples(*lengths)])
    assert bound <= step["generate"] <= 1.05 * bound


def test_scores_come_beside_generation_and_the_critic_trains_beside_the_policy() -> None:
    costs = StepCosts(logprobs=1, init_logprobs=1, train=5, train_critic=7)
    job = SimulatedJob(steady(1), lambda _: costs, score=lambda scored: 3.0, score_batch=1)
    (step,) = simulate(job, [samples(10, 10)])
    assert step == pytest.approx(
        {"refit": 0, "generate": 20, "score": 0, "logprobs": 1, "init_logprobs": 1, "critic_wait": 1, "train": 5,
         "critic_train_wait": 2, "step": 30, "idle": 0}
    )  # fmt: skip


def test_staleness_hides_generation_behind_training() -> None:
    costs = StepCosts(refit=2, train=30)
    steps = simulate(SimulatedJob(steady(1), lambda _: costs, staleness=1), [samples(20)] * 3)
    assert [step["step"] for step in steps] == [2 + 20 + 30, 2 + 30, 30]
    assert [step["generate"] for step in steps] == [20, 0, 0]


def test_steps_ahead_even_out_rounds_of_different_lengths() -> None:
    """Rounds of 10 and 50 s beside training of 30: one step ahead every other step waits, two steps ahead none."""
    costs, rounds = StepCosts(train=30), [samples(length) for length in [10, 50] * 4]
    for staleness, waits in ((1, [10, 20, 0, 20, 0, 20, 0, 20]), (2, [10, 20, 0, 0, 0, 0, 0, 0])):
        steps = simulate(SimulatedJob(steady(1), lambda _: costs, staleness=staleness), rounds)
        assert [step["generate"] for step in steps] == waits, staleness


def test_a_long_response_holds_up_no_step_if_it_goes_on() -> None:
    """Of 2 responses a step, one is long: by rounds all steps take as long as that."""
    rounds, costs = [samples(2, 20)] * 8, StepCosts(train=1)
    by_rounds = simulate(SimulatedJob(steady(1, 4), lambda _: costs, staleness=1), rounds)
    assert [step["generate"] for step in by_rounds[1:]] == [19] * 7
    kept = simulate(SimulatedJob(steady(1, 4), lambda _: costs, staleness=1, keeps=True), rounds)
    # 4 responses are under way, two of them long: a pair ends every 2 or 18 passes, and all have been trained at last.
    assert sum(step["generate"] for step in kept) < 0.7 * sum(step["generate"] for step in by_rounds)
    # With 8 under way, of three steps more, 4 short ones end at once.
    wider = SimulatedJob(steady(1, 8), lambda _: costs, staleness=3, keeps=True)
    assert [step["generate"] for step in simulate(wider, rounds)[:3]] == [2, 0, 0]
    on_policy = SimulatedJob(steady(1, 4), lambda _: costs)
    assert simulate(dataclasses.replace(on_policy, keeps=True), rounds) == simulate(on_policy, rounds)


def test_scores_of_the_next_round_wait_for_a_critic_that_trains() -> None:
    costs = StepCosts(train=1, train_critic=100)
    job = SimulatedJob(steady(1), lambda _: costs, score=lambda scored: 1.0, staleness=1)
    _, second = simulate(job, [samples(1), samples(1)])
    assert second["step"] >= 100


def test_equal_arguments_give_equal_times_and_a_thousand_engines_take_seconds() -> None:
    model = Model(MODELS["8b"], device=H100)
    engines = Engines(1000, 16, lambda b, kv: model.decode(1, b, kv), lambda tokens: model.prefill(1, tokens))
    steps = draw_steps(Lengths(100), Lengths(330, 1.0, 2048), 8000, 8, 2)
    assert simulate(SimulatedJob(engines, nothing), steps) == simulate(SimulatedJob(engines, nothing), steps)


# ---- costs --------------------------------------------------------------------------------------


def test_decode_steps_are_those_that_were_measured() -> None:
    """Kernels of NVIDIA's tables put together for 70B on 8 H100, and this project's engine with 8B on one H200."""
    model = Model(MODELS["70b"], device=H100)
    measured = {1: 9.9, 8: 10.42, 16: 10.75, 32: 12.25, 64: 14.48, 128: 17.5, 256: 23.28}
    for batch, milliseconds in measured.items():
        assert 1e3 * model.decode(8, batch, 800 * batch) == pytest.approx(milliseconds, rel=0.10)
    assert 1e3 * Model(MODELS["8b"], device=H200).decode(1, 1, 256) == pytest.approx(4.85, rel=0.05)


def test_layers_with_a_window_read_no_keys_before_it() -> None:
    whole = MODELS["8b"]
    half = dataclasses.replace(whole, sliding_window=128, windowed_layers=tuple(range(0, 32, 2)))
    (first, last), (begun, ended) = (
        [Model(shape, device=H100).decode(1, 8, 8 * tokens) for tokens in (100, 4100)] for shape in (whole, half)
    )
    assert begun == first and ended - begun == pytest.approx((4000 + 28) / 8000 * (last - first))


def test_parameters_of_ranks_add_up_to_the_model() -> None:
    a = MODELS["70b"]
    assert a.num_parameters == pytest.approx(70.6e9, rel=0.01)
    model = Model(a, device=H100)
    assert model.weights(Layout()) == pytest.approx(2 * a.num_parameters)
    assert model.weights(Layout(8, 1)) * 8 == pytest.approx(2 * a.num_parameters)
    assert model.optimizer(Layout(8, 1, 4)) == pytest.approx(12 * a.num_parameters / 32)


def test_experts_are_held_by_the_ranks_that_share_them_and_read_where_tokens_go() -> None:
    a = MODELS["qwen3-30b-a3b"]
    assert a.num_parameters == pytest.approx(30.5e9, rel=0.01)
    assert a.active_layer_parameters + 2 * a.output_parameters == pytest.approx(3.35e9, rel=0.01)
    model, whole = Model(a, device=H100), 2 * a.num_parameters
    assert model.weights(Layout()) == pytest.approx(whole)
    assert model.weights(Layout(8)) * 8 == pytest.approx(whole)  # as an engine cuts them, each expert over all ranks
    assert model.weights(Layout(1, 1, 8, ep=8, etp=1)) == pytest.approx(whole - 2 * a.expert_parameters * 7 / 8)
    assert model.optimizer(Layout(1, 1, 8, ep=8, etp=1)) == pytest.approx(12 * a.num_parameters / 8)
    one, many = (model.itemsize * a.layer_parameters_read(tokens) for tokens in (1, 1000))
    assert one == pytest.approx(2 * a.active_layer_parameters) and many == pytest.approx(2 * a.layer_parameters)
    assert model.decode(1, 1, 0) < model.decode(1, 8, 0) / 3  # eight tokens read nearly eight times as many experts
    steps = draw_steps(Lengths(512), Lengths(512), 64, 8, 1)[0]
    exchanged, alone = (model.forward(Layout(dp=8, ep=ep, etp=1), steps, 8192) for ep in (8, 1))
    assert exchanged > alone


def test_more_ranks_take_less_time_but_not_in_proportion() -> None:
    model, steps = Model(MODELS["8b"], device=H100), draw_steps(Lengths(256), Lengths(330, 1.0, 2048), 256, 1, 1)[0]
    times = [model.training(Layout(1, 1, dp), steps, 8192, 128) for dp in (8, 16, 32)]
    assert times[0] > times[1] > times[2] > times[0] / 4
    few = steps[:8]  # a sample for each rank: stages wait for one another, and nothing is gained
    assert model.forward(Layout(1, 2, 8), few, 8192) >= model.forward(Layout(1, 1, 8), few, 8192)


def test_a_prompt_is_paid_once_for_a_group() -> None:
    """As long as groups, or parts of them, keep all ranks busy."""
    alone, grouped = (Model(MODELS["8b"], device=H100, group=group) for group in (1, 8))
    steps = draw_steps(Lengths(512), Lengths(512), 256, 8, 1)[0]
    saved = [grouped.forward(Layout(dp=dp), steps, 8192) / alone.forward(Layout(dp=dp), steps, 8192) for dp in (1, 256)]
    assert saved[0] == pytest.approx((1 + 8) / 16, rel=0.05) and saved[1] == 1


def test_the_largest_share_is_that_of_longest_first() -> None:
    assert largest_share([5, 4, 3, 3, 3], 2) == 10
    assert largest_share([7, 1], 4) == 7


def test_lengths_have_the_mean_that_is_asked_for(tmp_path: Path) -> None:
    drawn = Lengths.parse("lognormal:mean=330,sigma=1,max=2048").draw(50_000, random.Random(3))
    assert sum(drawn) / len(drawn) == pytest.approx(330, rel=0.02)
    assert max(drawn) == 2048
    file = tmp_path / "lengths.jsonl"
    file.write_text('5\n{"length": 7}\n')
    assert set(Lengths.parse(str(file)).draw(20, random.Random(0))) == {5, 7}


# ---- the command line ---------------------------------------------------------------------------


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    """``nsa plan``, which ends with this status."""

    def call(arguments: list[str], status: int = 0) -> None:
        monkeypatch.setattr(sys, "argv", ["nsa", "plan", *arguments])
        with pytest.raises(SystemExit) as ended:
            run(nsa, "nsa")
        assert (ended.value.code or 0) == status

    return call


SMALL = ["--cluster", "2x8xh100", "--rollouts", "256", "--steps", "1"]


@pytest.mark.parametrize("jobs", ["one", "two"])
@pytest.mark.parametrize("strategy", ["flatten", "interleave", "separate"])
def test_the_fastest_plan_is_written_for_the_launcher(
    main: Main, strategy: str, jobs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.yaml"
    wanted = ["--strategy", strategy, "--jobs", jobs, "--results-dir", str(tmp_path), "--write", str(file)]
    main(["--model", "8b", *SMALL, *wanted])
    said = capsys.readouterr().out
    assert strategy in said and "of 84 GB" in said
    plan = read_plan(file)
    is_apart = "of its own" in said
    assert is_apart or strategy != "interleave"
    assert list(plan.jobs) == (["critic", "actor"] if is_apart and jobs == "two" else ["actor"])
    ranks = {name: job.nodes * job.devices for name, job in plan.jobs.items()}
    assert sum(ranks.values()) <= 16
    keys = plan.jobs["actor"].overrides
    training = ranks["actor"] - keys.get("trainer.ppo.rollout_devices", 0) - keys.get("trainer.ppo.critic_devices", 0)
    cfg = _check_keys(keys, "gpt_ppo_actor", training)
    if "critic" not in plan.jobs:
        cfg.critic.pretrained_checkpoint = {"restore_from_path": "rm.nemo"}
        assert (
            critic_config(PPOActor.read(cfg)).model.global_batch_size == 128
        )  # which takes no key that is not its own
    assert plan.jobs["actor"].overrides["model.ppo.length_params.max_length"] == 2048  # whatever has been drawn
    if "critic" in plan.jobs:
        _check_keys(plan.jobs["critic"].overrides, "gpt_ppo_critic", ranks["critic"])


def _check_keys(overrides: Mapping[str, object], job: str, ranks: int) -> DictConfig:
    """The job's own check of keys, types and ranges accepts what was written."""
    cfg = load_defaults(job)
    for key, value in overrides.items():
        OmegaConf.update(cfg, key, value)
    problems = [problem for problem in check_config(cfg, job) if any(key in problem for key in overrides)]
    assert not problems
    assert ranks % (cfg.model.tensor_model_parallel_size * cfg.model.pipeline_model_parallel_size) == 0
    return cfg


def test_all_plans_as_json_the_fastest_first(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "8b", *SMALL, "--estimator", "grpo", "--group", "8", "--json"])
    content = json.loads(capsys.readouterr().out)
    steps = [plan["seconds"]["step"] for plan in content["plans"]]
    assert steps == sorted(steps) and len(steps) > 3
    assert {plan["strategy"] for plan in content["plans"]} == {"flatten", "separate"}
    assert "interleave" in content["without"]
    for plan in content["plans"]:
        assert all(sum(used.values()) <= H100.memory - H100.reserved for used in plan["bytes"].values())


def test_what_does_not_fit_is_told_with_bytes(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--model", "405b", "--cluster", "4x8xh100", "--rollouts", "128", "--steps", "1"], status=2)
    said, why = capsys.readouterr()
    assert why == "error: nothing fits\n"
    for strategy in ("flatten", "interleave", "separate"):
        assert f"{strategy}: does not fit. " in said
    assert "GB of 84 (weights" in said
    assert all("critic, TP" in line and "; actor, TP" in line for line in said.splitlines()[-2:])


def test_a_plan_whose_rollouts_are_old_is_named_with_its_price_and_written_only_if_asked_for(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.yaml"
    wanted = ["--model", "8b", *SMALL, "--strategy", "separate", "--results-dir", str(tmp_path), "--write", str(file)]
    main(wanted)
    said = capsys.readouterr().out
    assert "Recommended: separate\n" in said
    assert re.search(r"--staleness 1, in_flight=keep: \S+ s per step in place of .* Older rollouts teach less", said)
    keys = read_plan(file).jobs["actor"].overrides
    assert not keys.get("trainer.ppo.staleness") and "trainer.ppo.in_flight" not in keys
    main([*wanted, "--staleness", "1"])
    said = capsys.readouterr().out
    assert "Recommended: separate, staleness 1\n" in said and re.search(
        "in_flight=keep: .* Older rollouts teach less", said
    )
    keys = read_plan(file).jobs["actor"].overrides
    assert keys["trainer.ppo.staleness"] == 1 and keys["trainer.ppo.in_flight"] == "keep"


def test_a_dry_run_refuses_a_plan_that_is_not_filled_in(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As each of its jobs would: before that, models and data."""
    file = tmp_path / "plan.yaml"
    main(["--model", "8b", *SMALL, "--jobs", "two", "--strategy", "interleave", "--results-dir", str(tmp_path),
          "--write", str(file)])  # fmt: skip

    def dry_run() -> str:
        monkeypatch.setattr(sys, "argv", ["nsa", "launch", str(file), "--dry-run", "--with", "slurm"])
        with pytest.raises(SystemExit) as ended:
            run(nsa, "nsa")
        assert ended.value.code == 2
        return capsys.readouterr().err

    capsys.readouterr()
    said = dry_run()
    for job in ("critic", "actor"):
        assert f"  jobs.{job}: " in said and "pretrained_checkpoint.restore_from_path is not set" in said
    assert "data_prefix" in said
    plan = read_plan(file)
    for job in plan.jobs.values():
        job.overrides["pretrained_checkpoint.restore_from_path"] = "/nowhere/x.nemo"
    plan.jobs["actor"].overrides["model.data.data_prefix"] = {"train": ["/nowhere/x.jsonl"]}
    plan.write(file)
    said = dry_run()
    assert said.count("/nowhere/x.nemo does not exist") == 2 and "/nowhere/x.jsonl" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--model", "8b", "--cluster", "1x8xh100", "--lengths", "none.jsonl"],
            "--lengths 'none.jsonl': there is no such file",
        ),
        (["--model", "9000b", "--cluster", "1x8xh100"], "no such model"),
        (["--model", "8b", "--cluster", "8xh100"], "--cluster 8xh100"),
        (["--model", "8b", "--cluster", "1x8xtpu"], "no rates of 'tpu'"),
        (["--model", "8b", "--cluster", "1x8xh100", "--lengths", "long"], "lengths 'long'"),
        (["--model", "8b", "--cluster", "1x8xh100", "--lengths", "lognormal:mean=900,sigma=1,max=512"], "the mean"),
        (["--model", "8b", "--cluster", "1x8xh100", "--rollouts", "100"], "--rollouts 100"),
        (
            ["--model", "8b", "--cluster", "1x8xh100", "--precision", "32"],
            "--precision 32: the tables have rates of bf16",
        ),
    ],
)
def test_mistakes_are_one_line(main: Main, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(arguments, status=2)
    told = capsys.readouterr().err
    assert told.startswith("error: ") and said in told and told.count("\n") == 1


def test_all_mistakes_are_said_at_once(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--model", "9000b", "--cluster", "1x8xtpu", "--rollouts", "100", "--lengths", "long", "--precision", "32"]
    main(wrong, status=2)
    told = capsys.readouterr().err
    assert told.startswith("error: ") and told.count("\n") == 5, told
    for part in ("no such model", "no rates of 'tpu'", "--rollouts 100", "lengths 'long'", "--precision 32"):
        assert part in told


@pytest.mark.slow
def test_it_starts_as_a_module_and_reads_a_model_of_a_folder(tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "rms_norm_eps": 1e-5,
              "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "nemo_style_aligner", "plan", "--model", str(tmp_path)]
    command += ["--cluster", "1x2xh100", "--rollouts", "128", "--steps", "1", "--strategy", "flatten"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "flatten" in done.stdout


def test_a_cpu_reads_weights_once_per_pass_and_computes_for_each_response() -> None:
    cpu = dataclasses.replace(H100, is_cpu=True, kernel=0.0)
    one, two, four = (Model(MODELS["1b"], device=cpu).decode(1, batch, 0.0) for batch in (1, 2, 4))
    assert four - two == pytest.approx(2 * (two - one)) and two < 2 * one
    assert two - one == pytest.approx(2 * MODELS["1b"].num_parameters / cpu.products / cpu.forward_share, rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine's device is a GPU")
def test_ranks_that_share_a_cpu_are_measured() -> None:
    """Nobody guesses what sums over gloo take: guesses that are too low let a planner choose tensor parallelism."""
    device = measured_here(4, 2)
    (_, shortest), *_, (largest, longest) = device.all_reduce
    assert 0 < shortest < longest
    assert device.all_reduce_seconds(largest) == pytest.approx(longest)
    assert min(device.bandwidth, device.products, device.memory) > 0 and "shared by 2 ranks" in device.source


@pytest.mark.parametrize("device", [H100, dataclasses.replace(H100, is_cpu=True)], ids=["GPU", "CPU"])
def test_rates_as_in_a_run(device: Device, tmp_path: Path) -> None:
    """Metrics that a device of known rates would have logged give its rates back."""
    a = ModelArchitecture(4, 128, 256, 4, 2, 1000)
    updates = 2 * Model(a, device=device).update(Layout())
    model = Model(a, device=dataclasses.replace(device, forward_share=0.5, decoding_factor=3.0))
    work = 64 * a.forward_operations(30, 20)
    seconds = {
        "logprobs": work / device.products / 0.5,
        "generate": 40 * model.decode(1, 32, 32 * 20.0) + model.prefill(1, 640),
    }
    cfg = load_defaults("gpt_ppo_actor")
    cfg.model.global_batch_size = 32
    OmegaConf.save(cfg, tmp_path / "hyperparameters.yaml")
    lines = [
        {"step": step, "train_rollouts/prompt_lengths": 10, "train_rollouts/generation_length": 20,
         "train_rollouts/rollout_size": 64, "generation/passes": 40, "generation/active_slots": 32,
         "generation/prompt_tokens_computed": 640,
         "timers/step/train_time": 3 * work / device.products / 0.25 + updates,
         **{f"timers/step/rollout_time/{name}": value for name, value in seconds.items()}}
        for step in (0, 1, 2)
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = as_in_run(device, tmp_path, a, itemsize=2)
    assert (found.forward_share, found.training_share, found.decoding_factor) == pytest.approx((0.5, 0.25, 3.0))
    cfg.trainer.ppo.teacher.restore_from_path = "teacher.nemo"
    OmegaConf.save(cfg, tmp_path / "hyperparameters.yaml")
    with pytest.raises(UserError, match=r"trainer\.ppo\.teacher\.restore_from_path=teacher\.nemo"):
        as_in_run(device, tmp_path, a, itemsize=2)
