"""Jobs of group estimators, started as users start them: GRPO, RLOO and a user's own, tiny models, CPU."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from conftest import Artefacts
from job_processes import Job, run, script, stored_weights
from small_models import SHAPE
from test_extending import EXAMPLES

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.secret import TOKEN_FILE_VARIABLE
from nemo_style_aligner.trainer.checkpoints.nemo_archive import save_nemo
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.jobs.job_setup import Run
from nemo_style_aligner.trainer.jobs.scoring_setup import build_scorer
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.restore import open_base_model
from nemo_style_aligner.trainer.rl.estimators import ESTIMATORS
from nemo_style_aligner.trainer.services.score_client import SequencesToScore
from nemo_style_aligner.trainer.telemetry.log_files import read_json_lines
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

TIMEOUT = 240.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Curves = dict[str, list[tuple[int, float]]]

NUM_PROMPTS = 16
STEPS, PROMPTS, RESPONSES = 5, 4, 4
SAMPLES = PROMPTS * RESPONSES

# `kill_at` beside the file: the call at which the process that makes it, or a rank that it names, is killed, once.
REWARDS = """
import os, pathlib, time
import psutil

HERE, calls = pathlib.Path(__file__).parent, 0
os.chdir("/")  # as some do to find their own files: a job's paths stay where they were

def form(prompt, response, line, step):
    global calls
    calls += 1
    with (HERE / "steps").open("a") as file:
        file.write(f"{step} ")
    marker = HERE / "kill_at"
    at, *ranks = marker.read_text().split() if marker.exists() else "0"
    if calls == int(at):
        marker.unlink()
        me = psutil.Process()
        for process in me.parent().children() if ranks else [me]:
            if not ranks or process.environ()["RANK"] in ranks:
                process.kill()
    return {"digits": float(sum(map(str.isdigit, response)) > 4), "brief": 0.5 * (len(response) < 3)}

def troubled(prompt, response, line):
    global calls
    calls += 1
    if calls == 3:
        raise ValueError("no such\\nthing")
    if calls == 14 or calls > 16:
        time.sleep(60)
    return float("nan") if calls == 9 else len(response)
"""


@pytest.fixture(scope="module")
def prompts(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The prompts as a flag; every other one's line says ``kind: checked``."""
    lines = [json.loads(line) for line in artefacts.data("train_prompts").read_text().splitlines()]
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    marked = [line | {"kind": ("plain", "checked")[row % 2]} for row, line in enumerate(lines[:NUM_PROMPTS])]
    file.write_text("".join(json.dumps(line) + "\n" for line in marked))
    return f"model.data.data_prefix={{train: [{file}], validation: [{file}], test: [{file}]}}"


@pytest.fixture
def flags(artefacts: Artefacts, prompts: str) -> Callable[..., list[str]]:
    """Of a job in a folder: its log is ``folder / "log"``, its reward functions are in ``folder / "rewards.py"``."""

    def made(folder: Path, *others: str, section: str = "ppo") -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rewards.py").write_text(REWARDS)
        return [
            f"pretrained_checkpoint.restore_from_path={artefacts.sft}",
            prompts,
            f"exp_manager.explicit_log_dir={folder / 'log'}",
            "trainer.precision=32",
            f"trainer.{section}.max_steps={STEPS}",
            f"trainer.{section}.val_check_interval=0",
            f"trainer.{section}.save_interval=2",
            f"trainer.{section}.num_rollouts_per_prompt={RESPONSES}",
            "model.encoder_seq_length=64",
            "model.global_batch_size=8",
            "model.micro_batch_size=2",
            f"model.{section}.num_rollout_samples={PROMPTS}",
            f"model.{section}.num_val_samples=4",
            f"model.{section}.rollout_micro_batch_size=4",
            f"model.{section}.length_params.max_length=8",
            "model.optim.lr=1e-3",
            "model.optim.sched.warmup_steps=2",
            *others,
        ]

    return made


