"""Fixtures that several files share."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Several workers, and the jobs that tests start, share the cores: nobody's threads shall wait for each other's turn.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is loaded, hence before what follows
# Most tests compare with numbers of a CPU, or start more ranks than a machine has GPUs.
if not os.environ.get("TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# The services of tests are on this machine, which a proxy cannot reach.
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost,::1"

import torch

from nemo_style_aligner.engine.native import compilation
from nemo_style_aligner.guard.secret import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, make_secret

# Helper modules beside the tests, whatever pytest's import mode, and those of the demo.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples" / "demo")]

# Files that take longest, in this order; they begin first, so that no worker is left with one of them at the end.
SLOWEST_FILES = (
    "test_jobs.py",
    "test_checkpoints.py",  # which needs nothing of what the first makes for others
    "test_group_jobs.py",
    "test_supervised_jobs.py",
    "test_ppo_invariance.py",
    "test_weights.py",
    "test_lora.py",
    "test_recovery.py",
    "test_benchmarks.py",
    "test_watchdog.py",
    "test_launch.py",
)
# Files that `make check` leaves out, beside those above: they start processes, or compute for seconds.
SLOW_FILES = (
    *("test_config_checks.py", "test_cpu_support.py", "test_demo.py", "test_engines_and_trainer.py", "test_gguf.py"),
    "test_first_tries.py",
    *("test_generation_embedded.py", "test_generation_lifecycle.py", "test_generation_native.py"),
    *(
        "test_generation_torch_step.py",
        "test_generation_triton.py",
        "test_launchers.py",
        "test_reward_function.py",
        "test_service.py",
    ),
    *("test_service_clients.py", "test_service_limits.py", "test_staleness.py", "test_encoding.py"),
    *(
        "test_generation_views.py",
        "test_ragged.py",
        "test_triton_kernels.py",
        "test_trackers.py",
        "test_trtllm_sidecar.py",
    ),
    *("test_distillation.py", "test_evaluation.py", "test_preferences.py", "test_serving.py", "test_software_cuda.py"),
    *("test_hostile_checkpoints.py", "test_hostile_files.py", "test_hostile_wire.py", "test_neighbours.py"),
    *("test_protocol_fuzz.py", "test_second_user.py"),
)


def pytest_report_header() -> str | None:
    """Which layers the tests on GPUs test."""
    if not torch.cuda.is_available():
        return None
    from nemo_style_aligner.trainer.models.layers import uses_transformer_engine

    layers = "Transformer Engine's" if uses_transformer_engine(torch.bfloat16) else "this project's own"
    return f"{torch.cuda.get_device_name()}: layers in bf16 are {layers}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first. Within a file the order stays. What takes long is skipped unless it is asked for."""
    places = {name: place for place, name in enumerate(SLOWEST_FILES)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))
    for item in items:
        if item.path.name in (*SLOWEST_FILES, *SLOW_FILES):
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("long") and not os.environ.get("TEST_LONG"):
            item.add_marker(pytest.mark.skip(reason="NOT TESTED: takes long; make test-long does (TEST_LONG=1)"))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch and the compiled kernels compute with."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _secret_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The jobs that tests start share a secret of their own instead of making the user's."""
    os.environ[TOKEN_FILE_VARIABLE] = make_secret(tmp_path_factory.mktemp("secret") / "token").source
    os.environ.pop(TOKEN_VARIABLE, None)


