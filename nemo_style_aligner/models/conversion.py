"""Conversion between .nemo archives, Hugging Face directories and GGUF files.

Each conversion is run by every rank of one model replica: one process, or several that split the model over
tensor and pipeline ranks when it is too large for one.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.checkpoints.nemo_archive import (
    load_nemo_config,
    load_nemo_tokenizer,
    load_nemo_weights,
    save_nemo,
)
from nemo_style_aligner.data.tokenizer import load_tokenizer
from nemo_style_aligner.models.gpt import MegatronModel, build_model, parse_precision
from nemo_style_aligner.models.heads import RewardHeadConfig
from nemo_style_aligner.parallel.agreement import on_first_rank
from nemo_style_aligner.parallel.detection import detect_launch
from nemo_style_aligner.parallel.ending import abort_job, install_excepthook, shutdown
from nemo_style_aligner.parallel.groups import initialize_model_parallel
from nemo_style_aligner.parallel.launch import initialize
from nemo_style_aligner.telemetry.progress import ProgressBar
from nemo_style_aligner.weights.gguf import GGUFCheckpoint
from nemo_style_aligner.weights.huggingface import (
    HuggingFaceCheckpoint,
    copy_tokenizer_files,
    hf_family,
    read_architecture,
    require_empty,
    write_checkpoint,
)
from nemo_style_aligner.weights.layout import hf_tensors, weight_layout
from nemo_style_aligner.weights.stream import WeightSource, export_weights, import_weights

logger = logging.getLogger(__name__)


def conversion_arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that all conversion scripts share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16", help="of the weights written: bf16 (default) or 32")
    parser.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="split layers over N processes")
    parser.add_argument("--pipeline-parallel", type=int, default=1, metavar="N", help="spread layers over N processes")
    return parser


def run_conversion(
    convert: Callable[[Path, Path, torch.dtype], ModelArchitecture],
    source: str,
    target: str,
    arguments: argparse.Namespace,
) -> None:
    """Run one of this module's conversions as a script: a user's mistake ends it with one line and status 1."""
    install_excepthook()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        _initialize(arguments.tensor_parallel, arguments.pipeline_parallel)
        architecture = convert(
            Path(source).expanduser(), Path(target).expanduser(), parse_precision(arguments.precision)
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        abort_job(1)
    if dist.get_rank() == 0:
        print(f"{target}: {architecture.family}, {architecture.num_parameters / 1e6:.1f}M parameters")
    shutdown()


def _initialize(tp_size: int, pp_size: int) -> None:
    """Set up torch.distributed and the model-parallel groups for one replica of a model."""
    world_size = detect_launch(os.environ).world_size
    if world_size != tp_size * pp_size:
        raise ValueError(
            f"--tensor-parallel {tp_size} x --pipeline-parallel {pp_size} takes {tp_size * pp_size} processes, "
            f"{world_size} were started: use torchrun --nproc-per-node {tp_size * pp_size}"
        )
    trainer = {"devices": world_size, "num_nodes": 1, "distributed_timeout_minutes": 60}
    initialize(OmegaConf.create({"trainer": trainer}))
    initialize_model_parallel(tp_size, pp_size, seed=1234)


def hf_to_nemo(input_dir: Path, output: Path, dtype: torch.dtype) -> ModelArchitecture:
    """Make a .nemo archive of a Hugging Face directory.

    A sequence classifier (``score.weight``) becomes a reward model. Collective.

    Raises:
        FileNotFoundError: config, weights or tokenizer are not there.
        ValueError: a model or feature that is not supported, or weights that do not fit the config.
    """
    architecture = read_architecture(input_dir)
    source = HuggingFaceCheckpoint(input_dir)
    with tempfile.TemporaryDirectory(prefix="tokenizer_") as folder:
        copy_tokenizer_files(input_dir, folder)
        load_tokenizer(folder)  # fails now rather than in the first job that uses the archive
        _import_and_save(architecture, source, output, dtype, Path(folder), source.num_attributes)
    return architecture


def gguf_to_nemo(input_file: Path, output: Path, dtype: torch.dtype) -> ModelArchitecture:
    """Make a .nemo archive of a (quantised) GGUF file, with its tokenizer and chat template. Collective.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a model or feature that is not supported.
    """
    source = GGUFCheckpoint(input_file)
    with tempfile.TemporaryDirectory(prefix="tokenizer_") as folder:
        source.save_tokenizer(folder)
        load_tokenizer(folder)
        _import_and_save(source.architecture, source, output, dtype, Path(folder))
    return source.architecture


def nemo_to_hf(input_path: Path, output_dir: Path, dtype: torch.dtype) -> ModelArchitecture:
    """Make a Hugging Face directory of a .nemo archive; a reward model becomes a sequence classifier. Collective.

    Raises:
        FileNotFoundError: no archive, or none with a tokenizer.
        FileExistsError: ``output_dir`` has something in it.
        ValueError: an incomplete config, or no Hugging Face family can express the model.
    """
    on_first_rank(lambda: require_empty(output_dir))  # before the weights are loaded, which takes long
    config = load_nemo_config(input_path)
    if config.get("vocab_size") is None:
        load_nemo_tokenizer(input_path)  # it is the tokenizer's, whose error says what is the matter
    architecture = ModelArchitecture.from_nemo_config(config)
    hf_family(architecture)
    head = RewardHeadConfig.from_model_config(config) if "reward_model_type" in config else None
    model = build_model(architecture, {}, dtype, head=head, trainable=False)
    load_nemo_weights(input_path, model)
    attributes = head.num_attributes if head else 0
    progress = _progress(architecture, attributes, "writing weights")

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        with progress:
            for name, tensor in export_weights(model):
                yield name, tensor
                progress.update()

    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory(prefix="tokenizer_") as folder:
            # Saved rather than copied: a sentencepiece model alone says nothing to transformers.
            load_nemo_tokenizer(input_path).save(Path(folder))
            write_checkpoint(output_dir, architecture, weights(), num_attributes=attributes, tokenizer_dir=folder)
    else:
        for _ in export_weights(model):
            pass
    if head is not None:
        _warn_of_what_classifiers_lack(model, head)
    return architecture


def _import_and_save(
    architecture: ModelArchitecture,
    source: WeightSource,
    output: Path,
    dtype: torch.dtype,
    tokenizer_dir: Path,
    num_attributes: int = 0,
) -> None:
    config = architecture.to_nemo_config() | {"encoder_seq_length": architecture.max_position_embeddings}
    head = None
    if num_attributes:
        config |= _reward_config(num_attributes)
        head = RewardHeadConfig.from_model_config(config)
    model = build_model(architecture, {}, dtype, head=head, trainable=False)
    with _progress(architecture, num_attributes, "reading weights", model) as progress:
        import_weights(model, source, progress=lambda _: progress.update())
    if head is not None:
        _warn_of_what_classifiers_lack(model, head)
    output.parent.mkdir(parents=True, exist_ok=True)
    save_nemo(output, model, config, tokenizer_dir)


def _reward_config(num_attributes: int) -> Mapping[str, Any]:
    config: dict[str, Any] = {"reward_model_type": "binary_ranking", "use_avg_pool": False}
    if num_attributes > 1:
        regression = {"num_attributes": num_attributes, "merge_attributes": False}
        config |= {"reward_model_type": "regression", "regression": regression}
    return config | {"force_head_dtype": "float32"}


def _progress(
    architecture: ModelArchitecture, num_attributes: int, description: str, model: MegatronModel | None = None
) -> ProgressBar:
    """Counts the model's tensors, or those that this rank's stage of ``model`` reads."""
    entries = weight_layout(architecture, num_attributes=num_attributes)
    if model is not None:
        layout, layers = model.layout, architecture.num_layers
        entries = tuple(entry for entry in entries if entry.stage(layers, layout.pp_size) == layout.pp_rank)
    return ProgressBar(len(hf_tensors(entries)), description, dist.get_rank())


def _warn_of_what_classifiers_lack(model: MegatronModel, head: RewardHeadConfig) -> None:
    """Hugging Face's sequence classifiers score the last token, without a bias or a standardisation."""
    if not model.layout.is_last_stage or model.layout.tp_rank:
        return
    lost = []
    if head.pooling != "last":
        lost.append("average pooling")
    if head.std is not None:
        lost.append("reward standardisation")
    if model.gpt.rm_head.bias.any():
        lost.append("the head's bias (kept as score.bias)")
    if lost:
        logger.warning("Hugging Face's sequence classifiers have no %s: rewards will differ", ", ".join(lost))
