"""Keys of NeMo and NeMo-Aligner that jobs accept though the schema has none of them, and what they mean here."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_style_aligner.engine.architecture import NEMO_FEATURES_NOT_BUILT
from nemo_style_aligner.errors import UserError


class ConfigError(UserError, ValueError):
    """A mistake in a job's config; the message names the key and what to do."""


@dataclasses.dataclass(frozen=True)
class ForeignKey:
    """A key of NeMo or NeMo-Aligner that a job accepts, though it is not in its YAML.

    Attributes:
        pattern: dotted key, with ``*`` for any text.
        note: what it means here, or why other values than those allowed are refused; of a key that has moved, what
            else there is to know.
        moved_to: the key that takes its value; None if there is none.
        means: pairs of a value and of the one that the key in `moved_to` takes for it; other values say what the job
            does anyway. Empty: the same value.
        allowed: values that say what the job does anyway; any other is an error. Empty: all values are accepted.
        counts_are_others: no integer is among those allowed (for Lightning 1 is one batch, 1.0 all of them).
    """

    pattern: str
    note: str = ""
    moved_to: str | None = None
    means: tuple[tuple[Any, Any], ...] = ()
    allowed: tuple[Any, ...] = ()
    counts_are_others: bool = False

    def allows(self, value: object) -> bool:
        """Whether ``value`` is one of those in `allowed`."""
        return value in self.allowed and not (self.counts_are_others and type(value) is int)


_NONE = (None, "none", "null")

