"""DPO, KTO and distillation on a small model, in this process and at several layouts.

``python multirank_preferences.py <folder>`` does the latter. That leaves ``<folder>/<method>_<layout>.pt``: what a
validation and two updates report, and the weights at the end.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from ranks import fork_ranks

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import current_layout, initialize_model_parallel
from nemo_style_aligner.engine.text.jsonl import write_jsonl
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.trainer.checkpoints.nemo_archive import save_nemo
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager
from nemo_style_aligner.trainer.config.loading import check_config, load_defaults
from nemo_style_aligner.trainer.config.schema import JOBS
from nemo_style_aligner.trainer.data.sft import SFTItem
from nemo_style_aligner.trainer.jobs.distillation_setup import build_distillation_trainer, teacher_lines
from nemo_style_aligner.trainer.jobs.job_setup import Run
from nemo_style_aligner.trainer.jobs.preference_setup import build_dpo_trainer, build_kto_trainer
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.restore import open_base_model
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger
from nemo_style_aligner.trainer.training.run_control import RunControl
from nemo_style_aligner.trainer.training.supervised import SupervisedTrainer

LAYOUTS = {  # tp, cp, pp, ranks
    "one": (1, 1, 1, 1), "tensor": (2, 1, 1, 2), "context": (1, 2, 1, 2), "pipeline": (1, 1, 2, 2), "data": (1, 1, 1, 2)
}  # fmt: skip
KD = "knowledge_distillation"
BUILD = {"dpo": build_dpo_trainer, "kto": build_kto_trainer, KD: build_distillation_trainer}


def make_files(folder: Path, **changes: Any) -> None:
    """``base.nemo``, of a shape with changes, and 12 lines of data for each method. Needs a process group."""
    generator = random.Random(1)

    def word(least: int, most: int) -> str:
        return " " + "".join(generator.choices("abcdefgh", k=generator.randint(least, most)))

    pairs = [
        {"prompt": f"Q{word(2, 9)}:", "chosen": word(1, 12), "rejected": word(1, 12), "chosen_reward": n / 4}
        for n in range(12)
    ]
    judged = [
        {"prompt": pair["prompt"], "completion": pair[("chosen", "rejected")[n % 3 == 0]], "label": n % 3 != 0}
        for n, pair in enumerate(pairs)
    ]
    write_jsonl(folder / "dpo.jsonl", pairs)
    write_jsonl(folder / "kto.jsonl", judged)
    tokenizer = train_character_tokenizer("abcdefghQ: ", folder / "tokenizer")
    shape = ModelArchitecture(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=64,
        init_method_std=0.2,
        **changes,
    )
    fingerprint, items = {"tokenizer": tokenizer.fingerprint()}, {}
    for n, pair in enumerate(pairs):
        prompt, response = (tokenizer.text_to_ids(pair[part]) for part in ("prompt", "chosen"))
        items[n] = SFTItem(prompt + response, [0] * len(prompt) + [1] * len(response))
    teacher = build_model(dataclasses.replace(shape, num_layers=3), {}, torch.float32, trainable=False)
    lines = teacher_lines(teacher, items, MicroBatching(5), top_k=6)
    write_jsonl(folder / f"{KD}.jsonl", [line | fingerprint for line in lines])
    model = build_model(shape, {}, torch.float32, trainable=False)
    config = shape.to_nemo_config() | {"encoder_seq_length": 64}
    save_nemo(folder / "base.nemo", model, config, folder / "tokenizer")


def trainer_for(method: str, folder: Path, log_dir: Path, *keys: str) -> SupervisedTrainer:
    """The trainer that the script builds, with these keys, on ranks that have met in their layout."""
    given = [
        "trainer.precision=32",
        f"exp_manager.explicit_log_dir={log_dir}",
        f"pretrained_checkpoint.restore_from_path={folder / 'base.nemo'}",
        f"model.data.data_prefix={{train: [{folder / method}.jsonl], validation: [{folder / method}.jsonl]}}",
        *("model.encoder_seq_length=64", "model.global_batch_size=6"),
        *(["model.data.append_eod=True"] if method != KD else []),
        *("model.optim.name=sgd", "model.optim.lr=0.1", "model.optim.weight_decay=0", "model.optim.sched=null"),
        f"trainer.{method}.gradient_clip_val=0",
        *keys,
    ]
    cfg = load_defaults(f"gpt_{method}")
    for key, _, value in (line.partition("=") for line in given):
        OmegaConf.update(cfg, key, OmegaConf.create(f"x: {value}").x, merge=False)
    check_config(cfg, f"gpt_{method}")
    config: Any = JOBS[f"gpt_{method}"].sections.read(cfg)
    checkpoints = CheckpointManager(log_dir / "checkpoints", CheckpointSettings.from_config(config.exp_manager))
    metrics = MetricsLogger(log_dir, dist.get_rank())
    run = Run(log_dir, current_layout(), metrics, RunControl(), checkpoints)
    base, config = open_base_model(config.pretrained_checkpoint.restore_from_path, config)
    return BUILD[method](config, run, base)


def weights_of(trainer: SupervisedTrainer) -> dict[str, torch.Tensor]:
    """Copies, by their Hugging Face names."""
    return {name: tensor.clone() for name, tensor in export_weights(trainer.model)}


def report(trainer: SupervisedTrainer) -> dict[str, Any]:
    """Of two updates and a validation, which has a last, smaller batch."""
    updates = [trainer.update(range(6)), trainer.update(range(6, 12))]
    return {"updates": updates, "validation": trainer.validate(), "weights": weights_of(trainer)}


def main(folder: Path) -> None:
    fork_ranks(1, lambda: (initialize_model_parallel(1, 1, seed=3), make_files(folder)))
    for method in BUILD:
        for name, (tp, cp, pp, ranks) in LAYOUTS.items():

            def action() -> None:
                initialize_model_parallel(tp, pp, seed=3, cp_size=cp)  # noqa: B023
                sizes = {"tensor": tp, "context": cp, "pipeline": pp}  # noqa: B023
                keys = [
                    f"model.{kind}_{'' if kind == 'context' else 'model_'}parallel_size={size}"
                    for kind, size in sizes.items()
                ]
                trainer = trainer_for(method, folder, folder / f"{method}_{name}", *keys)  # noqa: B023
                result = report(trainer)
                if method == KD:  # noqa: B023
                    items = {n: trainer.train_data[n] for n in range(5)}
                    result["lines"] = teacher_lines(trainer.model, items, MicroBatching(2), top_k=4)
                if dist.get_rank() == 0:
                    torch.save(result, folder / f"{method}_{name}.pt")  # noqa: B023

            fork_ranks(ranks, action)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
