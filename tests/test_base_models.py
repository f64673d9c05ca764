"""What a job takes over from the model that it starts from."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from trained_models import ARCHITECTURES, saved_tokenizer

from nemo_style_aligner.trainer.checkpoints.nemo_archive import save_nemo
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import Critic, PPOActor
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.restore import lay_over, open_base_model

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")


def test_settings_of_a_job_do_not_come_with_the_model() -> None:
    """null turns recomputation and token budgets off; where it is about the model, it leaves what the archive says."""
    archive = {
        "activations_checkpoint_granularity": "full",
        "max_tokens_per_micro_batch": 512,
        "optim": {"lr": 1.0, "eps": 1.0},
        "hidden_size": 64,
        "regression": {"attribute_weights": [1.0], "num_attributes": 1},
    }
    job = {
        "activations_checkpoint_granularity": None,
        "max_tokens_per_micro_batch": None,
        "optim": {"lr": 0.5},
        "hidden_size": None,
        "regression": {"attribute_weights": None, "num_attributes": 2},
    }
    assert lay_over(archive, job) == {
        "activations_checkpoint_granularity": None,
        "max_tokens_per_micro_batch": None,
        "optim": {"lr": 0.5},
        "hidden_size": 64,
        "regression": {"attribute_weights": [1.0], "num_attributes": 2},
    }


@pytest.mark.parametrize(
    ("archive", "job", "expected"),
    [
        ({"max_position_embeddings": 131072}, {"encoder_seq_length": 4096, "max_position_embeddings": None}, 131072),
        ({"max_position_embeddings": 2048}, {"encoder_seq_length": 4096, "max_position_embeddings": None}, 4096),
        ({"max_position_embeddings": 2048}, {"encoder_seq_length": None, "max_position_embeddings": None}, 2048),
        ({"encoder_seq_length": 8192}, {"encoder_seq_length": 4096, "max_position_embeddings": None}, 8192),
        ({"max_position_embeddings": 131072}, {"encoder_seq_length": 4096, "max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 131072}, {}, 131072),
    ],
)
def test_positions_are_the_archives_unless_the_job_says_otherwise(
    archive: dict[str, Any], job: dict[str, Any], expected: int
) -> None:
    assert lay_over(archive, job)["max_position_embeddings"] == expected


def test_a_job_that_extends_a_models_positions_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """And one whose sequences are shorter leaves them as they are."""
    architecture = dataclasses.replace(ARCHITECTURES["llama"], max_position_embeddings=2048)
    save_nemo(
        tmp_path / "sft.nemo",
        build_model(architecture, {}, torch.float32, trainable=False),
        architecture.to_nemo_config(),
        saved_tokenizer(tmp_path / "tokenizer"),
    )
    for length, expected in ((1024, 2048), (4096, 4096)):
        assert "this job allows" not in caplog.text
        cfg = OmegaConf.merge(load_defaults("gpt_ppo_critic"), {"model": {"encoder_seq_length": length}})
        assert isinstance(cfg, DictConfig)
        base, config = open_base_model(str(tmp_path / "sft.nemo"), Critic.read(cfg))
        assert base.architecture.max_position_embeddings == config.model.max_position_embeddings == expected
    assert "was made for 2048 positions; this job allows 4096" in caplog.text
    assert "set model.encoder_seq_length=2048" in caplog.text


def test_what_special_tokens_in_messages_are_is_kept_with_the_model(tmp_path: Path) -> None:
    architecture = ARCHITECTURES["llama"]
    model = build_model(architecture, {}, torch.float32, trainable=False)
    tokenizer = saved_tokenizer(tmp_path / "tokenizer")
    for number, (asked, known) in enumerate(((None, None), (True, True), (None, True), (False, False))):
        path = tmp_path / f"{number}.nemo"
        save_nemo(path, model, architecture.to_nemo_config(), tokenizer)
        cfg = OmegaConf.merge(load_defaults("gpt_ppo_actor"), {"model": {"special_tokens_as_text": asked}})
        assert isinstance(cfg, DictConfig)
        config = PPOActor.read(cfg)
        tokenizer = open_base_model(str(path), config)[0].tokenizer
        assert tokenizer.format.special_tokens_as_text is known
