"""What TRL's trainers share as contenders of `ppo_step.py` and `grpo_step.py`: forced lengths, timed phases, turns.

Imports nothing of this project: TRL may live in an environment of its own.
"""

from __future__ import annotations

import collections
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from ppo_turns import Turns


class ForcedLengths(transformers.LogitsProcessor):
    """Makes the stop token certain where a response must end, impossible before, and the pad token impossible always.

    Args:
        lengths: tokens of each row's response, the stop token included.
        start: width of the prompts.
    """

    def __init__(self, lengths: list[int], start: int, stop_id: int, pad_id: int) -> None:
        self._last = torch.tensor(lengths) + start - 1
        self._stop_id, self._pad_id = stop_id, pad_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, [self._stop_id, self._pad_id]] = -torch.inf
        self._last = self._last.to(scores.device)
        ends = (self._last == input_ids.shape[1]).nonzero()[:, 0]
        scores[ends] = -torch.inf
        scores[ends, self._stop_id] = 0.0
        return scores


def synchronize() -> None:
    """Wait for the GPU's work, which would otherwise count for a later phase."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Phases:
    """Seconds by phase since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self._training_since: float | None = None
        self.last = ""

    def timed(self, name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` to add its time to the phase that ``name`` makes of its positional arguments ("": none)."""

        def call(*args: Any, **kwargs: Any) -> Any:
            phase = name(*args)
            if not phase:
                return function(*args, **kwargs)
            synchronize()
            started = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started
            self.last = phase
            return result

        return call

    def begin_training(self) -> None:
        """Note the beginning of training: the first call in a step, after which everything is training."""
        if self._training_since is None:
            synchronize()
            self._training_since = time.perf_counter()

    def restart(self) -> None:
        """Begin a step."""
        self._seconds, self._training_since, self.last = {}, None, ""
        self._started = time.perf_counter()

    def take(self) -> dict[str, float]:
        """The step's phases, and the whole of it as ``step``."""
        synchronize()
        now = time.perf_counter()
        if self._training_since is not None:
            self._seconds["train"] = now - self._training_since
        return {"step": now - self._started, **self._seconds}


class TakeTurns(transformers.TrainerCallback):
    """After each step: report, and wait for the next turn."""

    def __init__(self, turns: Turns, phases: Phases, counts: dict[str, int]) -> None:
        self._turns, self._phases, self._counts = turns, phases, counts

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._turns.report(0)
        self._begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        self._turns.report({"phases": self._phases.take(), "device_peak_bytes": peak, **self._counts})
        self._begin()

    def _begin(self) -> None:
        self._turns.wait()
        self._counts.update(prompt_tokens=0, new_tokens=0)
        self._phases.restart()


def force_lengths(policy: Any, settings: dict[str, Any], counts: dict[str, int]) -> None:
    """Have ``policy.generate`` make responses of the forced lengths, and count their tokens.

    A prompt's samples come in the order of their lengths in the settings, all of them in one call.
    """
    lengths: dict[tuple[int, ...], list[int]] = {}
    for prompt, length in settings["prompts"]:
        lengths.setdefault(tuple(prompt), []).append(length)
    stop_id, pad_id = settings["stop_id"], settings["pad_id"]
    generate = policy.generate

    def forced(input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        seen: collections.Counter[tuple[int, ...]] = collections.Counter()
        wanted = []
        for row, mask in zip(input_ids, attention_mask.bool(), strict=True):
            prompt = tuple(row[mask].tolist())
            wanted.append(lengths[prompt][seen[prompt]])
            seen[prompt] += 1
        processor = ForcedLengths(wanted, input_ids.shape[1], stop_id, pad_id)
        output = generate(input_ids=input_ids, attention_mask=attention_mask, logits_processor=[processor], **kwargs)
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        responses = sequences[:, input_ids.shape[1] :]
        got = (responses != pad_id).sum(1).tolist()
        if got != wanted or not (responses == stop_id).sum(1).eq(1).all():
            raise RuntimeError(f"responses of {got} tokens instead of {wanted}")
        counts["prompt_tokens"] += int(attention_mask.sum())
        counts["new_tokens"] += sum(got)
        return output

    policy.generate = forced


def load_model(kind: Any, path: str, settings: dict[str, Any], **options: Any) -> Any:
    """A model of transformers in the dtype of the settings."""
    dtype = getattr(torch, settings["dtype"])
    model = kind.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", **options)
    model.config.pad_token_id = settings["pad_id"]
    return model


def load_policy(settings: dict[str, Any]) -> tuple[Any, Any]:
    """The policy and its tokenizer, whose responses end with the stop token of the settings alone."""
    policy = load_model(transformers.AutoModelForCausalLM, settings["policy"], settings)
    # Otherwise rows that have ended would be filled with stop tokens, which TRL would not mask everywhere.
    policy.generation_config.pad_token_id = settings["pad_id"]
    policy.generation_config.eos_token_id = settings["stop_id"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["policy"], padding_side="left")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(settings["pad_id"])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(settings["stop_id"])
    return policy, tokenizer


def require_device(trainer: Any, wanted: str) -> None:
    """SystemExit if the trainer would compute elsewhere."""
    computes_on = trainer.accelerator.device.type
    if computes_on != wanted:
        sys.exit(f"TRL would compute on {computes_on}, not on {wanted}")


def common_options(settings: dict[str, Any]) -> dict[str, Any]:
    """What the configs of both trainers have in common."""
    return {
        "output_dir": settings["output"],
        "use_cpu": settings["device"] == "cpu",
        "bf16": False,  # no autocast: the weights themselves have the dtype
        "gradient_checkpointing": False,
        "per_device_train_batch_size": settings["micro_batch"],
        "gradient_accumulation_steps": len(settings["prompts"]) // settings["micro_batch"],
        "temperature": 1.0,
        "learning_rate": settings["lr"],
        "lr_scheduler_type": "constant",
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 1,
    }
