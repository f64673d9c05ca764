"""Archives of the Hugging Face directories and GGUF files that a job's config names, made on the way into its results.

They stay in ``base/`` of the log directory, and later starts use them, until the files that they were made of change.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from nemo_style_aligner.durable import UNFINISHED, discard, publish
from nemo_style_aligner.engine.parallel.agreement import patiently_on_first_rank
from nemo_style_aligner.engine.parallel.detection import LOOPBACK, LaunchInfo, outside_of_job
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.trainer.config.job_config import JobConfig
from nemo_style_aligner.trainer.config.loading import archive_key, log_directory
from nemo_style_aligner.trainer.jobs.datasets import read_data
from nemo_style_aligner.trainer.jobs.job_view import TEACHER_ARCHIVE
from nemo_style_aligner.trainer.jobs.log_lock import make_log_directory, writing_to
from nemo_style_aligner.trainer.jobs.placement import CRITIC_ARCHIVE
from nemo_style_aligner.trainer.launch import roles
from nemo_style_aligner.trainer.launch.supervisor import rank_environment
from nemo_style_aligner.trainer.models.files import tokenizer_of
from nemo_style_aligner.trainer.models.foreign_models import is_foreign, state_of
from nemo_style_aligner.trainer.models.gpt import parse_precision

logger = logging.getLogger(__name__)

FOLDER = "base"
"""In the log directory: the archives."""


def with_archives(name: str, config: JobConfig) -> JobConfig:
    """The config with an archive wherever it names a Hugging Face directory or a GGUF file. Collective.

    Args:
        name: the job's YAML file, without its ending.

    Raises:
        DataError: the job's data are not as they should be; they are read before what takes long.
        UserError: a model cannot be converted; the conversion itself has said why.
    """
    for key in (archive_key(name), CRITIC_ARCHIVE, TEACHER_ARCHIVE):
        given = config.get(key)
        if given and is_foreign(source := Path(str(given)).expanduser()):
            target = patiently_on_first_rank(lambda: str(_archive_of(source, key, name, config)), None)  # noqa: B023
            config = config.changed({key: target})
    return config


def _archive_of(source: Path, key: str, name: str, config: JobConfig) -> Path:
    precision = "32" if parse_precision(config.trainer.precision) == torch.float32 else "bf16"
    folder = log_directory(config.exp_manager).absolute() / FOLDER
    stem = source.name if source.is_dir() else source.stem
    target = folder / f"{stem}-{precision}-{state_of(source)[:8]}.nemo"
    with writing_to(folder.parent):
        make_log_directory(folder.parent)
        make_log_directory(folder)
    with _alone_in(folder):  # ranks set apart may begin with the same model
        if target.exists():
            logger.info("%s=%s: using %s, which an earlier start has made of it", key, source, target)
            return target
        logger.info("%s=%s is no archive: making %s of it, which later starts use", key, source, target)
        channel = roles.channel()
        if key == archive_key(name) and (channel is None or channel.role == roles.TRAINING):
            read_data(config, tokenizer_of(source))  # what is wrong with them is said before weights are read
        _convert(source, target, key, precision)
    return target


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait for processes that make archives in the folder, and keep others out."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _convert(source: Path, target: Path, key: str, precision: str) -> None:
    """In a process of its own, whose memory is free again then, as this rank's group is not that of a conversion."""
    unfinished = target.with_name(f"{target.stem}{UNFINISHED}.nemo")
    discard(unfinished) if unfinished.exists() else None
    command = [sys.executable, "-m", "nemo_style_aligner", "convert", str(source), str(unfinished)]
    alone = LaunchInfo(0, 1, 0, 1, "supervisor", LOOPBACK, free_port())
    env = rank_environment(outside_of_job(os.environ), alone)
    done = subprocess.run([*command, "--precision", precision], env=env, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise UserError(f"{key}={source}: no archive could be made of it, for the reason that stands above")
    publish(unfinished, target)