FOREIGN_KEYS: tuple[ForeignKey, ...] = (
    # Moved
    ForeignKey("trainer.trt_llm.*", moved_to="trainer.ppo.trt_llm.*"),
    ForeignKey("model.ppo.trt_llm.*", moved_to="trainer.ppo.trt_llm.*"),
    ForeignKey("model.ppo.trt_llm", "this section is trainer.ppo.trt_llm here"),
    ForeignKey("trainer.flask_server.enable", moved_to="trainer.ppo.batch_iterator.use_flask"),
    ForeignKey("trainer.flask_server.port", moved_to="trainer.ppo.batch_iterator.port"),
    ForeignKey("trainer.ppo.flask_server.enable", moved_to="trainer.ppo.batch_iterator.use_flask"),
    ForeignKey("trainer.ppo.flask_server.port", moved_to="trainer.ppo.batch_iterator.port"),
    ForeignKey("model.ppo.combine_rm_and_critic_server", moved_to="remote_critic_rm.combine_rm_and_critic_server"),
    ForeignKey("trainer.max_time", moved_to="exp_manager.max_time_per_run"),
    ForeignKey("trainer.max_steps", moved_to="trainer.{section}.max_steps"),
    ForeignKey("trainer.max_epochs", moved_to="trainer.{section}.max_epochs"),
    ForeignKey("model.dpo.average_log_probs", moved_to="model.dpo.preference_average_log_probs"),
    ForeignKey("model.forward_mbs", moved_to="model.forward_micro_batch_size"),
    ForeignKey("model.ppo.num_rollouts_per_prompt", moved_to="trainer.ppo.num_rollouts_per_prompt"),
    ForeignKey("model.ppo.top_n_rollouts", moved_to="trainer.ppo.top_n_rollouts"),
    ForeignKey("model.offload_adam_states", moved_to="model.ppo.offload_adam_states"),
    ForeignKey("inference.micro_batch_size", moved_to="inference.inference_micro_batch_size"),
    # Of the reward model's service, in the guide of REINFORCE
    ForeignKey("trainer.reinforce.inference_micro_batch_size", moved_to="inference.inference_micro_batch_size"),
    ForeignKey("model.resume_from_checkpoint", moved_to="exp_manager.resume_from_checkpoint"),
    ForeignKey(
        "model.save_nemo_on_validation_end",
        moved_to="exp_manager.checkpoint_callback_params.always_save_nemo",
        means=((True, True), (False, False)),
    ),
    # OpenRLHF
    ForeignKey("*colocate_all_models", moved_to="placement", means=((True, "flatten"),)),
    ForeignKey("*colocate_actor_ref", "has no effect: see trainer.ppo.reference.devices"),
    ForeignKey(
        "*colocate_critic_reward",
        "has no effect: the reward model is with the critic, see remote_critic_rm.combine_rm_and_critic_server",
    ),
    ForeignKey("*ref_reward_offload", moved_to="trainer.ppo.reference_policy_placement", means=((True, "swap"),)),
    # Lightning
    ForeignKey("trainer.accelerator", "has no effect: GPUs are used where there are any, otherwise CPUs"),
    ForeignKey("trainer.logger", "has no effect: exp_manager decides what is logged"),
    ForeignKey("trainer.enable_checkpointing", "has no effect: save_interval of the job's own section decides"),
    ForeignKey(
        "exp_manager.create_checkpoint_callback",
        "the state at the end is saved all the same",
        moved_to="trainer.{section}.save_interval",
        means=((False, 0),),
    ),
    ForeignKey("trainer.use_distributed_sampler", "has no effect: samplers always divide the data among all ranks"),
    ForeignKey("trainer.ppo.model_?bs", "has no effect: model.micro_batch_size and model.global_batch_size are used"),
    ForeignKey("trainer.ppo.trt_model_dir", "has no effect: engines are built in memory"),
    ForeignKey(
        "exp_manager.checkpoint_callback_params.model_parallel_size", "has no effect: read from the model section"
    ),
    ForeignKey(  # of a service; the training jobs have the key
        "exp_manager.checkpoint_callback_params.save_best_model",
        "a service does not know which save is the last",
        allowed=(False, *_NONE),
    ),
    ForeignKey("exp_manager.create_tensorboard_logger", "has no effect: TensorBoard files are always written"),
    ForeignKey(  # of a service that logs nothing; the other jobs have the keys
        "exp_manager.create_*_logger", "this job has nothing to log there", allowed=(False, *_NONE)
    ),
    ForeignKey("exp_manager.mlflow_logger_kwargs.log_model", "checkpoints stay here", allowed=(False, *_NONE)),
    ForeignKey("exp_manager.mlflow_logger_kwargs.prefix", "names have none", allowed=("", *_NONE)),
    # The loops
    ForeignKey(
        "trainer.*.limit_train_batches",
        "not supported, see max_steps",
        allowed=(1.0, *_NONE),
        counts_are_others=True,
    ),
    ForeignKey("trainer.ppo.rollout_batch_seq_length", "has no effect: sequences are packed without padding"),
    ForeignKey("trainer.ppo.pad_sequence_length_to_multiple", "has no effect: sequences are packed without padding"),
    ForeignKey("model.ppo.val_rollout_micro_batch_size", "has no effect: see trainer.ppo.generation.num_slots"),
    # The model's build
    ForeignKey("model.precision", "has no effect: see trainer.precision"),
    ForeignKey("precision", "has no effect: see trainer.precision"),
    ForeignKey("model.enable_nge", "has no effect: trainer.ppo.generation.engine chooses what generates"),
    ForeignKey("model.mcore_gpt", "has no effect: every model is Megatron-Core's"),
    ForeignKey("model.megatron_amp_O2", "has no effect: bf16 training always keeps fp32 main weights in the optimizer"),
    ForeignKey("model.transformer_engine", "has no effect: Transformer Engine is used where it can be"),
    ForeignKey("model.use_flash_attention", "has no effect: the fastest available attention is used"),
    ForeignKey("model.gradient_as_bucket_view", "has no effect: gradients are always views of Megatron-Core's buckets"),
    ForeignKey("model.sync_batch_comm", "has no effect: pipeline stages need no synchronisation after sends"),
    ForeignKey("model.batch_p2p_comm", "has no effect"),
    ForeignKey("model.*_fusion", "has no effect: fused kernels are used where they are available"),
    ForeignKey("model.openai_gelu", "has no effect: the checkpoint's own activation is used"),
    ForeignKey("model.ub_tp_comm_overlap*", "has no effect: tensor-parallel communication is not overlapped"),
    ForeignKey("model.use_tp_pp_dp_mapping", "ranks are ordered TP, DP, PP", allowed=(False,)),
    ForeignKey("model.virtual_pipeline_model_parallel_size", "not supported", allowed=(*_NONE, 1)),
    ForeignKey("model.fp8*", "not supported", allowed=(*_NONE, False)),
    *(
        ForeignKey(f"model.{key}", "not supported", allowed=(*plain, *_NONE))
        for key, plain in NEMO_FEATURES_NOT_BUILT.items()
    ),
    ForeignKey("model.activations_checkpoint_layers_per_pipeline", "not supported", allowed=_NONE),
    ForeignKey(
        "model.knowledge_distillation.cross_tokenizer",
        "not supported: a student learns from a teacher with its own tokenizer",
        allowed=(False, *_NONE),
    ),
    ForeignKey("model.ffn_dropout", "not supported", allowed=(*_NONE, 0)),
    ForeignKey("model.dist_ckpt_format", "has no effect: checkpoints are Megatron-Core's torch_dist"),
    ForeignKey("model.dist_ckpt_*", "has no effect: checkpoints are Megatron-Core's torch_dist"),
    ForeignKey("model.output_sequence", "has no effect: a critic gives a value per token, a reward model one reward"),
    ForeignKey("model.steerlm2.*", "has no effect: SteerLM 2 is not part of this project"),
    ForeignKey("model.regression.loss_func", "only the mean squared error is supported", allowed=("regression",)),
    ForeignKey("model.regression.load_rm_head_weights", "has no effect: a head in the checkpoint is always loaded"),
    *(
        ForeignKey(f"model.peft.{name}", "not supported: of NeMo's schemes there is lora", allowed=_NONE)
        for name in ("adapter_tuning*", "ia3_tuning*", "p_tuning*", "selective_tuning*", "sdlora*", "qlora*")
    ),
    ForeignKey("model.peft.restore_from_ckpt.*", "give the adapter's path as restore_from_path", allowed=_NONE),
    ForeignKey("model.peft.lora_tuning.variant", "only LoRA's own form is supported", allowed=("nemo", *_NONE)),
    ForeignKey("model.peft.lora_tuning.dropout_position", "dropout is of the input", allowed=("pre", *_NONE)),
    ForeignKey("model.peft.lora_tuning.*", "not supported", allowed=(*_NONE, False)),
    # In a job that only serves a model
    ForeignKey("model.peft.peft_scheme", "nothing is trained in this job: give it a merged model", allowed=_NONE),
    ForeignKey("model.peft.*", "has no effect without a peft_scheme"),
    ForeignKey("model.overwrite_base_config.*", "has no effect: the data section of a checkpoint is never read"),
    ForeignKey(
        "model.ppo.sampling_params.all_probs", "has no effect: log-probs of the chosen tokens are always returned"
    ),
    ForeignKey("model.ppo.sampling_params.compute_logprob", "has no effect: log-probs are always returned"),
    # In a job that only serves a model
    *(
        ForeignKey(f"model.activations_checkpoint_{name}", "has no effect: nothing is trained in this job")
        for name in ("granularity", "method", "num_layers")
    ),
    ForeignKey("model.*_dropout", "has no effect: nothing is trained in this job"),
    ForeignKey("model.answer_only_loss", "has no effect in this job"),
    ForeignKey("model.restore_from_path", "has no effect: pretrained_checkpoint.restore_from_path names the model"),
    ForeignKey("model.global_batch_size", "has no effect: nothing is trained in this job"),
    ForeignKey("model.micro_batch_size", "has no effect: see forward_micro_batch_size"),
    # In a job that only trains one
    ForeignKey("model.forward_micro_batch_size", "has no effect: see micro_batch_size"),
    # The optimizer
    ForeignKey("model.optim.bucket_cap_mb", "has no effect: Megatron-Core sizes the buckets"),
    ForeignKey("model.optim.contiguous_*", "has no effect: gradient buffers are always contiguous"),
    ForeignKey("model.optim.grad_sync_dtype", "has no effect: gradients are reduced in fp32"),
    ForeignKey("model.optim.overlap_param_sync", "not supported", allowed=(*_NONE, False)),
    # Data
    ForeignKey("model.data.data_impl", "only JSONL files are read", allowed=("jsonl", "json", "chunked_jsonl")),
    ForeignKey("model.data.n_chunks", "has no effect: CHUNK_ID stands for all the files that are there"),
    ForeignKey("model.data.n_examples_per_chunk*", "has no effect: all lines of a file are read"),
    ForeignKey("model.data.splits_string", "has no effect: data_prefix names the files of each split"),
    ForeignKey("*data.*drop_last", "has no effect: training leaves out a last incomplete batch, validation does not"),
    ForeignKey("*data.*num_workers", "has no effect: data are read by the job's own processes"),
    ForeignKey(  # of a reward model's data; a fine-tuning job has the keys
        "model.data.*_ds.shuffle",
        "has no effect: train_random_sampler and val_random_sampler of the job's own section decide",
    ),
    ForeignKey("model.data.shuffle_documents", "has no effect: lines are shuffled as the samplers' keys say"),
    ForeignKey(
        "model.data.*packed_sequence",
        "files of packed sequences (.npy) cannot be read: give the JSONL files; their lines are packed in any case",
        allowed=(False, *_NONE),
    ),
    ForeignKey("model.data.skip_warmup", "has no effect"),
    ForeignKey("model.data.pad_length_to_multiple_of", "has no effect: sequences are packed without padding"),
    ForeignKey("*data.dataloader_type", "has no effect: the samplers' keys decide"),
    ForeignKey("model.data.reset_position_ids", "not supported", allowed=(False,)),
    ForeignKey("model.data.reset_attention_mask", "not supported", allowed=(False,)),
    ForeignKey("model.data.eod_mask_loss", "not supported", allowed=(False,)),
    ForeignKey("*data.*index_mapping_dir", "has no effect: no index files are written"),
    ForeignKey("*data.*memmap_workers", "has no effect: no index files are written"),
    ForeignKey("*data.*hf_dataset", "has no effect: JSONL files are read in either case"),
    ForeignKey("data.sample", "has no effect: there is a line for each example"),
    ForeignKey("data.data.shuffle", "has no effect: examples are in the order of the file"),
    ForeignKey("model.data.sample", "has no effect: data are repeated for max_epochs; raise it to reach max_steps"),
    ForeignKey("model.data.*output_original_text", "has no effect"),
    ForeignKey("model.data.*concat_sampling_probabilities", "not supported: put the files together", allowed=_NONE),
)