def grpo(folder: Path, reward_model: Path) -> tuple[str, ...]:
    """Sources of rewards, some for some prompts alone; many groups without a difference; a pass over the prompts."""
    sources = (
        f"{{name: form, source: '{folder}/rewards.py:form', weight: 0.5}}",
        "{name: right, source: exact_match, weight: 2, only: {kind: checked}}",
        f"{{source: '{reward_model}', weight: 0.1, only: {{kind: checked}}}}",
    )
    return (
        "trainer.ppo.estimator=grpo",
        f"trainer.ppo.rewards=[{', '.join(sources)}]",
        "trainer.ppo.dynamic_sampling.enable=True",
        "trainer.ppo.dynamic_sampling.max_rounds=3",
        "trainer.ppo.num_ppo_epochs=2",
        "trainer.ppo.max_steps=-1",
        "trainer.ppo.save_samples=True",
        "exp_manager.timeline=True",
    )


def curves(folder: Path) -> Curves:
    """A job's numbers, apart from times and from how busy the engines were."""
    varying = ("timers/", "memory/", "generation/")
    return {
        name: points
        for name, points in read_metrics(folder / "log").items()
        if not name.removeprefix("warm_up/").startswith(varying)
    }


def require_same_end(folder: Path, expected: Path) -> None:
    """Curves and archive, bit for bit."""
    found, wanted = curves(folder), curves(expected)
    assert [name for name, points in wanted.items() if found.get(name) != points] == []
    ours, theirs = (
        stored_weights(next((job / "log" / "checkpoints").glob("*actor.nemo"))) for job in (folder, expected)
    )
    assert ours.keys() == theirs.keys() and len(theirs) > 5
    assert [name for name, tensor in theirs.items() if not torch.equal(tensor, ours[name])] == []


def kill_and_start_again(command: Sequence[str], folder: Path, at_call: int) -> None:
    """Killed by its reward function, and started again, to the end."""
    (folder / "kill_at").write_text(str(at_call))
    victim = Job(command, folder / "first.log")
    try:
        assert victim.wait(TIMEOUT) in (-signal.SIGKILL, 128 + signal.SIGKILL, 1), victim.describe()
    finally:
        victim.kill()
    assert not (folder / "kill_at").exists(), victim.describe()
    assert "resumed from" in run(command, folder / "second.log", TIMEOUT)


