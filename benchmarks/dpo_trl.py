"""TRL's DPO trainer as a contender of `dpo_step.py`: its steps timed, what it logs as JSON lines.

    python dpo_trl.py SETTINGS.json

Runs in any environment that has trl 1.16.0; imports nothing of this project. The trainer is TRL's own.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from trl import DPOConfig, DPOTrainer


class Report(transformers.TrainerCallback):
    """After each step a line: its seconds, and what the trainer logs."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = time.perf_counter() - self._started

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if "grad_norm" in logs:
            line = {"seconds": self._seconds, "loss": float(logs["loss"]), "grad_norm": float(logs["grad_norm"])}
            print(json.dumps(line | {"margin": float(logs["rewards/margins"])}), flush=True)


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, settings["dtype"])
    policy, reference = (
        transformers.AutoModelForCausalLM.from_pretrained(settings["policy"], dtype=dtype, attn_implementation="sdpa")
        for _ in range(2)
    )
    pairs = [json.loads(line) for line in Path(settings["pairs"]).read_text().splitlines()]
    config = DPOConfig(
        output_dir=settings["output"],
        use_cpu=True,
        bf16=False,  # no autocast: the weights themselves have the dtype
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=len(pairs) // settings["micro_batch"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.98,
        weight_decay=0.1,
        max_length=None,
        beta=settings["beta"],
        max_steps=settings["steps"],
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=1,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["policy"])
    trainer = DPOTrainer(
        model=policy,
        ref_model=reference,
        args=config,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(pairs),
        callbacks=[Report()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
