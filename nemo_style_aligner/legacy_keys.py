"""Keys of NeMo and NeMo-Aligner that jobs accept though they are not in their YAML files, and what they mean here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from nemo_style_aligner.architecture import NEMO_FEATURES_NOT_BUILT


@dataclasses.dataclass(frozen=True)
class LegacyKey:
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

LEGACY_KEYS: tuple[LegacyKey, ...] = (
    # Moved
    LegacyKey("trainer.trt_llm.*", moved_to="trainer.ppo.trt_llm.*"),
    LegacyKey("model.ppo.trt_llm.*", moved_to="trainer.ppo.trt_llm.*"),
    LegacyKey("model.ppo.trt_llm", "this section is trainer.ppo.trt_llm here"),
    LegacyKey("trainer.flask_server.enable", moved_to="trainer.ppo.batch_iterator.use_flask"),
    LegacyKey("trainer.flask_server.port", moved_to="trainer.ppo.batch_iterator.port"),
    LegacyKey("trainer.ppo.flask_server.enable", moved_to="trainer.ppo.batch_iterator.use_flask"),
    LegacyKey("trainer.ppo.flask_server.port", moved_to="trainer.ppo.batch_iterator.port"),
    LegacyKey("model.ppo.combine_rm_and_critic_server", moved_to="remote_critic_rm.combine_rm_and_critic_server"),
    LegacyKey("trainer.max_time", moved_to="exp_manager.max_time_per_run"),
    LegacyKey("trainer.max_steps", moved_to="trainer.{section}.max_steps"),
    LegacyKey("trainer.max_epochs", moved_to="trainer.{section}.max_epochs"),
    LegacyKey("model.forward_mbs", moved_to="model.forward_micro_batch_size"),
    LegacyKey("model.offload_adam_states", moved_to="model.ppo.offload_adam_states"),
    LegacyKey("inference.micro_batch_size", moved_to="inference.inference_micro_batch_size"),
    # Of the reward model's service, in the guide of REINFORCE
    LegacyKey("trainer.reinforce.inference_micro_batch_size", moved_to="inference.inference_micro_batch_size"),
    LegacyKey("model.resume_from_checkpoint", moved_to="exp_manager.resume_from_checkpoint"),
    LegacyKey("model.save_nemo_on_validation_end", moved_to="exp_manager.checkpoint_callback_params.always_save_nemo"),
    # Lightning
    LegacyKey("trainer.accelerator", "has no effect: GPUs are used where there are any, otherwise CPUs"),
    LegacyKey("trainer.logger", "has no effect: exp_manager decides what is logged"),
    LegacyKey("trainer.enable_checkpointing", "has no effect: save_interval of the job's own section decides"),
    LegacyKey(
        "exp_manager.create_checkpoint_callback",
        "the state at the end is saved all the same",
        moved_to="trainer.{section}.save_interval",
        means=((False, 0),),
    ),
    LegacyKey("trainer.use_distributed_sampler", "has no effect: samplers always divide the data among all ranks"),
    LegacyKey("trainer.ppo.model_?bs", "has no effect: model.micro_batch_size and model.global_batch_size are used"),
    LegacyKey("trainer.ppo.trt_model_dir", "has no effect: engines are built in memory"),
    LegacyKey(
        "exp_manager.checkpoint_callback_params.model_parallel_size", "has no effect: read from the model section"
    ),
    LegacyKey(  # of a service; the training jobs have the key
        "exp_manager.checkpoint_callback_params.save_best_model",
        "a service does not know which save is the last",
        allowed=(False, *_NONE),
    ),
    LegacyKey(  # of a service that logs nothing; the other jobs have the key
        "exp_manager.create_wandb_logger", "this job has nothing to log there", allowed=(False, *_NONE)
    ),
    LegacyKey("exp_manager.create_tensorboard_logger", "has no effect: TensorBoard files are always written"),
    # The loops
    LegacyKey(
        "trainer.*.limit_train_batches",
        "not supported, see max_steps",
        allowed=(1.0, *_NONE),
        counts_are_others=True,
    ),
    LegacyKey("trainer.ppo.rollout_batch_seq_length", "has no effect: sequences are packed without padding"),
    LegacyKey("trainer.ppo.pad_sequence_length_to_multiple", "has no effect: sequences are packed without padding"),
    LegacyKey("model.ppo.val_rollout_micro_batch_size", "has no effect: see trainer.ppo.generation.num_slots"),
    # The model's build
    LegacyKey("model.precision", "has no effect: see trainer.precision"),
    LegacyKey("model.enable_nge", "has no effect: trainer.ppo.generation.engine chooses what generates"),
    LegacyKey("model.mcore_gpt", "has no effect: every model is Megatron-Core's"),
    LegacyKey("model.megatron_amp_O2", "has no effect: bf16 training always keeps fp32 main weights in the optimizer"),
    LegacyKey("model.transformer_engine", "has no effect: Transformer Engine is used where it can be"),
    LegacyKey("model.use_flash_attention", "has no effect: the fastest available attention is used"),
    LegacyKey("model.gradient_as_bucket_view", "has no effect: gradients are always views of Megatron-Core's buckets"),
    LegacyKey("model.sync_batch_comm", "has no effect: pipeline stages need no synchronisation after sends"),
    LegacyKey("model.batch_p2p_comm", "has no effect"),
    LegacyKey("model.*_fusion", "has no effect: fused kernels are used where they are available"),
    LegacyKey("model.openai_gelu", "has no effect: the checkpoint's own activation is used"),
    LegacyKey("model.ub_tp_comm_overlap*", "has no effect: tensor-parallel communication is not overlapped"),
    LegacyKey("model.use_tp_pp_dp_mapping", "ranks are ordered TP, DP, PP", allowed=(False,)),
    LegacyKey("model.virtual_pipeline_model_parallel_size", "not supported", allowed=(*_NONE, 1)),
    LegacyKey("model.context_parallel_size", "not supported", allowed=(*_NONE, 1)),
    LegacyKey("model.expert_model_parallel_size", "not supported", allowed=(*_NONE, 1)),
    LegacyKey("model.fp8*", "not supported", allowed=(*_NONE, False)),
    *(
        LegacyKey(f"model.{key}", "not supported", allowed=(*plain, *_NONE))
        for key, plain in NEMO_FEATURES_NOT_BUILT.items()
    ),
    LegacyKey("model.activations_checkpoint_layers_per_pipeline", "not supported", allowed=_NONE),
    LegacyKey("model.ffn_dropout", "not supported", allowed=(*_NONE, 0)),
    LegacyKey("model.dist_ckpt_format", "has no effect: checkpoints are Megatron-Core's torch_dist"),
    LegacyKey("model.dist_ckpt_*", "has no effect: checkpoints are Megatron-Core's torch_dist"),
    LegacyKey("model.output_sequence", "has no effect: a critic gives a value per token, a reward model one reward"),
    LegacyKey("model.steerlm2.*", "has no effect: SteerLM 2 is not part of this project"),
    LegacyKey("model.regression.loss_func", "only the mean squared error is supported", allowed=("regression",)),
    LegacyKey("model.regression.load_rm_head_weights", "has no effect: a head in the checkpoint is always loaded"),
    LegacyKey("model.peft.peft_scheme", "only full fine-tuning is supported", allowed=_NONE),
    LegacyKey("model.peft.*", "has no effect without a peft_scheme"),
    LegacyKey("model.overwrite_base_config.*", "has no effect: the data section of a checkpoint is never read"),
    LegacyKey(
        "model.ppo.sampling_params.all_probs", "has no effect: log-probs of the chosen tokens are always returned"
    ),
    LegacyKey("model.ppo.sampling_params.compute_logprob", "has no effect: log-probs are always returned"),
    # In a job that only serves a model
    *(
        LegacyKey(f"model.activations_checkpoint_{name}", "has no effect: nothing is trained in this job")
        for name in ("granularity", "method", "num_layers")
    ),
    LegacyKey("model.global_batch_size", "has no effect: nothing is trained in this job"),
    LegacyKey("model.micro_batch_size", "has no effect: see forward_micro_batch_size"),
    # In a job that only trains one
    LegacyKey("model.forward_micro_batch_size", "has no effect: see micro_batch_size"),
    # The optimizer
    LegacyKey("model.optim.bucket_cap_mb", "has no effect: Megatron-Core sizes the buckets"),
    LegacyKey("model.optim.contiguous_*", "has no effect: gradient buffers are always contiguous"),
    LegacyKey("model.optim.grad_sync_dtype", "has no effect: gradients are reduced in fp32"),
    LegacyKey("model.optim.overlap_param_sync", "not supported", allowed=(*_NONE, False)),
    # Data
    LegacyKey("model.data.data_impl", "only JSONL files are read", allowed=("jsonl", "json")),
    LegacyKey("model.data.splits_string", "data_prefix names the files of each split", allowed=_NONE),
    LegacyKey(
        "model.data.*drop_last", "has no effect: training leaves out a last incomplete batch, validation does not"
    ),
    LegacyKey("model.data.*num_workers", "has no effect: data are read by the job's own processes"),
    LegacyKey(  # of a reward model's data; a fine-tuning job has the keys
        "model.data.*_ds.shuffle",
        "has no effect: trainer.rm.train_random_sampler and val_random_sampler decide",
    ),
    LegacyKey("model.data.shuffle_documents", "has no effect: lines are shuffled as the samplers' keys say"),
    LegacyKey(
        "model.data.*packed_sequence",
        "files of packed sequences (.npy) cannot be read: give the JSONL files; their lines are packed in any case",
        allowed=(False, *_NONE),
    ),
    LegacyKey("model.data.skip_warmup", "has no effect"),
    LegacyKey("model.data.reset_position_ids", "not supported", allowed=(False,)),
    LegacyKey("model.data.reset_attention_mask", "not supported", allowed=(False,)),
    LegacyKey("model.data.eod_mask_loss", "not supported", allowed=(False,)),
    LegacyKey("model.data.*index_mapping_dir", "has no effect: no index files are written"),
    LegacyKey("model.data.*memmap_workers", "has no effect: no index files are written"),
    LegacyKey("model.data.*hf_dataset", "has no effect: JSONL files are read in either case"),
    LegacyKey("model.data.sample", "has no effect: data are repeated for max_epochs; raise it to reach max_steps"),
    LegacyKey("model.data.*output_original_text", "has no effect"),
    LegacyKey("model.data.*concat_sampling_probabilities", "not supported: put the files together", allowed=_NONE),
)

COMMON_NAMES: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate", "actor_lr", "critic_lr", "max_lr"),
    "min_lr": ("lr_min", "min_learning_rate", "end_lr"),
    "weight_decay": ("wd", "decay"),
    "betas": ("adam_betas", "beta1", "beta2", "adam_beta1", "adam_beta2"),
    "eps": ("epsilon", "adam_eps", "adam_epsilon"),
    "warmup_steps": ("warmup", "num_warmup_steps", "lr_warmup_steps", "warmup_ratio", "lr_warmup_iters"),
    "global_batch_size": ("batch_size", "train_batch_size", "mini_batch_size", "gbs", "ppo_mini_batch_size"),
    "micro_batch_size": ("batch_size", "micro_batch", "per_device_train_batch_size", "mbs", "micro_train_batch_size"),
    "num_rollout_samples": ("rollout_batch_size", "num_rollouts", "rollouts", "num_rollouts_per_step"),
    "num_rollouts_per_prompt": ("num_generations", "group_size", "n_samples_per_prompt", "num_generations_per_prompt"),
    "estimator": ("adv_estimator", "advantage_estimator"),
    "policy_loss": ("loss_type", "loss_fn"),
    "loss_aggregation": ("loss_agg_mode", "token_level_loss", "loss_type"),
    "ratio_eps_high": ("clip_ratio_high", "epsilon_high", "eps_clip_high", "ratio_clip_max", "clip_ratio_h"),
    "dual_clip": ("clip_ratio_c", "ratio_clip_c"),
    "kl_in": ("use_kl_loss", "use_kl_in_reward"),
    "rewards": ("reward_funcs", "reward_function", "custom_reward_function", "rm_type"),
    "max_epochs": ("epochs", "num_epochs", "num_train_epochs", "total_epochs", "n_epochs"),
    "num_ppo_epochs": ("ppo_epochs", "update_epochs"),
    "max_steps": ("steps", "num_steps", "total_steps", "train_steps", "max_iters", "train_iters", "num_iterations"),
    "save_interval": ("save_steps", "save_freq", "save_every", "checkpoint_interval"),
    "val_check_interval": ("eval_steps", "eval_interval", "val_interval", "eval_every", "test_freq", "eval_iters"),
    "gradient_clip_val": ("grad_clip", "max_grad_norm", "clip_grad", "gradient_clip", "clip_grad_norm"),
    "initial_policy_kl_penalty": ("kl_coef", "kl_penalty", "init_kl_coef", "beta", "kl_loss_coef", "kl_coeff"),
    "discount_factor": ("gamma",),
    "gae_lambda": ("lam", "lambda", "lambd", "gae_lam"),
    "ratio_eps": ("cliprange", "clip_range", "clip_ratio", "eps_clip", "epsilon", "clip_eps", "clip_coef"),
    "entropy_bonus": ("entropy_coef", "entropy_coeff", "ent_coef"),
    "max_length": ("max_new_tokens", "max_tokens", "max_response_length", "response_length", "max_completion_length"),
    "encoder_seq_length": ("max_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len", "context_length"),
    "end_strings": ("stop", "stop_strings", "stop_token", "stop_words"),
    "use_greedy": ("greedy", "do_sample"),
    "explicit_log_dir": ("output_dir", "log_dir", "save_dir", "out_dir", "results_dir", "default_local_dir"),
    "restore_from_path": ("model_name_or_path", "model_path", "model_name", "pretrained", "base_model", "load"),
    "rm_model_file": ("model_name_or_path", "model_path", "reward_model_path"),
    "data_prefix": ("data_path", "dataset", "train_files", "train_file", "prompt_data", "dataset_name", "data_dir"),
    "file_path": ("data_path", "dataset", "train_files", "train_file", "dataset_name", "file", "path"),
    "tensor_model_parallel_size": ("tp", "tp_size", "tensor_parallel_size", "tensor_parallel"),
    "pipeline_model_parallel_size": ("pp", "pp_size", "pipeline_parallel_size", "pipeline_parallel"),
    "devices": ("gpus", "num_gpus", "n_gpus", "nproc", "nproc_per_node", "n_gpus_per_node", "gpus_per_node"),
    "num_nodes": ("nodes", "nnodes"),
    "precision": ("dtype", "bf16", "fp16", "torch_dtype"),
    "create_wandb_logger": ("wandb", "use_wandb", "report_to"),
    "resume_if_exists": ("resume", "auto_resume"),
    "resume_from_checkpoint": ("checkpoint", "resume_path", "load_checkpoint"),
}
"""Last parts of this project's keys, with the names of the same settings elsewhere: for errors about unknown keys."""