# ---- rewards by functions -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the job that other ones are compared with."""
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture
def done(
    artefacts: Artefacts, undisturbed: Path, flags: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """`undisturbed`, once it is done: on one rank, where there is no secret to share."""
    relative = (
        "exp_manager.explicit_log_dir=log",
        f"pretrained_checkpoint.restore_from_path={os.path.relpath(artefacts.sft, undisturbed)}",
    )
    if not (undisturbed / "log").exists():
        with monkeypatch.context() as patch:
            patch.setenv(TOKEN_FILE_VARIABLE, str(undisturbed / "nowhere" / "token"))
            run(
                script("train_gpt_ppo_actor.py", *flags(undisturbed, *grpo(Path(), artefacts.rm), *relative)),
                undisturbed / "job.log",
                TIMEOUT,
            )
    return undisturbed


def test_every_sample_is_kept_whole(done: Path) -> None:
    found, records = curves(done), read_json_lines(done / "log" / "samples.jsonl")
    for step, mean in found["train_rollouts/rewards"]:
        of_step = [record for record in records if record["step"] == step]
        size = int(dict(found["train_rollouts/rollout_size"])[step])
        assert [record["sample"] for record in of_step] == list(range(size))
        assert sum(record["reward"] for record in of_step) / len(of_step) == pytest.approx(mean, abs=1e-4)
        for record in of_step:
            lengths = {len(record[name]) for name in ("tokens", "pieces", "old_logprobs", "advantages")}
            assert len(lengths) == 1
    phases = [json.loads(line) for line in (done / "log" / "timeline" / "rank_0.jsonl").read_text().splitlines()]
    assert sum(group[-1][0] == "step" for group in phases) == len(found["train_rollouts/rewards"])


def test_parts_of_rewards_and_what_was_drawn_are_logged(artefacts: Artefacts, done: Path) -> None:
    """No critic and no secret is asked for."""
    found = curves(done)
    steps = list(range(1, len(found["train_rollouts/rewards"]) + 1))
    of = {name: [value for _, value in points] for name, points in found.items()}
    rm = artefacts.rm.stem
    for name in (
        "rewards",
        "rewards/form",
        "rewards/form/digits",
        "rewards/form/brief",
        "rewards/right",
        f"rewards/{rm}",
    ):
        assert [step for step, _ in found[f"train_rollouts/{name}"]] == steps, name
    assert list(dict.fromkeys(map(int, (done / "steps").read_text().split()))) == steps
    assert not any("critic" in name or "values" in name or "returns" in name for name in found)
    assert "critic" not in (done / "job.log").read_text() and not (done / "log" / "critic_journal").exists()
    rounds, dropped, useless, consumed = (
        of[f"train_rollouts/{name}"]
        for name in ("sampling_rounds", "dropped_samples", "uninformative_samples", "consumed_samples")
    )
    assert all(1 <= number <= 3 for number in rounds) and max(rounds) > 1 and max(dropped) > 0
    assert consumed == [PROMPTS * sum(rounds[:step]) for step in steps]
    for drawn, out, left in zip(rounds, dropped, useless, strict=True):
        useful = SAMPLES * drawn - out - left  # drawn samples of groups that teach something
        assert out % RESPONSES == left % RESPONSES == 0
        assert useful == SAMPLES - left if left else useful >= SAMPLES
        assert drawn == 3 or not left
    states = [json.loads(file.read_text())["trainer"] for file in done.glob("log/checkpoints/*/trainer_state.json")]
    last = max(state["step"] for state in states)
    assert sum(rounds[: last - 1]) > last - 1, "nothing was drawn again before the last step: choose other prompts"
    for state in states:
        assert state["redrawn_samples"] == consumed[state["step"] - 1] - PROMPTS * state["step"]
    assert len(steps) == NUM_PROMPTS // PROMPTS  # of one epoch, whatever was drawn
    assert of["train_rollouts/rollout_size"] == [SAMPLES] * len(steps)
    assert len(of["train_optim/loss"]) == len(steps) * 2 * SAMPLES // 8


def test_ranks_change_nothing(
    artefacts: Artefacts, done: Path, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Two data-parallel ranks, prompts from the queue."""
    queue = ("trainer.ppo.batch_iterator.use_flask=True", "trainer.ppo.batch_iterator.port=0", "trainer.devices=2")
    run(
        script("train_gpt_ppo_actor.py", *flags(tmp_path, *grpo(tmp_path, artefacts.rm), *queue)),
        tmp_path / "job.log",
        TIMEOUT,
    )
    found, expected = curves(tmp_path), curves(done)
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        if "padding_efficiency" not in name and "dp_balance" not in name:
            assert dict(found[name]) == pytest.approx(dict(points), rel=1e-4, abs=1e-5), name


def test_killed_and_resumed_is_as_if_never_killed(
    artefacts: Artefacts, done: Path, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    """In the middle of the last step, in its second round if it has one; a checkpoint is there by then."""
    drawn = [int(rounds) * SAMPLES for _, rounds in curves(done)["train_rollouts/sampling_rounds"]]
    command = script("train_gpt_ppo_actor.py", *flags(tmp_path, *grpo(tmp_path, artefacts.rm)))
    kill_and_start_again(command, tmp_path, at_call=sum(drawn[:-1]) + min(SAMPLES + 2, drawn[-1] - 1))
    require_same_end(tmp_path, done)
    assert (tmp_path / "steps").read_text().split()[-1] == (done / "steps").read_text().split()[-1]  # resumed, too


@pytest.mark.long
def test_own_estimator_loss_and_reward_a_step_ahead(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    """The examples of docs/extending.md; one rank trains, one generates two steps ahead, with responses that outlive
    their round; killed at a random instant and resumed, too."""

    def job(folder: Path) -> list[str]:
        mine = folder / "my_rl.py"
        arguments = flags(
            folder,
            f"trainer.ppo.estimator={mine}:step_scaled",
            f"trainer.ppo.policy_loss={mine}:simple_policy_optimization",
            f"trainer.ppo.rewards=[{{source: '{mine}:reward'}}, {{source: '{folder}/rewards.py:form'}}]",
            "trainer.devices=2",
            "trainer.ppo.rollout_devices=1",
            "trainer.ppo.staleness=2",
            "trainer.ppo.in_flight=keep",
            "model.hidden_dropout=0.1",  # random streams matter, too
        )
        mine.write_text("\n\n".join(EXAMPLES))
        return script("train_gpt_ppo_actor.py", *arguments)

    straight, broken = tmp_path / "straight", tmp_path / "broken"
    undisturbed = Job(job(straight), tmp_path / "straight.log")
    try:
        at_call = random.randrange(SAMPLES, (STEPS - 1) * SAMPLES)
        print(f"killed at call {at_call} of the reward")
        kill_and_start_again(job(broken), broken, at_call=at_call)
        undisturbed.check(TIMEOUT)
    finally:
        undisturbed.kill()
    require_same_end(broken, straight)
    found = curves(straight)
    assert {"train_rollouts/rewards/reward/right", "train_rollouts/rewards/form/digits"} <= found.keys()
    ages = [value for _, value in found["train_rollouts/staleness_mean"]]
    assert ages[:3] == [0.0, 2.0, 4.0] and all(4.0 <= age <= 12.0 for age in ages[3:])
    assert "train_optim/ratio" in found and "train_optim/ppo_ratio" not in found


@pytest.mark.long
def test_a_reward_model_in_the_job(artefacts: Artefacts, flags: Callable[..., list[str]], tmp_path: Path) -> None:
    """The only source, on two ranks, of which some have nothing to score; its weights come and go."""
    arguments = flags(
        tmp_path,
        "trainer.ppo.estimator=rloo",
        f"trainer.ppo.rewards=[{{source: '{artefacts.rm}', weight: 2}}]",
        "trainer.ppo.reference_policy_placement=swap",
        "trainer.devices=2",
        "trainer.ppo.max_steps=2",
        "trainer.ppo.val_check_interval=1",
        "model.ppo.num_val_samples=1",
    )
    output = run(script("train_gpt_ppo_actor.py", *arguments), tmp_path / "job.log", TIMEOUT)
    assert f"loading the weights of {artefacts.rm}" in output
    for part in ("train", "val"):
        whole, of_model = (
            [value for _, value in curves(tmp_path)[f"{part}_rollouts/{name}"]]
            for name in ("rewards", f"rewards/{artefacts.rm.stem}")
        )
        assert len(whole) == {"train": 2, "val": 3}[part] and whole == pytest.approx([2 * value for value in of_model])


def test_a_reward_model_that_does_not_fit_is_refused_before_weights_are_loaded(
    artefacts: Artefacts, tmp_path: Path
) -> None:
    """A language model, another tokenizer's, one for shorter sequences or fewer tokens."""
    other, shape = tmp_path / "other.nemo", ModelArchitecture(**SHAPE)
    train_character_tokenizer("abc", tmp_path / "tokenizer")

    def refused(archive: Path, sequences: SequencesToScore) -> str:
        cfg = load_defaults("gpt_ppo_actor")
        cfg.trainer.ppo.rewards = [{"source": str(archive)}]
        policy, config = open_base_model(str(artefacts.sft), PPOActor.read(cfg))
        with pytest.raises(UserError) as error:
            build_scorer(config, cast(Run, None), ESTIMATORS["rloo"], policy, sequences)
        return str(error.value)

    with single_process(1):
        model = build_model(shape, {}, torch.float32, head=RewardHeadConfig(), trainable=False)
        save_nemo(other, model, shape.to_nemo_config(), tmp_path / "tokenizer")
        fitting = SequencesToScore(64, 10, "")
        assert f"{artefacts.sft} has no reward head" in refused(artefacts.sft, fitting)
        assert f"{other} has a different tokenizer" in refused(other, fitting)
        key = "trainer.ppo.rewards[0].source="
        told = refused(artefacts.rm, SequencesToScore(65, 10, ""))
        assert told.startswith(f"{key}{artefacts.rm} takes sequences of at most 64 tokens, but") and "have 65" in told
        told = refused(artefacts.rm, SequencesToScore(64, 1000, ""))
        assert told.startswith(f"{key}{artefacts.rm}: its token ids end at ") and "those of this job at 999" in told


# ---- rewards that cannot be given ---------------------------------------------------------------


@pytest.fixture
def failing(flags: Callable[..., list[str]], tmp_path: Path) -> Callable[..., list[str]]:
    """A job whose function fails for some responses of the first step, and after that never returns; its last lines."""

    def failing(policy: str, *others: str) -> list[str]:
        arguments = flags(
            tmp_path,
            "trainer.ppo.estimator=rloo",
            f"trainer.ppo.rewards=[{{source: '{tmp_path}/rewards.py:troubled'}}]",
            "trainer.ppo.reward_functions.seconds=0.5",
            f"trainer.ppo.on_nonfinite={policy}",
            *others,
        )
        job = Job(script("train_gpt_ppo_actor.py", *arguments), tmp_path / "job.log")
        try:
            assert job.wait(TIMEOUT) == 1, job.describe()
        finally:
            job.kill()
        return job.output().splitlines()

    return failing


def require_reasons(told: str) -> None:
    """An error, a NaN and a call that takes too long are named with the function and the prompts."""
    for what in ("raised ValueError: no such thing", "returned nan, which is not", "took more than 0.5 s"):
        assert re.search(rf"sample \d+: .*rewards.py:troubled {what}.* for the prompt of .*:\d+", told), (what, told)


def test_samples_without_a_reward_are_left_out(failing: Callable[[str], list[str]], tmp_path: Path) -> None:
    """As long as others remain."""
    output = failing("skip")
    assert [value for _, value in curves(tmp_path)["train_rollouts/nonfinite_samples"]] == [3.0]
    require_reasons(next(line for line in output if "these samples are left out" in line))
    assert output[-1].startswith("[rank 0] NonFiniteError: NaN or Inf in reward of samples [")


@pytest.mark.long
def test_a_missing_reward_ends_the_job(failing: Callable[..., list[str]], tmp_path: Path) -> None:
    """That of a response, too, which would not be among the best."""
    output = failing("stop", "trainer.ppo.top_n_rollouts=2")
    assert output[-1].startswith("[rank 0] NonFiniteError: NaN or Inf in reward of samples [")
    require_reasons(output[-1])
    assert "train_optim/loss" not in curves(tmp_path)


# ---- services -----------------------------------------------------------------------------------


@pytest.mark.long
def test_best_of_n_learns_the_best_responses(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    """With NeMo-Aligner's keys. Ranks change nothing, and neither does being killed in the middle."""
    rewards = "trainer.rs.rewards=[{{name: form, source: '{}/rewards.py:form'}}]"
    keys = ("++model.rs.top_n_rollouts=2", "++model.data.data_impl=jsonl")
    results = {}
    for name, others in (("one", ()), ("two", ("trainer.devices=2", "model.micro_batch_size=1"))):
        folder = tmp_path / name
        command = script("train_gpt_rs_actor.py", *flags(folder, rewards.format(folder), *keys, *others, section="rs"))
        run(command, folder / "job.log", TIMEOUT)
        results[name] = curves(folder)
    found = results["one"]
    of = {name: [value for _, value in points] for name, points in found.items()}
    mean, best = of["train_rollouts/rewards"], of["train_rollouts/best_rewards"]
    assert len(mean) == STEPS and all(one <= other for one, other in zip(mean, best, strict=True)) and best != mean
    assert of["train_rollouts/rollout_size"] == [2 * PROMPTS] * STEPS and len(of["train_optim/loss"]) == STEPS
    assert not any("critic" in name or "values" in name for name in found)
    for name, points in found.items():
        if "padding_efficiency" not in name and "dp_balance" not in name:
            assert dict(results["two"][name]) == pytest.approx(dict(points), rel=1e-4, abs=1e-5), name
    folder = tmp_path / "killed"
    at_once = "exp_manager.checkpoint_callback_params.async_save=False"  # steps take less time than a save
    command = script("train_gpt_rs_actor.py", *flags(folder, rewards.format(folder), *keys, at_once, section="rs"))
    kill_and_start_again(command, folder, at_call=3 * SAMPLES + 2)
    require_same_end(folder, tmp_path / "one")


@pytest.mark.long
def test_reinforce_against_a_reward_model_and_a_function_that_comes_back(
    artefacts: Artefacts, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Two pipeline stages; the function's service is killed after the first step and started again. No critic.

    With the flags of NeMo-Aligner's tests/functional/reinforce.sh that are nobody's but NeMo's.
    The same reward model inside the job gives the same rewards.
    """
    model_port, function_port = free_port(), free_port()
    arguments = flags(
        tmp_path,
        f"remote_rm.reward_model.port={model_port}",
        "trainer.reinforce.rewards=[{name: model, source: service}, "
        f"{{name: ours, source: '{artefacts.rm}', weight: 0}}, "
        f"{{name: function, source: 'http://127.0.0.1:{function_port}/reward_model'}}]",
        "remote_rm.timeouts.ready_seconds=120",
        "trainer.reinforce.max_steps=12",
        "trainer.reinforce.max_epochs=2",
        "trainer.devices=2",
        "++model.pipeline_model_parallel_size=2",
        *("trainer.reinforce.trt_llm.enable=True", "trainer.reinforce.trt_llm.reshard=True"),
        *("trainer.reinforce.trt_llm.model_type=llama", "trainer.reinforce.rollout_batch_seq_length=32"),
        *("++trainer.reinforce.flask_server.enable=True", "trainer.reinforce.batch_iterator.port=0"),
        *("++model.offload_adam_states=False", "++model.dist_ckpt_load_strictness=log_all", "++model.enable_nge=True"),
        *("+model.overwrite_base_config.optim=True", "~model.optim", "++model.optim={name:sgd}"),
        section="reinforce",
    )
    of_model = script(
        "serve_reward_model.py",
        *(f"rm_model_file={artefacts.rm}", f"inference.port={model_port}", "trainer.precision=32"),
    )
    of_function = script(
        "serve_reward_function.py",
        *("--function", f"{tmp_path / 'rewards.py'}:form", "--tokenizer", str(artefacts.sft)),
        *("--port", str(function_port)),
    )
    actor = Job(script("train_gpt_reinforce_actor.py", *arguments), tmp_path / "job.log")
    model, function = Job(of_model, tmp_path / "model.log"), Job(of_function, tmp_path / "function.log")
    try:
        deadline = time.monotonic() + TIMEOUT
        while not (tmp_path / "log").exists() or "train_rollouts/rewards" not in read_metrics(tmp_path / "log"):
            assert actor.process.poll() is None and time.monotonic() < deadline, actor.describe()
            time.sleep(0.05)
        function.kill()
        time.sleep(1.0)
        assert actor.process.poll() is None, actor.describe()
        function = Job(of_function, tmp_path / "function_again.log")
        actor.check(TIMEOUT)
    finally:
        for job in (actor, model, function):
            job.kill()
    found = curves(tmp_path)
    of = {name: [value for _, value in points] for name, points in found.items()}
    by_model, by_ours, by_function = (of[f"train_rollouts/rewards/{part}"] for part in ("model", "ours", "function"))
    assert by_ours == pytest.approx(by_model, rel=1e-5, abs=1e-6) and len(set(by_ours)) > 1
    assert of["train_rollouts/rewards"] == pytest.approx([sum(two) for two in zip(by_model, by_function, strict=True)])
    assert len(by_model) == 12 and not any("critic" in name or "values" in name for name in found)
