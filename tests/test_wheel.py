"""The wheel as its users have it: in an environment without the repository, from any folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
from job_processes import ROOT, environment, mpirun

from nemo_style_aligner import __version__
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.engine.text.jsonl import write_jsonl
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer
from nemo_style_aligner.places import CONFIGS, REPOSITORY, SCRIPTS, commit
from nemo_style_aligner.tools.cli.train import TRAINERS
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
Nsa = Callable[..., str]
COMMON = ("trainer.precision=32", "model.encoder_seq_length=64", "exp_manager.log_format=text")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes beside what it packs."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "repository"
    copy.mkdir()
    for name in ("nemo_style_aligner", "conf", "examples", "slurm"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "nemo_style_aligner" / "commit.txt").write_text("0123456789ab\n")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(copy)], check=True, timeout=300)
    shutil.rmtree(copy)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment in which the wheel alone is installed, beside what this one has."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=300)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # whose own .pth files are not read
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run([*pip, "--force-reinstall"], check=True, timeout=300)
    return folder


def _runs(environment_folder: Path, program: str) -> Nsa:
    """What runs a program of an environment and returns what it prints."""
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    folder = environment_folder / "bin"

    def run(*arguments: object, before: tuple[str, ...] = (), status: int = 0, cwd: Path | None = None) -> str:
        command = [*before, program, *map(str, arguments)]
        path = f"{folder}{os.pathsep}{env['PATH']}"
        done = subprocess.run(
            command, env=env | {"PATH": path}, cwd=cwd or folder, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == status, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    return run


@pytest.fixture(scope="module")
def nsa(installed: Path) -> Nsa:
    """Its ``nsa``."""
    return _runs(installed, str(installed / "bin" / "nsa"))


@pytest.fixture(scope="module")
def shell(installed: Path) -> Nsa:
    """A shell in it."""
    return _runs(installed, "bash")


@pytest.fixture(scope="module")
def data(nsa: Nsa, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: data, a tokenizer, a base model."""
    folder = tmp_path_factory.mktemp("user")
    lines = [
        {"messages": [{"role": "user", "content": f"Is {n} even?"}, {"role": "assistant", "content": "yes"}]}
        for n in range(40)
    ]
    prompts = [{"messages": line["messages"][:1], "answer": "yes"} for line in lines]
    write_jsonl(folder / "train.jsonl", lines)
    write_jsonl(folder / "prompts.jsonl", prompts)
    train_bpe_tokenizer([json.dumps(lines)], 300, folder / "tokenizer")
    shipped = re.findall(r"^(.*conf)/gpt_sft.yaml:$", nsa("train", "sft", "--help"), re.M)
    make = Path(shipped[0]).parent / "examples" / "nlp" / "gpt" / "init_gpt.py"
    assert make.is_file() and not make.is_relative_to(ROOT)
    sizes = ("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--max-length", "64")
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    python = Path(shipped[0]).parents[5] / "bin" / "python"
    command = [str(python), str(make), "--tokenizer", "tokenizer", "--output", "base.nemo", *sizes]
    subprocess.run(command, cwd=folder, env=env, check=True, timeout=300)
    return folder


