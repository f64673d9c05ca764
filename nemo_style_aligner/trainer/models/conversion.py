"""Conversion between .nemo archives, training checkpoints, Hugging Face directories and GGUF files.

Each conversion is run by every rank of one model replica: one process, or several that split the model over
tensor and pipeline ranks when it is too large for one.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from nemo_style_aligner.durable import UNFINISHED
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.agreement import on_first_rank
from nemo_style_aligner.engine.parallel.detection import detect_launch
from nemo_style_aligner.engine.parallel.groups import initialize_model_parallel
from nemo_style_aligner.engine.text.text_format import TEXT_FORMAT, TextFormat
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_export import save_as_trained
from nemo_style_aligner.engine.weights.gguf import GGUFCheckpoint
from nemo_style_aligner.engine.weights.huggingface import (
    HuggingFaceCheckpoint,
    copy_tokenizer_files,
    require_empty,
    write_checkpoint,
)
from nemo_style_aligner.engine.weights.huggingface_config import FAMILIES, hf_family
from nemo_style_aligner.engine.weights.layout import HEAD_BIAS, hf_tensors, weight_layout
from nemo_style_aligner.engine.weights.stream import export_weights, import_weights
from nemo_style_aligner.guard.file_source import DamagedCheckpointError, open_source
from nemo_style_aligner.guard.parsing import parse_yaml
from nemo_style_aligner.guard.trusted_paths import temporary_folder
from nemo_style_aligner.trainer.checkpoints.contents import restore_model
from nemo_style_aligner.trainer.checkpoints.directory import STATE, is_training_checkpoint, present_name
from nemo_style_aligner.trainer.checkpoints.manifest import MANIFEST, find_damage
from nemo_style_aligner.trainer.checkpoints.nemo_archive import (
    has_reward_head,
    load_nemo_config,
    load_nemo_tokenizer,
    load_nemo_weights,
    make_place,
    require_weights,
    save_nemo,
)
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import MODEL_PREFIX, CheckpointMismatchError, stored_shapes
from nemo_style_aligner.trainer.launch.ending import abort_job, install_excepthook, shutdown
from nemo_style_aligner.trainer.launch.initialization import initialize
from nemo_style_aligner.trainer.models.adapter_files import (
    AdapterKind,
    adapter_kind,
    load_adapter,
    read_adapter,
    write_peft,
)
from nemo_style_aligner.trainer.models.foreign_models import config_of_source
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model, parse_precision
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.lora import LoraSettings, add_adapters
from nemo_style_aligner.trainer.models.restore import HISTORY, portable_config, read_base_config, require_whole_model
from nemo_style_aligner.trainer.telemetry.log_lines import warn_plainly
from nemo_style_aligner.trainer.telemetry.metrics import HYPERPARAMETERS_FILE
from nemo_style_aligner.trainer.telemetry.progress import Progress
from nemo_style_aligner.wording import spelt

logger = logging.getLogger(__name__)


def run_conversion(convert: Callable[[], ModelArchitecture], target: Path, tp_size: int, pp_size: int) -> None:
    """Run a conversion to ``target`` on all ranks: a user's mistake ends it with one line and status 1."""
    warn_plainly()
    transformers.logging.set_verbosity_error()
    install_excepthook()
    try:
        _initialize(tp_size, pp_size)
        architecture = convert()
    except (ValueError, OSError) as error:
        print(spelt(f"error: {error}"), file=sys.stderr, flush=True)
        abort_job(1)
    if dist.get_rank() == 0:
        print(f"{target}: {architecture.family}, {architecture.num_parameters / 1e6:.1f}M parameters")
    shutdown()


def _initialize(tp_size: int, pp_size: int) -> None:
    """Set up torch.distributed and the model-parallel groups for one replica of a model."""
    info = detect_launch(os.environ)
    if info.world_size != tp_size * pp_size:
        raise ValueError(
            f"--tensor-parallel {tp_size} x --pipeline-parallel {pp_size} takes {tp_size * pp_size} processes, "
            f"{info.world_size} were started: use torchrun --nproc-per-node {tp_size * pp_size}"
        )
    initialize(info, timeout_minutes=60)
    initialize_model_parallel(tp_size, pp_size, seed=1234)


def hf_to_nemo(input_dir: Path, output: Path, dtype: torch.dtype) -> ModelArchitecture:
    """Convert a Hugging Face directory to a .nemo archive.

    A sequence classifier (``score.weight``) becomes a reward model. Collective.

    Raises:
        FileNotFoundError: config, weights or tokenizer are missing.
        ValueError: a model or feature that is not supported, or weights that do not fit the config.
    """
    source = HuggingFaceCheckpoint(input_dir)
    with temporary_folder(f"the tokenizer of {input_dir}") as folder:
        copy_tokenizer_files(input_dir, folder)
        try:
            _ = load_tokenizer(folder).stop_ids  # fails now rather than in the first job that uses the archive
        except TokenizerError as error:
            raise TokenizerError(str(error).replace(str(folder), str(input_dir))) from error
        _import_and_save(input_dir, source, output, dtype, folder)
    return source.architecture


