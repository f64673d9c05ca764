"""What a training step keeps in memory, phase by phase, against the model in docs/performance.md.

    python benchmarks/memory.py [--shape smollm2-135m] [--precision 32] [--sequences 16] [--json FILE]

The cases, each in a process of its own, are packed rows with activations kept, recomputed selectively, and recomputed
fully, and with adapters of rank 32 beside all linear layers (docs/lora.md); and, for comparison, rows padded to the
longest, with logits of all positions.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    SHAPES,
    available_cores,
    default_precision,
    json_path,
    positive_int,
    print_table,
    write_json,
)
from training_pass import ADAM, OPTIM, Workload, add_batching_arguments, add_workload_arguments, make_workload, padded

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import device, single_process
from nemo_style_aligner.trainer.checkpoints.sharded_writing import own_parts, snapshot
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.trainer.models import gpt, logprobs
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.gpt import build_model, parse_precision
from nemo_style_aligner.trainer.models.layer_kernels import best_kernels
from nemo_style_aligner.trainer.models.layers import uses_torch_attention, uses_transformer_engine
from nemo_style_aligner.trainer.models.linear import widened
from nemo_style_aligner.trainer.models.lora import LoraSettings
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching, micro_batches
from nemo_style_aligner.trainer.models.pipeline import Scoring, forward, train_step
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.models.products import own_kernels
from nemo_style_aligner.trainer.models.sharing import Costs
from nemo_style_aligner.trainer.models.sizes import Layout, Sizes
from nemo_style_aligner.trainer.telemetry.timers import peak_meter

CASES = ("packed", "selective", "full", "lora", "padded")
LORA = {"peft_scheme": "lora", "lora_tuning": {"target_modules": ["all"], "adapter_dim": 32}}
_PHASES = ("weights, gradients, Adam", "log-probs", "forward + backward", "update", "copy for a save")


@dataclasses.dataclass(frozen=True)
class Model:
    """The memory model: bytes of a rank without parallelism."""

    architecture: ModelArchitecture
    dtype: torch.dtype

    def trained(self, case: str) -> int:
        """Numbers that are trained."""
        lora = LoraSettings.from_config({"peft": LORA})
        assert lora is not None
        return lora.num_parameters(self.architecture) if case == "lora" else self.architecture.num_parameters

    def static(self, case: str) -> float:
        """Weights; and of what is trained fp32 gradients, moments, and fp32 main weights in bf16."""
        sizes, one = Sizes(self.architecture, self.dtype.itemsize), Layout()
        states = (sizes.gradients(one) + sizes.optimizer(one)) / self.architecture.num_parameters
        adapters = self.dtype.itemsize * self.trained(case) if case == "lora" else 0
        return sizes.weights(one) + adapters + self.trained(case) * states

    def activations(self, tokens: int, case: str) -> float:
        """Bytes kept for the backward pass of a micro batch."""
        is_te = uses_transformer_engine(self.dtype)
        return Sizes(self.architecture, self.dtype.itemsize).activations(
            Layout(),
            tokens,
            case if case in ("selective", "full") else None,
            recomputes_mlp=is_te,
            fused_norms=is_te,
            torch_attention=uses_torch_attention(self.dtype),
        )

    def packed_weights(self, num_micro_batches: int, case: str, directions: int) -> int:
        """Bytes of the layers' weights, rearranged for products in 1 or 2 directions."""
        a = self.architecture
        is_packed = self.dtype == torch.bfloat16 and device().type == "cpu" and own_kernels() is not None
        if not is_packed or num_micro_batches < 2 or case in ("selective", "full"):
            return 0
        embeddings = a.vocab_size * a.hidden_size * (1 if a.tied_embeddings else 2)
        return directions * self.dtype.itemsize * (a.num_parameters - embeddings)

    def output_layer(self, positions: int, is_padded: bool) -> int:
        """Bytes of logits, and of the weight's gradient where autograd makes a tensor of its own for it."""
        a, is_bf16 = self.architecture, self.dtype == torch.bfloat16
        if is_padded:  # logits, their log-softmax, and the gradient of either
            gradient = a.vocab_size * a.hidden_size * (8 if is_bf16 else 4)
            return 3 * 4 * positions * a.vocab_size + gradient
        product_dtype = widened(torch.empty(0, dtype=self.dtype, device=device())).dtype
        wider = 4 * a.vocab_size * a.hidden_size if product_dtype != self.dtype else 0
        in_place = device().type == "cpu" and best_kernels() is not None  # else torch's functions want fp32
        itemsize = product_dtype.itemsize if in_place else 4
        chunk = min(logprobs.chunk_bytes(device()), itemsize * positions * a.vocab_size)
        if is_bf16 and not wider and not in_place:  # logits or their gradient in bf16, besides
            chunk = int(chunk * (2 if device().type == "cpu" else 1.5))
        return chunk + wider


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_workload_arguments(parser)
    add_batching_arguments(parser, max_tokens=1024)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--threads", type=positive_int, default=available_cores())
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    exit_on_sigterm()
    args.precision = args.precision or default_precision()
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    results = {}
    for case in args.cases:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run_case, args=(case, args, sender), daemon=True)
        process.start()
        sender.close()
        try:
            results[case] = receiver.recv()
        except EOFError:
            process.join()
            raise SystemExit(
                f"{case}: its process ended with status {process.exitcode} (-9: perhaps for lack of memory, and a "
                "smaller --shape, --max-tokens or --padded-rows needs less)"
            ) from None
        process.join()
    report(results)
    settings = {key: str(value) for key, value in vars(args).items()}
    write_json(args.json, {"settings": settings, "parameters": SHAPES[args.shape].num_parameters, "cases": results})