def test_a_wheel_has_what_a_checkout_has(wheel: Path) -> None:
    """Each config and script, with the same content; no other folder of the repository."""
    with ZipFile(wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    for file in (*CONFIGS.glob("*.yaml"), *SCRIPTS.glob("*.py"), *(REPOSITORY / "slurm").iterdir()):
        name = f"nemo_style_aligner/shipped/{file.relative_to(REPOSITORY).as_posix()}"
        assert held.get(name) == file.read_bytes(), name
    assert {name.split("/")[0] for name in held} == {
        "nemo_style_aligner",
        f"nemo_style_aligner-{__version__}.dist-info",
    }
    assert not [name for name in held if "demo" in name or "__pycache__" in name]
    sources = {f.relative_to(ROOT).as_posix() for kind in ("py", "cpp", "h", "html", "js", "css")
               for f in (ROOT / "nemo_style_aligner").glob(f"**/*.{kind}")}  # fmt: skip
    assert {name for name in sources if "/shipped/" not in name} <= held.keys()


def test_every_script_that_trains_has_a_command() -> None:
    assert {script for script, _ in TRAINERS.values()} == {path.name for path in SCRIPTS.glob("train_*.py")}


def test_the_newest_section_of_the_changelog_is_of_this_version() -> None:
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert headings[0] == __version__ and len(set(headings)) == len(headings)


def test_jobs_run_from_any_folder(nsa: Nsa, data: Path) -> None:
    """Version and commit, a look at data, SFT, a plan: as with the scripts of a checkout."""
    assert nsa("--version").strip() == f"nsa, version {__version__} (0123456789ab)"
    assert "⟦yes" in nsa("data", "show", "train.jsonl", "--model", "base.nemo", cwd=data)
    said = nsa(
        "train", "sft", *COMMON, "model.restore_from_path=base.nemo", "model.data.train_ds.file_path=train.jsonl",
        "model.data.train_ds.global_batch_size=8",
        "model.data.train_ds.micro_batch_size=8", "trainer.sft.max_steps=2", "exp_manager.explicit_log_dir=sft",
        cwd=data,
    )  # fmt: skip
    assert (data / "sft" / "checkpoints" / "megatron_gpt_sft.nemo").exists(), said
    assert "there is no validation data: nothing is validated" in said
    refused = nsa("train", "dpo", "model.optim.lr=-1", status=2)
    assert refused.startswith("error: ") and "model.optim.lr=-1" in refused and "nanobind" not in refused
    assert "--tokenizer" in nsa("serve-reward", "--function", "f.py:f", status=2)
    (data / "plan.yaml").write_text("results_dir: run\njobs: {one: {script: train_gpt_sft.py, overrides: {}}}\n")
    assert "these keys need a value" in nsa("launch", "plan.yaml", "--dry-run", status=2, cwd=data)


ROAD = """
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
small="trainer.precision=32 model.encoder_seq_length=64 model.global_batch_size=8 model.micro_batch_size=8"
nsa train sft --model base.nemo --data train.jsonl --output road/sft trainer.precision=32 model.encoder_seq_length=64
sft=road/sft/checkpoints/megatron_gpt_sft.nemo
nsa train rm --model $sft --data pairs.jsonl --output road/rm $small
nsa serve-critic --model road/rm/checkpoints/megatron_gpt.nemo --output road/critic $small trainer.ppo.port=CRITIC &
{mpirun} nsa train ppo --model $sft --data prompts.jsonl --output road/ppo $small trainer.devices=2 \\
    remote_critic_rm.critic.port=CRITIC trainer.ppo.batch_iterator.use_flask=True trainer.ppo.batch_iterator.port=0 \\
    model.ppo.num_rollout_samples=8 model.ppo.length_params.max_length=8 trainer.ppo.max_steps=2
kill $!
wait
nsa serve road/ppo/checkpoints/megatron_gpt_ppo_actor.nemo --name policy --port API --no-auth &
curl -sf --retry 90 --retry-all-errors --retry-delay 1 http://127.0.0.1:API/health
curl -sf http://127.0.0.1:API/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"model": "policy", "max_tokens": 4, "messages": [{{"role": "user", "content": "Is 1 even?"}}]}}'
kill $!
"""


@pytest.mark.long
def test_ppo_runs_beside_its_service_and_is_served(shell: Nsa, data: Path) -> None:
    """The tutorial's road: SFT, a reward model, the critic's service beside two ranks of mpirun, the API."""
    write_jsonl(data / "pairs.jsonl", [{"prompt": "Is 1 even?", "chosen": " no", "rejected": " yes"}] * 16)
    road = ROAD.format(mpirun=shlex.join(mpirun(2, ()))).replace("CRITIC", str(free_port()))
    shown = shell("-euc", road.replace("API", str(free_port())), cwd=data)
    assert '"completion_tokens"' in shown
    assert len(read_metrics(data / "road" / "ppo")["train_critic/critic_loss"]) == 2


@pytest.mark.long
def test_ranks_of_launchers_run_the_command(nsa: Nsa, data: Path) -> None:
    """PPO with a group estimator under torchrun, and by the command's own ranks."""
    write_jsonl(data / "texts.jsonl", [{"text": f"Is {n} even?", "answer": "yes"} for n in range(40)])
    flags = (
        *COMMON, "pretrained_checkpoint.restore_from_path=base.nemo", "trainer.ppo.estimator=grpo",
        "trainer.ppo.num_rollouts_per_prompt=4", "trainer.ppo.rewards=[{source: exact_match}]",
        "model.data.data_prefix={train: [texts.jsonl], validation: [texts.jsonl]}", "trainer.devices=2",
        "model.ppo.num_rollout_samples=4", "model.global_batch_size=16", "model.micro_batch_size=4",
        "model.ppo.length_params.max_length=8", "trainer.ppo.max_steps=1",
    )  # fmt: skip
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
    for name, before in (("torchrun", torchrun), ("alone", ())):
        nsa("train", "ppo", *flags, f"exp_manager.explicit_log_dir={name}", before=before, cwd=data)
        assert list((data / name / "checkpoints").glob("*.nemo"))


def test_a_checkout_says_its_commit() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("NOT TESTED: this is no clone")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found = commit()
    assert found is not None and head.startswith(found.removesuffix("+"))