def gguf_to_nemo(input_file: Path, output: Path, dtype: torch.dtype) -> ModelArchitecture:
    """Convert a (quantised) GGUF file, with its tokenizer and chat template, to a .nemo archive. Collective.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a model or feature that is not supported.
    """
    source = GGUFCheckpoint(input_file)
    with temporary_folder(f"the tokenizer of {input_file}") as folder:
        source.save_tokenizer(folder)
        load_tokenizer(folder)
        _import_and_save(input_file, source, output, dtype, folder)
    return source.architecture


def nemo_to_hf(input_path: Path, output_dir: Path, dtype: torch.dtype) -> ModelArchitecture:
    """Convert a .nemo archive to a Hugging Face directory; a reward model becomes a sequence classifier. Collective.

    Raises:
        FileNotFoundError: no archive, or none with a tokenizer.
        FileExistsError: ``output_dir`` has something in it.
        ValueError: an incomplete config, or no Hugging Face family can express the model.
    """
    on_first_rank(lambda: require_empty(output_dir))  # before the weights are loaded, which takes long
    config = load_nemo_config(input_path)
    require_whole_model(input_path, config)
    if config.get("vocab_size") is None:
        load_nemo_tokenizer(input_path)  # the size is the tokenizer's: raises why it could not be read
    architecture = ModelArchitecture.from_nemo_config(config)
    hf_family(architecture)
    require_weights(input_path, architecture)
    head = RewardHeadConfig.from_model_config(config) if "reward_model_type" in config else None
    model = build_model(architecture, {}, dtype, head=head, trainable=False, initialize=False)
    load_nemo_weights(input_path, model)
    attributes = head.num_attributes if head else 0
    progress = _progress(architecture, attributes, "writing weights")

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        with progress:
            for name, tensor in export_weights(model):
                if name != HEAD_BIAS or tensor.any():  # of zeros: transformers has none, and others refuse it
                    yield name, tensor
                progress.update()

    if dist.get_rank() == 0:
        with temporary_folder(f"the tokenizer of {input_path}") as folder:
            # Saved rather than copied: transformers cannot load a sentencepiece model alone.
            save_as_trained(load_nemo_tokenizer(input_path), folder, scores=head is not None)
            write_checkpoint(output_dir, architecture, weights(), num_attributes=attributes, tokenizer_dir=folder)
    else:
        for _ in export_weights(model):
            pass
    if head is not None:
        _warn_of_what_classifiers_lack(model, head)
    return architecture


_SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")


def checkpoint_to_nemo(
    checkpoint: Path,
    output: Path,
    dtype: torch.dtype | None = None,
    *,
    base: Path | None = None,
    hyperparameters: Path | None = None,
) -> ModelArchitecture:
    """Convert a training checkpoint of any job and layout to the .nemo archive that the job would have written.

    Adapters are merged into the base. The optimizer's states are checked against their checksums, but not loaded.
    Collective.

    Args:
        dtype: of the weights written; None: the job's.
        base: the archive that the job started from, for the tokenizer; None: at the path that the job was given.
        hyperparameters: the job's ``hyperparameters.yaml``; None: that in the log directory of the checkpoint.

    Raises:
        FileNotFoundError: no such checkpoint, hyperparameters or base.
        DamagedCheckpointError: the checkpoint's files are not what was written.
        CheckpointMismatchError: hyperparameters or base are of another model.
        ValueError: not a checkpoint, hyperparameters or base.
    """
    checkpoint = present_name(checkpoint)
    if not checkpoint.exists():
        raise FileNotFoundError(f"there is no checkpoint at {checkpoint}")
    if not is_training_checkpoint(checkpoint):
        raise ValueError(
            f"{checkpoint} is not a training checkpoint: name a folder in <log_dir>/checkpoints/ that has "
            f"{MANIFEST} and {STATE}/"
        )
    if checkpoint.name.endswith(UNFINISHED):
        raise ValueError(f"{checkpoint} is being written or deleted, or was when its job died: name another")
    job = job_of(checkpoint, hyperparameters)
    config, architecture = job.model, job.architecture
    job = job if base is None else dataclasses.replace(job, base=base)
    _check_base(job.base, architecture)
    on_first_rank(lambda: make_place(output))  # before all of the checkpoint is read, which takes long
    problems = find_damage(checkpoint)
    if not checkpoint.exists():
        raise FileNotFoundError(
            f"{checkpoint} was renamed or deleted by its job while it was read: the newest checkpoint loses its -last, "
            "and older ones go. Start again, with the newest, or one that the job keeps"
        )
    if problems:
        raise DamagedCheckpointError(f"{checkpoint} is damaged: {'; '.join(problems)}. Use another checkpoint")
    with open_source(checkpoint) as source:
        stored = stored_shapes(source, STATE)
    has_head = has_reward_head(stored)
    if has_head != ("reward_model_type" in config):
        kinds = ("a language model", "a reward model or critic")
        raise CheckpointMismatchError(
            f"{checkpoint} holds {kinds[has_head]}, but {job.path} is from a job that trains {kinds[not has_head]}: "
            f"give the {HYPERPARAMETERS_FILE} of the job that wrote it (--hyperparameters)"
        )
    head = RewardHeadConfig.from_model_config(config) if has_head else None
    lora = LoraSettings.from_config(config)
    if lora is None:
        tensors = (shape for key, shape in stored.items() if key.startswith(MODEL_PREFIX))
        architecture.require_weights(tensors, checkpoint)
    model = build_model(architecture, {}, dtype or job.dtype, head=head, trainable=False, initialize=False)
    if lora is not None:
        AdapterKind(checkpoint, lora.rank, lora.alpha, config).warn_of_other_base(job.base)
        load_nemo_weights(job.base, model)
        model.adapters = add_adapters(model.gpt, architecture, model.layout, lora)
    restore_model(checkpoint, model)
    save_nemo(output, model, portable_config(config, architecture, job.trainer, job.base), job.tokenizer())
    return architecture