_ABSENT = object()


def find_foreign(key: str) -> ForeignKey | None:
    """What is known of a key that is none of this project's."""
    return next((foreign for foreign in FOREIGN_KEYS if fnmatchcase(key, foreign.pattern)), None)


def take_foreign(cfg: DictConfig, defaults: DictConfig, key: str, foreign: ForeignKey) -> str:
    """Give the key that is meant the value of a foreign one, in place.

    Returns:
        A line for the log; empty if there is nothing to say.

    Raises:
        ConfigError: the value asks for what there is not, or contradicts the key that is meant.
    """
    try:
        value = OmegaConf.select(cfg, key)
    except OmegaConfBaseException:  # reported with the values
        return ""
    if foreign.allowed:
        if not foreign.allows(value):
            raise ConfigError(f"{key}={value}: {foreign.note}; leave the key out")
        return ""  # the value is what the job does anyway
    if foreign.moved_to is None:
        return f"{key}={value}: {foreign.note}"
    target = foreign.moved_to.replace("*", key.rsplit(".", 1)[-1])
    target = target.replace("{section}", section_of_job(defaults))
    default = OmegaConf.select(defaults, target, default=_ABSENT)
    given, value = value, dict(foreign.means).get(value) if foreign.means else value
    if value is None:
        return ""
    if default is _ABSENT and foreign.means:
        return f"{key}={given} has no effect: this job does not have {target}"
    if default is _ABSENT:
        raise ConfigError(f"{key} is {target} here, which this job does not have: leave the key out")
    present = OmegaConf.select(cfg, target)
    if value != present:
        section, _, name = target.rpartition(".")
        if present != default and not OmegaConf.is_interpolation(OmegaConf.select(cfg, section), name):
            raise ConfigError(f"{key}={given} and {target}={present} name the same setting: give one of them")
        OmegaConf.update(cfg, target, value)
    note = f"; {foreign.note}" if foreign.note else ""
    return f"{key}={given} is taken as {target}={value}{note}"


def section_of_job(defaults: DictConfig) -> str:
    """The name of the job's own section in ``trainer``, such as sft or dpo; ppo where it has none."""
    sections = (str(name) for name, value in defaults.trainer.items() if isinstance(value, DictConfig))
    return next((name for name in sections if name != "profile"), "ppo")
