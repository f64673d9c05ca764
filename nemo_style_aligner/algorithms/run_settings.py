"""Settings that define a run: a start with other values still continues the old run, which may surprise its user."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from nemo_style_aligner.checkpoints.manifest import describe_file
from nemo_style_aligner.checkpoints.nemo_archive import archive_identity
from nemo_style_aligner.data.datasets import data_source, load_data_prefix
from nemo_style_aligner.data.tokenizer import Tokenizer

_MAY_DIFFER = (
    # what is written, shown and measured, and when
    *(
        "name",
        "exp_manager.*",
        "trainer.*.val_check_interval",
        "trainer.*.save_interval",
        "trainer.*.limit_val_batches",
    ),
    *("trainer.ppo.num_table_rows", "model.ppo.num_val_samples", "trainer.rm.val_random_sampler"),
    *("model.data.validation_ds.*", "model.data.data_prefix.validation", "model.data.data_prefix.test"),
    # on which machines, and how the work is divided among them
    *("trainer.num_nodes", "trainer.devices", "trainer.ppo.rollout_devices", "trainer.distributed_timeout_minutes"),
    *("model.*_parallel_size", "model.sequence_parallel", "model.*micro_batch*", "model.activations_checkpoint_*"),
    *("model.*offload_adam_states", "model.*keep_activations", "model.rm_placement", "model.optim.overlap_grad_sync"),
    *("trainer.ppo.reference_policy_placement", "trainer.ppo.generation.*", "trainer.ppo.trt_llm.*"),
    # addresses, limits, secrets
    *("remote_critic_rm.*", "trainer.ppo.batch_iterator.*", "trainer.ppo.connections.*", "trainer.ppo.max_body_bytes"),
    *("trainer.ppo.port", "trainer.ppo.host", "trainer.ppo.token", "trainer.ppo.known_as"),
    *("trainer.ppo.max_outstanding_requests",),
    *("trainer.ppo.*_seconds", "trainer.ppo.max_queue_delay_microseconds", "trainer.ppo.inference_micro_batch_size"),
    *("trainer.ppo.strip_sequence_length_to_multiple", "trainer.*.on_nonfinite", "trainer.*.max_consecutive_skips"),
)  # patterns of keys; whatever their values, a run computes the same, rounding and sampled numbers aside


_JOBS = (
    ("trainer.sft.", "an SFT job"),
    ("trainer.rm.", "a reward model job"),
    ("model.ppo.", "a PPO actor job"),
    ("trainer.ppo.", "a critic job"),  # an actor has this section as well
)  # sections that tell jobs apart


def job_of(settings: Mapping[str, str]) -> str | None:
    """What kind of job was started with these settings (see `settings_of_run`); None if they do not say."""
    return next((job for section, job in _JOBS if any(key.startswith(section) for key in settings)), None)


def settings_of_run(cfg: DictConfig) -> dict[str, str]:
    """The config values that all starts of a run should share, by dotted key; a run's checkpoints keep them.

    Interpolations are not resolved, so that a key that follows another is not reported beside it. Secrets are left out.
    """
    container: Any = OmegaConf.to_container(cfg, resolve=False)
    return {key: str(value) for key, value in _leaves(container) if not any(fnmatchcase(key, p) for p in _MAY_DIFFER)}


def digests_of_data(data: DictConfig) -> dict[str, str]:
    """SHA-256 of each file that a run trains on, by name: with other contents it is not the same run either.

    Args:
        data: the section ``model.data``.
    """
    if "data_prefix" in data:
        source = load_data_prefix(data.data_prefix).train
    else:
        source = data_source(data.train_ds.file_path, "model.data.train_ds.file_path")
    return {f"SHA-256 of {path}": describe_file(path)["sha256"][:16] for path in source.paths}


_BASE, _IDENTITY, _TOKENIZER = "base archive", "fingerprint of the base archive", "fingerprint of the tokenizer"


def base_of_run(path: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """What a run's settings keep of the archive that it begins with: where it is, and fingerprints. Not collective.

    For the errors see `archive_identity`.
    """
    return {_BASE: str(path), _IDENTITY: archive_identity(path)[:16], _TOKENIZER: tokenizer.fingerprint()}


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


def _leaves(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def changed_settings(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """``key=value (before: value)`` for each key whose values differ.

    Keys that only one of them has are left out: they may be those of another version of this project. So are the places
    of base archives, of which `why_another_base` compares the contents.
    """
    return [
        f"{key}={value} (before: {before[key]})"
        for key, value in now.items()
        if key in before and before[key] != value and key != _BASE and not key.endswith("restore_from_path")
    ]