def adapter_to_nemo(adapter: Path, output: Path, dtype: torch.dtype, *, base: Path) -> ModelArchitecture:
    """Merge adapters (see `adapter_kind`) into the .nemo archive that is their base, as another archive. Collective.

    Args:
        dtype: of the weights written.

    Raises:
        FileNotFoundError: no adapter, or no base.
        CheckpointMismatchError: it is another model's.
        ValueError: adapters of a kind that is not supported.
    """
    kind, config = adapter_kind(adapter), read_base_config(str(base), "--base")[1]
    kind.warn_of_other_base(base)
    tokenizer = load_nemo_tokenizer(base)
    if TEXT_FORMAT in kind.model:  # of the texts that the adapters were trained on
        tokenizer.format = TextFormat.from_config(kind.model[TEXT_FORMAT], str(kind.path))
    architecture = ModelArchitecture.from_nemo_config(config)
    on_first_rank(lambda: make_place(output))
    head = RewardHeadConfig.from_model_config(config | kind.head) if "reward_model_type" in config | kind.head else None
    model = build_model(architecture, {}, dtype, head=head, trainable=False, initialize=False)
    load_nemo_weights(base, model)
    lora = LoraSettings(("all",), kind.rank, kind.alpha)
    model.adapters = add_adapters(model.gpt, architecture, model.layout, lora)
    load_adapter(kind, model)
    history = [*config.get(HISTORY, ()), f"merged with {adapter.absolute()}"]
    save_nemo(output, model, config | kind.head | {HISTORY: history}, tokenizer)
    return architecture


def adapter_to_peft(adapter: Path, output: Path, dtype: torch.dtype, *, base: Path) -> ModelArchitecture:
    """Write adapters (see `adapter_kind`) as a directory that PEFT loads. Collective.

    Args:
        dtype: of the tensors written.
        base: the archive that the adapters are of.

    Raises:
        FileExistsError: ``output`` has something in it.

    For other errors see `adapter_to_nemo`.
    """
    on_first_rank(lambda: require_empty(output))
    kind, architecture = adapter_kind(adapter), ModelArchitecture.from_nemo_config(load_nemo_config(base))
    if FAMILIES[hf_family(architecture)].fused:
        raise ValueError(
            f"{architecture.family} has q, k and v in one matrix, for which PEFT has one adapter, not three: merge "
            "the adapter (--output NAME.nemo)"
        )
    tensors = {key: tensor.to(dtype) for key, tensor in read_adapter(kind).items()}
    on_first_rank(lambda: write_peft(output, kind, tensors))
    return architecture