@pytest.fixture(scope="session", autouse=True)
def _folder_for_compiled_code(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's, where there can be one: it takes long to compile everything anew."""
    try:
        compilation._cache_folder()
    except compilation.NativeUnavailable:
        folder = _of_all_workers(tmp_path_factory) / "compiled"
        folder.mkdir(0o700, exist_ok=True)
        os.environ["NEMO_STYLE_ALIGNER_CACHE"] = str(folder)


@pytest.fixture(autouse=True)
def _same_log_levels() -> None:
    """What is logged, whatever test of a job's start ran before in this process."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("nemo_style_aligner").setLevel(logging.NOTSET)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch, whatever OMP_NUM_THREADS the user has set: in tiny models more of them only wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Process groups of one process, this one."""
    from nemo_style_aligner.engine.parallel.groups import (
        single_process,  # megatron-core takes seconds: not for every file
    )

    with single_process(seed=1):
        yield


@dataclasses.dataclass(frozen=True)
class Artefacts:
    """What the first three jobs of the road leave: data, tokenizer, base model, SFT model, reward model.

    Attributes:
        folder: everything is in it; tests may put folders of their own beside.
        sft_log, rm_log: log directories of the two training jobs.
        outputs: what the scripts printed, by script.
    """

    folder: Path
    sft_log: Path
    rm_log: Path
    outputs: dict[str, str]

    @property
    def base(self) -> Path:
        """A randomly initialised model."""
        return self.folder / "base.nemo"

    @property
    def sft(self) -> Path:
        """It after a few SFT steps."""
        return self.sft_log / "checkpoints" / "megatron_gpt_sft.nemo"

    @property
    def rm(self) -> Path:
        """A reward model from it."""
        return self.rm_log / "checkpoints" / "megatron_gpt.nemo"

    def data(self, name: str) -> Path:
        """A JSONL file of the arithmetic task, such as ``train_prompts``."""
        return self.folder / "data" / f"{name}.jsonl"

    def data_prefix(self, kind: str) -> str:
        """``{train: [...], validation: [...], test: [...]}`` as on the tutorial's command lines."""
        train, test = self.data(f"train_{kind}"), self.data(f"test_{kind}")
        return f"model.data.data_prefix={{train: [{train}], validation: [{test}], test: [{test}]}}"

    def sft_flags(self, log_dir: Path, devices: int = 1) -> list[str]:
        """Of ``train_gpt_sft.py``: four steps in fp32."""
        return [
            "trainer.num_nodes=1",
            f"trainer.devices={devices}",
            "trainer.precision=32",
            "trainer.sft.max_steps=4",
            "trainer.sft.val_check_interval=2",
            "trainer.sft.limit_val_batches=2",
            "trainer.sft.save_interval=2",
            f"model.restore_from_path={self.base}",
            "model.encoder_seq_length=64",
            "model.data.chat=False",
            f"model.data.train_ds.file_path={self.data('train_sft')}",
            f"model.data.validation_ds.file_path={self.data('test_sft')}",
            "model.data.train_ds.global_batch_size=16",
            "model.data.train_ds.micro_batch_size=8",
            "model.answer_only_loss=True",
            "model.optim.lr=1e-2",
            "model.optim.sched.min_lr=1e-3",
            "model.optim.sched.warmup_steps=1",
            "exp_manager.create_wandb_logger=False",
            f"exp_manager.explicit_log_dir={log_dir}",
            "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=True",
        ]


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Artefacts:
    """The supervised half of the road, each script started as a user starts it; the reward model's with the flags of
    the RLHF tutorial, sizes and paths aside. Made once for all of pytest's workers."""
    folder = _of_all_workers(tmp_path_factory) / "road"
    folder.mkdir(exist_ok=True)
    with _lock(folder / "lock"):
        outputs = folder / "outputs.json"
        if outputs.exists():
            return Artefacts(folder, folder / "sft", folder / "rm", json.loads(outputs.read_text()))
        made = _make_artefacts(folder)
        outputs.write_text(json.dumps(made.outputs))
        return made


def _of_all_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary directory that pytest-xdist's workers have in common; pytest's own without them."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_artefacts(folder: Path) -> Artefacts:
    from job_processes import ROOT, run, script

    from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer

    found = Artefacts(folder, folder / "sft", folder / "rm", {})
    os.umask(0o022)  # of most systems; tests look at who may write what jobs leave
    make_data = [sys.executable, str(ROOT / "examples" / "nlp" / "data" / "make_arithmetic.py")]
    run(
        [*make_data, "--output", str(folder / "data"), "--max-operand", "12", "--test-questions", "20"],
        folder / "data.log",
    )
    corpus = "".join(found.data(name).read_text() for name in ("train_sft", "test_sft"))
    train_character_tokenizer(corpus, folder / "tokenizer")
    steps = {
        "init_gpt.py": [
            *("--tokenizer", str(folder / "tokenizer"), "--output", str(found.base), "--max-length", "64"),
            *("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--num-query-groups", "2"),
        ],
        "train_gpt_sft.py": found.sft_flags(found.sft_log),
        "train_reward_model.py": [
            "trainer.num_nodes=1",
            "trainer.devices=1",
            "++model.micro_batch_size=1",
            "++model.global_batch_size=8",
            "++model.data.data_impl=jsonl",
            f"pretrained_checkpoint.restore_from_path={found.sft}",
            found.data_prefix("comparisons"),
            "exp_manager.create_wandb_logger=False",
            "exp_manager.wandb_logger_kwargs.project=rm_training",
            "exp_manager.wandb_logger_kwargs.name=rm_training",
            f"exp_manager.explicit_log_dir={found.rm_log}",
            # sizes; the tutorial's Slurm script has the intervals
            "model.encoder_seq_length=64",
            "trainer.rm.max_steps=3",
            "trainer.rm.save_interval=2",
            "trainer.rm.val_check_interval=2",
            "trainer.rm.limit_val_batches=100000",
        ],
    }
    for name, arguments in steps.items():
        found.outputs[name] = run(script(name, *arguments), folder / f"{name}.log", timeout=240)
    return found
