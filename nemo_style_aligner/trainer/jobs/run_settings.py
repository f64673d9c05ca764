"""Settings that define a run: a start with other values still continues the old run, which may surprise its user."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.guard.masking import masked
from nemo_style_aligner.trainer.checkpoints.manifest import describe_file
from nemo_style_aligner.trainer.config.loading import leaves_of
from nemo_style_aligner.trainer.config.schema import Data, SFTData, may_change
from nemo_style_aligner.trainer.data.datasets import data_source, load_data_prefix

_NOT_TRAINED_ON = ("model.data.data_prefix.validation", "model.data.data_prefix.test")

_JOBS = (
    ("trainer.sft.", "an SFT job"),
    ("trainer.rm.", "a reward model job"),
    ("trainer.dpo.", "a DPO job"),
    ("trainer.kto.", "a KTO job"),
    ("trainer.knowledge_distillation.", "a distillation job"),
    ("model.ppo.", "a PPO actor job"),
    ("trainer.ppo.", "a critic job"),  # an actor has this section as well
)  # sections that tell jobs apart


def job_of(settings: Mapping[str, str]) -> str | None:
    """What kind of job was started with these settings (see `settings_of_run`); None if they do not say."""
    return next((job for section, job in _JOBS if any(key.startswith(section) for key in settings)), None)


def settings_of_run(cfg: DictConfig) -> dict[str, str]:
    """The config values that all starts of a run should share, by dotted key; a run's checkpoints keep them.

    These are all but those that the schema marks as free; secrets are masked.
    Interpolations are not resolved, so that a key that follows another is not reported beside it.
    """
    container: Any = masked(OmegaConf.to_container(cfg, resolve=False))
    leaves = {key: str(value) for key, value in leaves_of(container) if key not in _NOT_TRAINED_ON}
    return {key: value for key, value in leaves.items() if not may_change(key)}


def digests_of_data(data: SFTData | Data) -> dict[str, str]:
    """SHA-256 of each file that a run trains on, by name: with other contents it is not the same run either."""
    if isinstance(data, SFTData):
        source = data_source(data.train_ds.file_path, "model.data.train_ds.file_path")
    else:
        source = load_data_prefix(data.data_prefix).train
    return {f"SHA-256 of {path}": describe_file(path)["sha256"][:16] for path in source.paths}


_CRITIC, _CRITIC_IDENTITY = "critic's archive", "fingerprint of the critic's archive"
_BASE, _IDENTITY, _TOKENIZER = "base archive", "fingerprint of the base archive", "fingerprint of the tokenizer"


def base_of_run(path: Path, identity: str, tokenizer: Tokenizer) -> dict[str, str]:
    """What a run's settings keep of what it begins with: where the archive is, and fingerprints."""
    return {_BASE: str(path), _IDENTITY: identity, _TOKENIZER: tokenizer.fingerprint()}


def critic_of_run(path: Path, identity: str) -> dict[str, str]:
    """What a run's settings keep of a critic that is trained in its job."""
    return {_CRITIC: str(path), _CRITIC_IDENTITY: identity}


def why_another_critic(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Why a run cannot go on with the critic where it is now; None if it can."""
    then, here = before.get(_CRITIC_IDENTITY), now.get(_CRITIC_IDENTITY)
    if then == here:
        return None
    if here is None:
        return "its critic was in this job: give the placement and the critic's archive that it had"
    if then is None:
        return "it had no critic in this job: give the placement that it had"
    return f"its critic began with {before[_CRITIC]}, and {now[_CRITIC]} has other contents: give the former"


def why_another_base(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """What is another archive than that with which a run began; None if nothing is, or if they do not say.

    The same archive may lie in another place.
    """
    if _IDENTITY not in before or _IDENTITY not in now or before[_IDENTITY] == now[_IDENTITY]:
        return None
    what = "another tokenizer and other" if before[_TOKENIZER] != now[_TOKENIZER] else "other"
    return (
        f"this run began with {before[_BASE]} (fingerprint {before[_IDENTITY]}); {now[_BASE]} (fingerprint "
        f"{now[_IDENTITY]}) has {what} contents. Put the former back, or give its path if it was moved"
    )


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """``key=value (before: value)`` for each key whose values differ.

    Keys that only one of them has are left out: they may be those of another version of this project. So are the places
    of base archives, of which `why_another_base` compares the contents.
    """
    before = masked(before)  # an older version's may have secrets
    return [
        f"{key}={value} (before: {before[key]})"
        for key, value in now.items()
        if before.get(key, value) != value and key not in (_BASE, _CRITIC) and not key.endswith("restore_from_path")
    ]