@dataclasses.dataclass(frozen=True)
class TrainedBy:
    """What a job's ``hyperparameters.yaml`` says about it.

    Attributes:
        path: the file.
        model: the ``model`` section, already laid over that of ``base``.
        trainer: the ``trainer`` section.
        architecture: what that says of the model.
        dtype: of the model's weights.
        base: the archive that the job started from.
    """

    path: Path
    model: dict[str, Any]
    trainer: dict[str, Any]
    architecture: ModelArchitecture
    dtype: torch.dtype
    base: Path

    def tokenizer(self) -> Tokenizer:
        """The base's tokenizer, with the format of the job's texts. For the errors see `load_nemo_tokenizer`."""
        tokenizer = load_nemo_tokenizer(self.base)
        if TEXT_FORMAT in self.model:
            tokenizer.format = TextFormat.from_config(self.model[TEXT_FORMAT], str(self.path))
        return tokenizer


def job_of(checkpoint: Path, hyperparameters: Path | None = None) -> TrainedBy:
    """The job that wrote a training checkpoint.

    Args:
        hyperparameters: its ``hyperparameters.yaml``; None: that in the log directory of the checkpoint.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not one that a job wrote.
    """
    path = hyperparameters or checkpoint.resolve().parents[1] / HYPERPARAMETERS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}, which describes the checkpoint's model, does not exist: give the {HYPERPARAMETERS_FILE} from "
            "the log directory of the job that wrote it (--hyperparameters)"
        )
    try:
        config: Any = parse_yaml(path.read_text(encoding="utf-8"))
        model, trainer = config["model"], config["trainer"]
        base = model.get("restore_from_path") or config["pretrained_checkpoint"]["restore_from_path"]
        dtype, architecture = parse_precision(trainer["precision"]), ModelArchitecture.from_nemo_config(model)
        return TrainedBy(path, model, trainer, architecture, dtype, Path(str(base)).expanduser())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a hyperparameters file written by a job: {error!r}") from error


def _check_base(base: Path, architecture: ModelArchitecture) -> None:
    if not base.exists():
        raise FileNotFoundError(f"{base}, which the job started from, does not exist: say where it is (--base)")
    config = load_nemo_config(base)
    if config.get("vocab_size") is None:
        load_nemo_tokenizer(base)  # raises why it could not be read
    other = ModelArchitecture.from_nemo_config(config)
    different = [
        f"{name}: base {getattr(other, name)}, checkpoint {getattr(architecture, name)}"
        for name in (*_SHAPE, "vocab_size")
        if getattr(other, name) != getattr(architecture, name)
    ]
    if different:
        raise CheckpointMismatchError(
            f"{base} is not what the job started from: {'; '.join(different)}. Give that archive (--base)"
        )


def _import_and_save(
    origin: Path, source: HuggingFaceCheckpoint | GGUFCheckpoint, output: Path, dtype: torch.dtype, tokenizer_dir: Path
) -> None:
    architecture, num_attributes = source.architecture, source.num_attributes
    config = config_of_source(source) | {HISTORY: [f"converted from {origin.absolute()}"]}
    head = RewardHeadConfig.from_model_config(config) if num_attributes else None
    on_first_rank(lambda: make_place(output))  # before the weights are read, which takes long
    model = build_model(architecture, {}, dtype, head=head, trainable=False, initialize=False)
    with _progress(architecture, num_attributes, "reading weights", model) as progress:
        import_weights(model, source, progress.update)
    if head is not None:
        _warn_of_what_classifiers_lack(model, head)
    save_nemo(output, model, config, tokenizer_dir)


def _progress(
    architecture: ModelArchitecture, num_attributes: int, description: str, model: MegatronModel | None = None
) -> Progress:
    """Progress over the model's tensors; with ``model``, over those that this rank's pipeline stage reads."""
    entries = weight_layout(architecture, num_attributes=num_attributes)
    if model is not None:
        layout, layers = model.layout, architecture.num_layers
        entries = tuple(entry for entry in entries if entry.stage(layers, layout.pp_size) == layout.pp_rank)
    return Progress(len(hf_tensors(entries)), description, dist.get_rank())


def _warn_of_what_classifiers_lack(model: MegatronModel, head: RewardHeadConfig) -> None:
    """Warn of differing rewards: Hugging Face's classifiers score the last token, without bias or standardisation."""
    if not model.layout.is_last_stage or model.layout.tp_rank:
        return
    if head.pooling != "last":
        logger.warning("Hugging Face's classifiers read the last token, not an average: their rewards will differ")
    bias = [f"{value:.4g}" for value in model.gpt.rm_head.bias.tolist()]
    if model.gpt.rm_head.bias.any():
        logger.warning(
            "Hugging Face's classifiers have no bias in the head: add %s to their rewards (it is in score.bias)",
            bias[0] if len(bias) == 1 else f"[{', '.join(bias)}]",
        )
    if head.std is not None:
        logger.warning(
            "Hugging Face's classifiers do not standardise: subtract %g from their rewards and divide by %g",
            head.mean,
            head.std,
        )
