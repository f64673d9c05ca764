"""Placement: what is refused, what is said at the start, and one run with the critic in its job or in another."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from conftest import Artefacts
from job_processes import Job, run, script, stored_tensors, stored_weights, wait_until_ready
from omegaconf import OmegaConf
from small_models import SHAPE
from test_group_jobs import REWARDS, curves, kill_and_start_again, require_same_end

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.trainer.config.loading import check_config, load_defaults
from nemo_style_aligner.trainer.config.schema import JOBS
from nemo_style_aligner.trainer.jobs.config_checks import find_problems
from nemo_style_aligner.trainer.jobs.placement_picture import Role, picture
from nemo_style_aligner.trainer.launch.stop_signals import EXIT_REQUEUE
from nemo_style_aligner.trainer.models.offload import WeightOffload
from nemo_style_aligner.trainer.telemetry.metrics import read_json_lines

TIMEOUT = 240.0


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """With a config and nothing else: whatever reads more of it fails."""
    folder = tmp_path / "model.nemo"
    folder.mkdir()
    config = ModelArchitecture(**SHAPE).to_nemo_config() | {"encoder_seq_length": 64}
    (folder / "model_config.yaml").write_text(yaml.safe_dump(config))
    return folder


def problems(archive: Path, job: str = "gpt_ppo_actor", ranks: int = 1, **keys: object) -> list[str]:
    cfg = load_defaults(job)
    given = {
        "pretrained_checkpoint.restore_from_path": str(archive),
        "exp_manager.explicit_log_dir": str(archive.parent / "log"),
        "model.data.data_prefix": {"train": [__file__]},
        "model.encoder_seq_length": 64,
    }
    for key, value in (given | keys).items():
        OmegaConf.update(cfg, key, value, force_add=True)
    check_config(cfg, job)
    return find_problems(job, JOBS[job].sections.read(cfg), ranks)


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["flatten", "colocated", "colocate_all"])
def test_a_critic_in_the_job_has_the_keys_of_its_own_job(archive: Path, name: str) -> None:
    critic = {"pretrained_checkpoint": {"restore_from_path": str(archive)}, "model": {"optim": {"lr": 1e-5}}}
    assert problems(archive, placement=name, critic=critic) == []


def test_adapters_that_the_reward_model_beside_it_would_lack_are_refused(archive: Path) -> None:
    model = {"peft": {"peft_scheme": "lora", "restore_from_path": str(archive)}}
    critic = {"pretrained_checkpoint": {"restore_from_path": str(archive)}, "model": model}
    alone = critic | {"trainer": {"ppo": {"combine_rm_and_critic_server": False}}}
    of_both, of_one = (problems(archive, placement="flatten", critic=given) for given in (critic, alone))
    (found,) = [line for line in of_both if line not in of_one]
    assert found.startswith("critic.model.peft.restore_from_path=") and "merge them into its archive" in found


def test_all_that_is_wrong_with_it_is_said_at_once(archive: Path) -> None:
    path = {"restore_from_path": str(archive)}
    bad = {"betas": [0.9], "sched": {"name": "constant", "min_lr": 0.1}}
    found = problems(
        archive, placement="flatten", critic={"pretrained_checkpoint": path, "model": {"optim": bad}}, ranks=2
    ) + problems(archive, placement="flatten", critic={"model": {"optm": {"lr": 1}, "loss_clip_val": "wide"}})
    said = "\n".join(found)
    for words in (
        "critic.model.optim.betas=[0.9]: give two numbers",
        "critic.model.optm.lr; did you mean critic.model.optim.lr",
        "critic.model.loss_clip_val='wide': must be",
    ):
        assert words in said, said
    (found_missing,) = problems(archive, placement="flatten")
    assert found_missing.startswith("critic.pretrained_checkpoint.restore_from_path"), found_missing
    given = {"model": {"tensor_model_parallel_size": 2}, "trainer": {"ppo": {"port": 7}}, "exp_manager": {"name": "x"}}
    found = problems(archive, placement="flatten", critic=given)
    assert [line.partition("=")[0] for line in found] == [
        "critic.model.tensor_model_parallel_size",
        "critic.trainer.ppo.port",
        "critic.exp_manager.name",
    ]
    assert "it is the policy's, model.tensor_model_parallel_size; leave it out" in found[0]


def test_strategies_and_other_keys_must_agree(archive: Path) -> None:
    (apart,) = problems(archive, placement="separate")
    assert apart.startswith("placement=separate, trainer.ppo.rollout_devices=0: give the number of ranks")
    (both,) = problems(archive, placement="interleave", ranks=2, **{"trainer.ppo.rollout_devices": 1})
    assert "choose that, or set trainer.ppo.rollout_devices=0" in both
    (two,) = problems(archive, critic={"pretrained_checkpoint": {"restore_from_path": str(archive)}})
    assert "choose placement=flatten for a critic on all ranks" in two and "(trainer.ppo.critic_devices)" in two
    assert problems(archive, placement="disaggregated", ranks=2, **{"trainer.ppo.rollout_devices": 1}) == []


def test_ranks_of_their_own_have_layouts_of_their_own(archive: Path) -> None:
    critic = {"pretrained_checkpoint": {"restore_from_path": str(archive)}, "model": {"tensor_model_parallel_size": 2}}
    reward = {"source": str(archive), "devices": 2, "tensor_parallel_size": 2}
    apart = {"trainer.ppo.critic_devices": 2, "critic": critic}
    assert problems(archive, ranks=5, **apart, **{"trainer.ppo.rewards": [reward]}) == []
    ranks = {"trainer.ppo.critic_devices": 3, "trainer.ppo.rewards": [{**reward, "devices": 3}]}
    found = problems(archive, ranks=6, critic=critic, **ranks)
    said = "\n".join(found)
    for words in (
        "trainer.ppo.critic_devices=3, trainer.ppo.rewards[0].devices=3: none of the 6 ranks is left to train",
        "critic.model.tensor_model_parallel_size=2, critic.model.pipeline_model_parallel_size=1: 3 ranks",
        "trainer.ppo.rewards[0].devices=3: not a multiple of its parallel sizes, 2 x 1",
    ):
        assert words in said, said
    found = problems(archive, ranks=6, placement="flatten", **apart, **{"trainer.ppo.rewards": [reward]})
    assert len(found) == 2 and all("all roles are on all ranks" in line for line in found), found
    (missing,) = problems(archive, ranks=2, **{"trainer.ppo.critic_devices": 1})
    assert "give the archive that the critic begins with" in missing
    wrong = {"source": "exact_match", "devices": -1, "pipeline_parallel_size": 2}
    found = problems(archive, **{"trainer.ppo.rewards": [wrong], "trainer.ppo.estimator": "grpo",
                                 "trainer.ppo.num_rollouts_per_prompt": 2})  # fmt: skip
    assert [line.partition(":")[0] for line in found] == [
        "trainer.ppo.rewards[0].devices=-1", "trainer.ppo.rewards[0].devices=-1"
    ], found  # fmt: skip


def test_frozen_models_have_ranks_of_their_own_where_something_asks_for_them(archive: Path) -> None:
    path, two = str(archive), {"devices": 2, "tensor_parallel_size": 2}
    reference, teacher = "trainer.ppo.reference", "trainer.ppo.teacher"
    tuning = {"target_modules": ["all"], "adapter_dim": 4}
    lora = {"model.peft": {"peft_scheme": "lora", "lora_tuning": tuning}}
    own = {reference: two, teacher: two | {"restore_from_path": path}}
    assert problems(archive, "gpt_reinforce_actor", ranks=5, **own, **lora) == []
    begun = {"model.peft": {"peft_scheme": "lora", "lora_tuning": tuning | {"row_init_method": "normal"}}}
    wrong = {reference: {"devices": 3, "tensor_parallel_size": 3}, teacher: {"devices": 1, "pipeline_parallel_size": 2}}
    found = problems(archive, "gpt_reinforce_actor", ranks=4, placement="flatten", **wrong, **begun)
    said = "\n".join(found)
    for words in (
        f"placement=flatten: all roles are on all ranks, and {reference} has 3 for itself",
        f"{reference}.devices=3, {teacher}.devices=1: none of the 4 ranks is left to train",
        f"{reference}.tensor_parallel_size=3: the model's num_attention_heads=",
        f"{reference}.devices=3, model.peft.restore_from_path=None, model.peft.lora_tuning.row_init_method=normal: a",
        f"{teacher}.devices=1, {teacher}.restore_from_path=None: there is no teacher; set {teacher}.devices=0",
    ):
        assert words in said, said
    idle = {reference: two | {"devices": 3}, "trainer.ppo.initial_policy_kl_penalty": 0}
    idle |= {teacher: {"restore_from_path": path, "tensor_parallel_size": 2}}
    found = problems(archive, "gpt_reinforce_actor", ranks=4, **idle)
    assert [line.partition(":")[0] for line in found] == [
        f"{reference}.devices=3, trainer.ppo.initial_policy_kl_penalty=0",
        f"{reference}.devices=3",
        f"{teacher}.tensor_parallel_size=2",
    ], found


def test_names_of_openrlhf_are_understood_or_answered() -> None:
    cfg = load_defaults("gpt_ppo_actor")
    names = ("colocate_all_models", "colocate_actor_ref", "colocate_critic_reward", "ref_reward_offload")
    for key, value in (("pretrained_checkpoint.restore_from_path", "x"), ("model.data.data_prefix", {"train": ["y"]})):
        OmegaConf.update(cfg, key, value)
    OmegaConf.set_struct(cfg, False)
    cfg.update(dict.fromkeys(names, True))
    notes = check_config(cfg, "gpt_ppo_actor")
    assert len(notes) == len(names) and cfg.placement == "flatten"
    assert cfg.trainer.ppo.reference_policy_placement == "swap"
    assert any("combine_rm_and_critic_server" in note for note in notes)


# ---- what is said, what is given back -----------------------------------------------------------


def test_the_picture_has_a_column_for_each_rank_and_a_row_for_each_role() -> None:
    roles = [
        Role("policy", range(4), [0, 0, 1, 1], 2e9, 7e9),
        Role("engine", range(4, 6), [0, 1], 3e9, 0),
        Role("critic", note="a job of its own at node7:5556"),
    ]
    head, policy, engine, critic = picture(roles, 6)
    assert head.split()[:7] == ["rank", "0", "1", "2", "3", "4", "5"]
    assert policy == "  policy  0 0 1 1 . .   2.0 GB + 7.0 GB"
    assert engine == "  engine  . . . . 0 1   3.0 GB + 0 MB"
    assert critic == "  critic  . . . . . .   a job of its own at node7:5556"
    wide = list(picture([Role("policy", range(4096), [rank // 8 for rank in range(4096)])], 4096))
    assert max(map(len, wide)) < 120 and "every 128th rank" in wide[0]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_that_leave_the_device_come_back_with_all_views_of_them(is_frozen: bool) -> None:
    buffer = torch.randn(100)
    layer = torch.nn.Linear(3, 4)
    layer.weight.data = buffer[:12].view(4, 3)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    weights = WeightOffload(layer, is_frozen=is_frozen)
    for _ in range(2):
        weights.offload()
        assert buffer.untyped_storage().size() == layer.bias.untyped_storage().size() == 0
        weights.bring_back()
        weights.bring_back()
        assert all(map(torch.equal, before, layer.parameters())) and torch.equal(buffer[:12].view(4, 3), layer.weight)


# ---- one run ------------------------------------------------------------------------------------


def flags(artefacts: Artefacts, folder: Path, *others: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    lines = artefacts.data("train_prompts").read_text().splitlines()[:24]
    marked = [json.loads(line) | {"kind": ("plain", "checked")[row % 2]} for row, line in enumerate(lines)]
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in marked))
    sources = (
        "{name: rm, source: service}",
        f"{{name: second, source: '{artefacts.rm}', weight: 0.5, only: {{kind: checked}}}}",
        f"{{name: form, source: '{folder}/rewards.py:form', weight: 0.1}}",
    )
    return [
        f"pretrained_checkpoint.restore_from_path={artefacts.sft}",
        f"model.data.data_prefix={{train: [{data}], validation: [{data}], test: [{data}]}}",
        f"exp_manager.explicit_log_dir={folder / 'log'}",
        f"trainer.ppo.rewards=[{', '.join(sources)}]",
        *("trainer.precision=32", "trainer.ppo.max_steps=3", "trainer.ppo.val_check_interval=0"),
        *("trainer.ppo.save_interval=1", "trainer.ppo.critic_warmup_steps=1", "model.encoder_seq_length=64"),
        *("model.global_batch_size=4", "model.micro_batch_size=2", "model.ppo.num_rollout_samples=8"),
        *("model.ppo.rollout_micro_batch_size=4", "model.ppo.length_params.max_length=8"),
        *("model.optim.lr=1e-3", "model.optim.sched.warmup_steps=2", "model.ppo.sampling_params.temperature=0.8"),
        *("trainer.ppo.initial_policy_kl_penalty=0.1", f"trainer.ppo.teacher.restore_from_path={artefacts.sft}"),
        *others,
    ]


def of_critic(artefacts: Artefacts, prefix: str = "") -> list[str]:
    keys = ("model.global_batch_size=4", "model.micro_batch_size=2", "model.optim.lr=1e-3")
    keys += ("model.optim.sched.warmup_steps=2", f"pretrained_checkpoint.restore_from_path={artefacts.rm}")
    return [prefix + key for key in keys]


def flattened(artefacts: Artefacts, folder: Path, *others: str) -> list[str]:
    others = ("placement=flatten", *of_critic(artefacts, "critic."), *others)
    return script("train_gpt_ppo_actor.py", *flags(artefacts, folder, *others))


@pytest.fixture
def service(artefacts: Artefacts, tmp_path: Path) -> Iterator[str]:
    """A critic in a job of its own; the actor's flag that names its port."""
    port = free_port()
    own = (f"exp_manager.explicit_log_dir={tmp_path / 'critic'}", f"trainer.ppo.port={port}")
    keys = (*of_critic(artefacts), "trainer.precision=32", "model.encoder_seq_length=64", *own)
    job = Job(script("serve_ppo_critic.py", *keys), tmp_path / "critic.log")
    try:
        wait_until_ready(job, port)
        yield f"remote_critic_rm.critic.port={port}"
    finally:
        job.kill()