def run_case(case: str, args: argparse.Namespace, answer: Any) -> None:
    """Send measured and predicted bytes of each phase, beyond what was there before it began."""
    torch.set_num_threads(args.threads)
    architecture, dtype = SHAPES[args.shape], parse_precision(args.precision)
    workload = make_workload(args, architecture)
    with single_process():
        answer.send(measure(case, args, Model(architecture, dtype), workload))


def measure(case: str, args: argparse.Namespace, model_of_memory: Model, workload: Workload) -> dict[str, Any]:
    is_padded = case == "padded"
    give_back_what_is_freed()
    take_peak = peak_meter()
    if take_peak is None:
        raise SystemExit("this system does not count a process's peak of memory")
    start = settled(take_peak)
    granularity = case if case in ("selective", "full") else None
    config = {"optim": OPTIM, "activations_checkpoint_granularity": granularity}
    config |= {"peft": LORA} if case == "lora" else {}
    model = build_model(model_of_memory.architecture, config, model_of_memory.dtype)
    optimizer = Optimizer(model, ADAM, Schedule(lr=1e-6, name="constant"), 1.0)
    batching = MicroBatching(args.padded_rows, None if is_padded else args.max_tokens)
    actor = Actor(
        *(model, optimizer, None),
        training_batching=batching,
        forward_batching=batching,
        temperature=1.0,
        loss=LossSettings(),
    )
    batch = padded(workload.batch) if is_padded else workload.batch
    if is_padded:
        gpt.predict = all_logits  # type: ignore[assignment]
    optimizer.step(0.0, "nothing, for the moments to be there")

    def train() -> None:
        model.module.train()
        optimizer.zero_grad()
        train_step(model, batch, None, batching, actor._loss, scoring=Scoring())

    def score() -> None:
        forward(model, batch, None, batching, lambda x, _: x, scoring=Scoring())

    def copy() -> None:
        snapshot(own_parts(part for _, parts in model.trained_parts() for part in parts))

    static = settled(take_peak)
    measured = {"weights, gradients, Adam": static - start}
    actions: dict[str, Callable[[], Any]] = {
        "log-probs": score,
        "forward + backward": train,
        "update": lambda: optimizer.step(0.0, "a benchmark"),
        "copy for a save": copy,
    }
    for name, action in actions.items():
        before = settled(take_peak)
        if name == "forward + backward":
            before = static  # on a CPU, log-probs leave their buffer for logits behind
        action()
        measured[name] = max(0, take_peak() - before)

    asked = batch.sequences()
    used = asked.used
    parts = micro_batches(Costs.apart(used), batching)
    tokens = max(sum(used[i] for i in part) for part in parts)
    positions = max(sum(asked.num_outputs[i] for i in part) for part in parts)
    m = model_of_memory
    predicted = {
        "weights, gradients, Adam": m.static(case),
        "log-probs": m.output_layer(positions, is_padded)
        - m.output_layer(0, is_padded)
        + m.packed_weights(len(parts), case, directions=1),
        "forward + backward": m.activations(tokens, case)
        + m.output_layer(positions, is_padded)
        + m.packed_weights(len(parts), case, directions=2),
        "copy for a save": m.trained(case) * m.dtype.itemsize,
    }
    return {"tokens": tokens, "positions": positions, "measured": measured, "predicted": predicted}


def give_back_what_is_freed() -> None:
    """Have glibc map every tensor by itself. Otherwise freed tensors would stay as holes between live ones, often just
    too small for the next tensor, and resident memory would not show that they are gone."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold = -3  # M_MMAP_THRESHOLD
        libc.mallopt(mmap_threshold, 1 << 18)


def settled(take: Callable[[], int]) -> int:
    """Bytes held now, after giving back what can be given back."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    take()
    return take()


def all_logits(
    hidden_states: torch.Tensor, weight: torch.Tensor, vocab_size: int, wanted: logprobs.Prediction, **_: Any
) -> torch.Tensor:
    """`logprobs.predict` without chunks: logits of all positions, and autograd."""
    rows = hidden_states[:, 0]
    if wanted.outputs is not None:
        rows = rows.index_select(0, wanted.outputs)
    logits = F.linear(rows, weight[:vocab_size]).float()
    return logits.log_softmax(-1).gather(1, wanted.targets[:, None])[:, 0]


def report(results: dict[str, dict[str, Any]]) -> None:
    """Print MB as measured and, in brackets, what the memory model says."""
    rows = []
    for phase in _PHASES:
        cells = []
        for result in results.values():
            said = result["predicted"].get(phase)
            cells.append(f"{result['measured'][phase] / 1e6:.0f}" + (f" ({said / 1e6:.0f})" if said else ""))
        rows.append((phase, *cells))
    rows.append(("tokens of the largest micro batch", *(str(result["tokens"]) for result in results.values())))
    print("MB, in brackets what the memory model says\n")
    print_table(("", *results), rows)


if __name__ == "__main__":
    main()