def interleaved(artefacts: Artefacts, folder: Path, *others: str) -> list[str]:
    """Each on a rank of its own: policy, critic with its reward model, reference, teacher, second reward model."""
    own = ("placement=interleave", "trainer.devices=5", "trainer.ppo.critic_devices=1", "exp_manager.timeline=True")
    own += ("critic.model.forward_micro_batch_size=1", "critic.model.keep_activations=never")
    own += ("trainer.ppo.reference.devices=1", "trainer.ppo.teacher.devices=1", "model.ppo.forward_micro_batch_size=1")
    keys = flags(artefacts, folder, *own, *of_critic(artefacts, "critic."), *others)
    return script("train_gpt_ppo_actor.py", *(key.replace("weight: 0.5", "weight: 0.5, devices: 1") for key in keys))


def phases(folder: Path, rank: int, name: str) -> list[tuple[float, float]]:
    """When the phases of a rank whose path has this name began and ended."""
    lines = read_json_lines(folder / "log" / "timeline" / f"rank_{rank}.jsonl")
    return [(t, t + seconds) for line in lines for path, t, seconds in line if name in path.split("/")]


def require_overlap(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> None:
    assert any(max(a[0], b[0]) < min(a[1], b[1]) for a in some for b in others), (some, others)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_roles_on_ranks_of_their_own_overlap_and_change_no_number(
    artefacts: Artefacts, tmp_path: Path, service: str
) -> None:
    """One rank each; in layouts that differ; with a rank that generates; each rank killed once, a stop, new starts."""
    jobs, beside, wide, separate, killed = (
        tmp_path / name for name in ("jobs", "beside", "wide", "separate", "killed")
    )
    run(script("train_gpt_ppo_actor.py", *flags(artefacts, jobs, service)), tmp_path / "jobs.log", TIMEOUT)
    told = run(interleaved(artefacts, beside), tmp_path / "beside.log", TIMEOUT)
    for row in ("policy 0....", "critic .0...", "reference ..0..", "teacher ...0.", "reward second ....0"):
        assert row.replace(" ", "") in told.replace(" ", ""), told
    layout = ("trainer.devices=8", "trainer.ppo.critic_devices=2", "critic.model.tensor_model_parallel_size=2")
    layout += ("trainer.ppo.reference.devices=2", "trainer.ppo.reference.tensor_parallel_size=2")
    run(interleaved(artefacts, wide, *layout), tmp_path / "wide.log", TIMEOUT)
    apart = ("placement=separate", "trainer.ppo.rollout_devices=1", "trainer.ppo.reference.devices=0")
    run(interleaved(artefacts, separate, *apart), tmp_path / "separate.log", TIMEOUT)
    require_same_numbers(jobs, [beside, wide, separate])
    require_overlap(phases(beside, 0, "train_time"), phases(beside, 1, "train"))
    assert phases(separate, 0, "init_logprobs") and not phases(beside, 0, "init_logprobs")
    for rank in (1, 2, 3, 4):
        require_overlap(phases(beside, 0, "rollout_time"), phases(beside, rank, "infer"))
    at_once = "exp_manager.checkpoint_callback_params.async_save=False"  # steps take less time than a save
    command = interleaved(artefacts, killed, at_once)
    # Counted from the start: in the first step, whose critic may be ahead then; from then on in the second.
    for rank, at_call in enumerate((12, 12, 2, 4, 6)):
        (killed / "kill_at").write_text(f"{at_call} {rank}")
        with ending(Job(command, tmp_path / f"killed_{rank}.log")) as victim:
            assert victim.wait(TIMEOUT) != 0 and not (killed / "kill_at").exists(), victim.describe()
            assert f"rank {rank} was ended by signal 9 (Killed)" in victim.output(), victim.describe()
            assert rank == 0 or "resumed from" in victim.output(), victim.describe()
    with ending(Job(command, tmp_path / "stopped.log")) as stopped:
        wait_for_checkpoint(stopped, killed, "-step=2-")
        assert stopped.stop(60.0) in (0, EXIT_REQUEUE), stopped.describe()  # 0: it was through
    run(command, tmp_path / "last.log", TIMEOUT)
    require_same_end(killed, beside)


@contextlib.contextmanager
def ending(job: Job) -> Iterator[Job]:
    try:
        yield job
    finally:
        job.kill()


def wait_for_checkpoint(job: Job, folder: Path, name: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not [*folder.glob(f"log/checkpoints/*{name}*/manifest.json")]:
        assert job.process.poll() is None and time.monotonic() < deadline, job.describe()
        time.sleep(0.05)


def require_same_numbers(expected: Path, folders: Sequence[Path]) -> None:
    """Rewards, values and losses of every step, and the last weights, up to rounding."""
    wanted = curves(expected)
    assert {"train_rollouts/rewards/rm", "train_rollouts/rewards/second"} < wanted.keys()
    for folder in folders:
        found = curves(folder)
        of_rollouts = [f"train_rollouts/{name}" for name in ("rewards", "values_mean", "init_policy_kl", "teacher_kl")]
        for name in (*of_rollouts, "train_critic/critic_loss"):
            there = pytest.approx([value for _, value in wanted[name]], rel=1e-3, abs=1e-5)
            assert [value for _, value in found[name]] == there, name
        assert max(value for _, value in wanted["train_rollouts/init_policy_kl"]) > 1e-2
        ours, theirs = (stored_weights(next(f.glob("log/checkpoints/*actor.nemo"))) for f in (folder, expected))
        assert max((_first(ours[key], x) - x).abs().max().item() for key, x in theirs.items()) < 2e-5


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_run_wherever_the_critic_is_and_however_often_it_is_killed(
    artefacts: Artefacts, tmp_path: Path, service: str
) -> None:
    """In a job of its own; in the actor's, with several reward models; on two ranks, its weights away between turns."""
    one, two, apart, killed = (tmp_path / name for name in ("one", "two", "apart", "killed"))
    told = run(flattened(artefacts, one), tmp_path / "one.log", TIMEOUT)
    assert "placement=flatten: 1 rank," in told and "reward second" in told, told
    run(script("train_gpt_ppo_actor.py", *flags(artefacts, apart, service)), tmp_path / "apart.log", TIMEOUT)
    swaps = ("trainer.ppo.reference_policy_placement=swap", "critic.model.rm_placement=swap")
    layout = ("trainer.devices=2", "model.tensor_model_parallel_size=2", *swaps)
    run(flattened(artefacts, two, *layout), tmp_path / "two.log", TIMEOUT)
    require_same_numbers(one, [apart, two])
    kill_and_start_again(flattened(artefacts, killed), killed, at_call=20)  # in the second step
    require_same_end(killed, one)
    last = [stored_critic(folder) for folder in (killed, one)]
    assert len(last[0]) > 15 and all(torch.equal(last[0][key], last[1][key]) for key in last[1])
    refused = Job(script("train_gpt_ppo_actor.py", *flags(artefacts, one, service)), tmp_path / "refused.log")
    assert refused.wait(TIMEOUT) == 2 and "its critic was in this job" in refused.output()


def _first(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """As many rows as another one has: tensor parallelism pads the vocabulary."""
    return tensor[: len(other)]


def stored_critic(folder: Path) -> dict[str, torch.Tensor]:
    """The critic's weights and Adam's moments in a run's last checkpoint."""
    stored = stored_tensors(next(folder.glob("log/checkpoints/*-last")) / "state")
    return {key: tensor for key, tensor in stored.items() if key.startswith("beside.critic.")}
