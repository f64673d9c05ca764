"""The config of every job: each key's type, range, choices, default and comment, and whether it may change on resume.

A key is one attribute of a section here; nothing else in the package says what it may be. ``python conf/make.py``
writes the YAML files in ``conf/`` from these classes, comments included, which are what users read (``--help``). A new
key: an attribute with a comment, and the code that reads it from its job's config.

`Free[...]` marks what starts of one run may differ in; on a section it holds for all below it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from nemo_style_aligner.engine.architecture import LARGEST_LENGTH, Experts, ModelArchitecture
from nemo_style_aligner.engine.rope import RopeScaling
from nemo_style_aligner.kinds import (
    LARGEST_PORT,
    MOST_ATTRIBUTES,
    Action,
    DistillationLoss,
    InitMethod,
    KeepChoice,
    KLEstimator,
    LogFormat,
    LogLevel,
    OptimizerName,
    Placement,
    PreferenceLoss,
    StepChoice,
    Strategy,
    TrainedCritic,
    TruncationMethod,
)
from nemo_style_aligner.seeds import LARGEST_SEED
from nemo_style_aligner.trainer.config.fields import (
    Field,
    Filled,
    Free,
    Given,
    Open,
    Range,
    Section,
    fields_of,
    find_field,
    of,
)
from nemo_style_aligner.trainer.config.job_config import JobConfig

# ---- kinds of values ----------------------------------------------------------------------------

_LONGEST_SECONDS = 2_000_000  # sockets wait for less than 2^31 ms; a longer wait may end at once

Count = Annotated[int, Range(1)]
CountFrom0 = Annotated[int, Range(0)]
Interval = Annotated[int, Range(0)]
IntervalOrShare = Annotated[int | float, Range(0, is_share=True)]
Finite = Annotated[float, Range(-math.inf)]
Number = Annotated[float, Range(0)]  # not negative
Positive = Annotated[float, Range(0, low_excluded=True)]
Share = Annotated[float, Range(0, 1)]
ShareAbove0 = Annotated[float, Range(0, 1, low_excluded=True)]
ShareBelow1 = Annotated[float, Range(0, 1, high_excluded=True)]
Seconds = Annotated[float, Range(0, _LONGEST_SECONDS, low_excluded=True)]
Minutes = Annotated[float, Range(0, _LONGEST_SECONDS // 60, low_excluded=True)]
Port = Annotated[int, Range(0, LARGEST_PORT)]
Threads = Annotated[int, Range(1, 10_000)]
Length = Annotated[int, Range(2, LARGEST_LENGTH)]
Steps = Annotated[int, Range(1, also=-1)]  # 0 steps would load a model only to write it out again
Files = str | list[Any]


# ---- ranks, logs, checkpoints -------------------------------------------------------------------


class ProfiledSteps(Section):
    # torch's profiler, in profile/rank_N_from_step_A.json.gz of the log directory: docs/reports.md
    start_step: Free[Count | None] = None  # the first step that is profiled, from 1; null: none is
    end_step: Free[Count | None] = None  # the last one; null: the first
    ranks: Free[list[int]] = of([0])  # whose


class Trainer(Section):
    num_nodes: Free[Count] = 1  # machines
    devices: Free[Count] = 1  # ranks per machine: GPUs, or processes where there is no GPU
    # bf16 (with fp32 main weights in the optimizer) or 32; CPUs without bf16 arithmetic multiply bf16 matrices in fp32
    precision: str | int = "bf16"
    distributed_timeout_minutes: Free[Minutes] = 30  # a collective that takes longer ends the job
    profile: ProfiledSteps


class WandbArguments(Section):
    project: str | None = None  # project in Weights & Biases; null: wandb's choice
    name: str | None = None  # name of the run there; null: wandb's choice


class MlflowArguments(Section):
    experiment_name: str | None = None  # experiment that the run belongs to; null: exp_manager.name
    run_name: str | None = None  # name of the run; null: MLflow's choice
    tracking_uri: str | None = None  # the server; null: MLFLOW_TRACKING_URI, else the file mlflow.db in save_dir
    save_dir: str | None = None  # where that file is, and artifacts beside it; null: the log directory
    tags: Open[dict[str, Any] | None] = of(None)  # tags of the run
    artifact_location: str | None = None  # where a new experiment keeps its artifacts; null: the server's choice
    run_id: str | None = None  # continue this run; null: that of the last start in the log directory, else a new one


class CheckpointParams(Section):
    # The value that ranks checkpoints: val_NAME or train_NAME for what a validation or a step measures, step, epoch or
    # consumed_samples; null: newer is better.
    monitor: str | None = "val_loss"
    mode: Literal["min", "max"] = "min"  # max or min: whether larger or smaller values are better
    save_top_k: Annotated[int, Range(-1)] = 3  # how many of the best to keep, besides the newest; -1: all
    save_last_n: Count = 2  # how many of the newest to keep; a critic's that belongs to the actor's newest is kept, too
    save_nemo_on_train_end: bool = True  # write checkpoints/<name>.nemo at the end; no effect in the critic's job
    always_save_nemo: bool = False  # write it with every checkpoint
    # At the end, write the best checkpoint's model instead of the last. Of val_check_interval and save_interval, one
    # must then be a multiple of the other.
    save_best_model: bool = False
    # Write checkpoints in the background, from a copy of the state in host memory, if there is room for one.
    async_save: bool = True
    # Name of a checkpoint; {step} becomes step=7, {val_loss:.3f} val_loss=0.123.
    filename: str = "megatron_gpt--{${.monitor}:.3f}-{step}-{consumed_samples}-{epoch}"


class ExpManager(Section):
    explicit_log_dir: str | None = "/results"  # where everything goes: logs, metrics, checkpoints
    exp_dir: str | None = None  # if explicit_log_dir is null: log to <exp_dir>/<name>; null: nemo_experiments/<name>
    name: str = "megatron_gpt"  # of the archive (checkpoints/<name>.nemo) and of the log directory in exp_dir
    create_wandb_logger: bool = False  # log to Weights & Biases as well (pip install 'nemo_style_aligner[wandb]')
    wandb_logger_kwargs: Open[WandbArguments]  # arguments of wandb.init, or those of Lightning's WandbLogger
    create_mlflow_logger: bool = False  # log to MLflow as well (pip install 'nemo_style_aligner[mlflow]')
    mlflow_logger_kwargs: MlflowArguments  # those of Lightning's MLFlowLogger
    log_format: LogFormat = "text"  # format of the log lines on standard error: text, or json (one object per line)
    # Lowest level that rank 0 logs: debug (also retries and requests), info or warning; other ranks: warning.
    log_level: LogLevel = "info"
    resume_if_exists: bool = True  # continue from the last checkpoint in the log directory
    resume_ignore_no_checkpoint: bool = True  # start from the beginning where there is none; False: that is an error
    # Continue from this checkpoint instead of the last one, unless the last one is from a run that already did so.
    resume_from_checkpoint: str | None = None
    # DD:HH:MM:SS; save a checkpoint and end after this long. A service finishes the requests that it has accepted.
    max_time_per_run: str | None = None
    # End the job, with a report of where each rank hangs, when no rank has made progress for this long; null: never.
    # Keep it below trainer.distributed_timeout_minutes: otherwise the bare error of a collective comes first.
    watchdog_minutes: Minutes | None = 25
    # Serve a live report on this port of rank 0's machine, to that machine alone (docs/reports.md); 0: a free port,
    # null: do not. A browser asks for a name (any) and a password: the secret that the jobs of a run share.
    dashboard_port: Port | None = None
    timeline: bool = False  # note in timeline/ when each rank begins and ends each phase; the dashboard does so, too
    checkpoint_callback_params: CheckpointParams


# ---- models -------------------------------------------------------------------------------------


class Model(Section):
    # null means the value in the checkpoint's own config, unless the key's comment says otherwise. Keys that describe a
    # model's architecture can be given, too.
    tensor_model_parallel_size: Free[Count] = 1  # ranks that share each layer; checkpoints load at any layout
    pipeline_model_parallel_size: Free[Count] = 1  # stages that the layers are divided into
    expert_model_parallel_size: Free[Count] = 1  # groups of ranks that have different experts
    # Neighbouring ranks that share each expert. null: tensor_model_parallel_size.
    expert_tensor_parallel_size: Free[Count | None] = None
    # Ranks that compute each sequence together, a part of its tokens each: for sequences that are too long for a rank
    context_parallel_size: Free[Count] = 1
    sequence_parallel: Free[bool | None] = False  # shard activations between tensor-parallel regions too
    # Compute a prompt once for all sequences of a pass that begin with it: samples of a group, answers of a pair.
    share_prompts: Free[bool] = True
    seed: Annotated[int, Range(0, LARGEST_SEED)] = 1234  # random seed: order of the data, sampling, dropout


class LoraTuning(Section):
    # Which linear layers have adapters: attention_qkv, attention_dense, mlp_fc1, mlp_fc2; attention, mlp and all are
    # several of these.
    target_modules: list[str] = of(["attention_qkv"])
    adapter_dim: Count = 32  # rank of the adapters: of each matrix of the Hugging Face model, as in PEFT
    alpha: Positive | None = None  # what an adapter adds is multiplied by alpha / adapter_dim; null: adapter_dim
    adapter_dropout: ShareBelow1 = 0.0  # dropout of an adapter's input in training
    column_init_method: InitMethod = "xavier"  # how the matrix A begins: xavier, kaiming, normal or zero
    row_init_method: InitMethod = "zero"  # how the matrix B begins; with zero, the model begins as without adapters
    layer_selection: Annotated[list[int], Range(1)] | None = None  # layers with adapters, from 1 on; null: all
    weight_tying: bool = False  # True is not supported
    position_embedding_strategy: str | None = None  # not supported


class Peft(Section):
    # none: every weight is trained; lora: adapters beside frozen weights (docs/lora.md).
    peft_scheme: Literal["none", "lora"] | None = "none"
    # Adapters to begin with: a PEFT directory, an adapter's archive or a training checkpoint; null: new ones.
    restore_from_path: str | None = None
    # What the job's archives hold: merged (a whole model) or adapter (adapters alone, for restore_from_path).
    archive: Free[Literal["merged", "adapter"]] = "merged"
    lora_tuning: LoraTuning


class TrainedModel(Model):
    micro_batch_size: Free[Filled[Count]] = 1  # sequences per forward-backward pass and rank, packed without padding
    # At most this many tokens per pass and rank, in place of a number of sequences; longer sequences are computed
    # alone. null: off.
    max_tokens_per_micro_batch: Free[Count | None] = None
    global_batch_size: Filled[Count] = 64  # sequences per update, over all ranks
    encoder_seq_length: Filled[Length] = 4096  # longest sequence; longer comparisons are left out, with a count
    # Positions of the model that is saved. null: the checkpoint's, or encoder_seq_length if that is larger.
    max_position_embeddings: Length | None = None
    # Recompute none (null), selective (norms, SwiGLU; TE: whole MLPs) or full.
    activations_checkpoint_granularity: Free[Literal["selective", "full"] | None] = None
    activations_checkpoint_method: Free[Literal["uniform", "block"] | None] = None  # with full: uniform or block
    activations_checkpoint_num_layers: Free[Count | None] = None  # with full: layers per recomputed block
    hidden_dropout: ShareBelow1 | None = 0.0  # dropout in training: of the outputs of embedding, attention, MLP
    attention_dropout: ShareBelow1 | None = 0.0  # dropout in training: of the attention weights
    peft: Peft


class TrainedOnTexts(TrainedModel):
    # True: the name of a special token in a message (<|im_end|>) is its letters; False: it is that token. null: as the
    # model was trained, else False (docs/data.md)
    special_tokens_as_text: bool | None = None


class Schedule(Section):
    name: str | None = "CosineAnnealing"  # or constant
    max_steps: Count | None = None  # length of the schedule in updates; null: those of the run
    # Updates of linear warm-up. As in NeMo, with constant_steps above 0 the first one is made at a rate of 0.
    warmup_steps: CountFrom0 | None = 10
    # Updates at the end of the schedule that are made at min_lr. NeMo-Aligner's files have 1000, with which a run of
    # at most warmup_steps + 1000 updates is at min_lr right after the warm-up.
    constant_steps: CountFrom0 | None = 0
    min_lr: Number | None = 9e-7  # learning rate at the end; no effect with constant


class Optimizer(Section):
    # Adam, states sharded over data-parallel ranks; fused_adam: not sharded; sgd: none.
    name: OptimizerName = "distributed_fused_adam"
    overlap_grad_sync: Free[bool] = False  # reduce gradients while the backward pass still runs
    lr: Number = 9e-6  # peak learning rate, reached after the warm-up
    weight_decay: Number = 0.1  # decoupled (AdamW), of matrices only; norms and biases do not decay
    # Adam's decay rates of the running averages of gradients and squared gradients.
    betas: Annotated[list[float], ShareBelow1.__metadata__[0]] = of([0.9, 0.98])
    # Added to the denominator of Adam's update: a divisor, beside moments that may be 0.
    eps: Annotated[float, Range(2.0**-126)] = 1e-8
    sched: Schedule | None


class Standardization(Section):
    enable: bool = False  # False: rewards as the head gives them, whatever the checkpoint says
    mean: Finite | None = None  # needed with enable; null: the checkpoint's
    std: Positive | None = None  # needed with enable; null: the checkpoint's


class Attributes(Section):
    # Outputs of a regression model's head; null: the checkpoint's.
    num_attributes: Annotated[int, Range(1, MOST_ATTRIBUTES)] | None = None
    # Into one reward, by attribute_weights; no effect in training; the critic job always does this.
    merge_attributes: bool = False
    # null: the checkpoint's, else equal weights that add up to 1.
    attribute_weights: Annotated[list[float], Range(-math.inf)] | None = None


class PretrainedCheckpoint(Section):
    restore_from_path: Given[str] = of(None)  # the model (.nemo) to start from: of SFT, for a critic a reward model


class Data(Section):
    # {train: [files], validation: [files], test: [files]}: JSONL (docs/data.md); test is not read. An actor's prompts:
    # one {"text": prompt} per line. A reward model's data, binary_ranking: one {"text": ...} per line, good and bad
    # response of a prompt on consecutive lines, or {"prompt": ..., "chosen": ..., "rejected": ...}; regression:
    # {"text": ..., "label": [numbers]}.
    data_prefix: Given[Open[dict[str, Any] | Files]] = of(None)
    # Longest sequence in tokens; prompts that leave no room for a response are dropped, with a count.
    seq_length: Count = of("${model.encoder_seq_length}")


# ---- services -----------------------------------------------------------------------------------


class Connections(Section):
    receive_seconds: Seconds = 30  # for a request to arrive, plus its size / min_bytes_per_second
    min_bytes_per_second: Annotated[int, Positive.__metadata__[0]] = 65536  # see receive_seconds
    first_request_seconds: Seconds = 30  # for a new connection to send anything
    idle_seconds: Seconds = 600  # between two requests
    max_connections: Count = 4096  # fewer if the limit on open files is lower; 128 for clients without the secret
    # Bytes; a larger body is read only if the request's header has the shared secret.
    max_body_without_token: CountFrom0 = 65536


class Service(Section):
    port: Free[Port] = 5556  # port of rank 0's HTTP server; 0: any free one
    # Address to listen on. null: 0.0.0.0 (all addresses) in a Slurm job or on several machines, otherwise 127.0.0.1.
    host: Free[str | None] = None
    # Shared secret that clients must know (or send: Authorization: Bearer). auto: $NEMO_STYLE_ALIGNER_TOKEN, the file
    # $NEMO_STYLE_ALIGNER_TOKEN_FILE, or this user's own in ~/.nemo_style_aligner; none: no authentication; any other
    # word is the secret itself.
    token: Free[str] = "auto"
    # Further ip:port at which clients may reach this service: of a container's port mapping, of a tunnel.
    known_as: Free[list[Any]] = of([])
    max_body_bytes: Free[Count] = 1073741824  # larger requests are refused
    max_outstanding_requests: Free[Threads] = 128  # more at the same time are answered 429 (try again later)
    infer_timeout_seconds: Free[Seconds] = 600  # an inference request that waits longer is answered 504
    connections: Free[Connections]  # limits on clients, before a request is accepted
    # Largest batch per rank; of a list of sizes the largest counts.
    inference_micro_batch_size: Free[Annotated[int | list[int], Range(1)]] = of("${model.forward_micro_batch_size}")
    # Longest wait of a request for others to share its batch.
    max_queue_delay_microseconds: Free[Annotated[int, Range(0, 10**6 * _LONGEST_SECONDS)]] = 2000
    # Batches are trimmed to their longest sequence, rounded up to a multiple of this; null: not rounded.
    strip_sequence_length_to_multiple: Free[Count | None] = None


# ---- supervised jobs ----------------------------------------------------------------------------


class Updates(Section):
    gradient_clip_val: Number | None = 1.0  # largest gradient norm; 0: no clipping
    # NaN or Inf in the loss or the gradients. stop: the job ends with an error before the update is applied; skip: the
    # update is left out, logged with its samples and counted (metric skipped_updates).
    on_nonfinite: Free[Action] = "stop"
    # With skip: more skipped updates in a row than this end the job.
    max_consecutive_skips: Free[CountFrom0] = 10


class SupervisedLoop(Updates):
    max_epochs: Count = 1  # passes over the training data
    max_steps: Steps = -1  # updates of the whole run, over all restarts; -1: as many as max_epochs allows
    # Updates between validations; 0: none; a float up to 1.0: a fraction of the run.
    val_check_interval: Free[IntervalOrShare | None] = 100
    val_check_at_start: Free[bool] = False  # validate before the first update as well
    # Updates between checkpoints; 0: only at the end and when stopped; a float up to 1.0: a fraction of the run.
    save_interval: Free[IntervalOrShare | None] = of("${.val_check_interval}")
    limit_val_batches: Free[IntervalOrShare] = 1.0  # global batches per validation; up to 1.0: a fraction of the data


class SFTTrainer(Trainer):
    sft: SupervisedLoop


class ChatTokens(Section):
    system_turn_start: str = "\x00"  # before the system turn, which comes first even if it is empty
    turn_start: str = "\x11"  # before every other turn, and once more after the last one if that is learnt
    label_start: str = "\x12"  # before the label of a turn that has one
    end_of_turn: str = "\x0a"  # after the text of a turn
    end_of_name: str = "\x0a"  # after the name of a turn's speaker, and after its label


class SFTFiles(Section):
    # JSONL: one {"input": prompt, "output": response} per line, or a conversation.
    file_path: Given[Files | None] = of("???")
    global_batch_size: Count = 128  # examples per update, over all ranks
    micro_batch_size: Free[Count] = 1  # examples per forward-backward pass and rank
    shuffle: bool = True  # a new order in each epoch; False: the order of the file
    max_seq_length: Count = of("${model.encoder_seq_length}")  # longest example in tokens; longer ones are truncated
    min_seq_length: Count = 1  # shorter examples are left out
    label_key: str = "output"  # the field that holds the response; see answer_only_loss
    add_eos: bool = True  # end each response with the EOS token
    add_sep: bool = False  # put token 0 between prompt and response, whichever token that is
    # Put the BOS token first, once. null: as the base model was trained (its archive), else as tokenizer and chat
    # template are set up (docs/data.md)
    add_bos: bool | None = None
    # Field(s) to shorten when an example is too long, "a,b" in this order; null: none.
    truncation_field: str | None = "input"
    truncation_method: TruncationMethod = "right"  # the side on which they are shortened: left or right
    prompt_template: str = "{input} {output}"  # the text of an example, made of its fields


class SFTValidationFiles(SFTFiles):
    file_path: Files | None = of(None)  # null: no validation
    global_batch_size: Count = of("${model.global_batch_size}")  # examples per validation batch, over all ranks
    micro_batch_size: Free[Count] = of("${model.micro_batch_size}")  # examples per forward pass and rank
    shuffle: bool = False  # False: the order of the file
    max_seq_length: Count = of("${model.data.train_ds.max_seq_length}")  # as train_ds
    label_key: str = of("${model.data.train_ds.label_key}")  # as train_ds
    add_eos: bool = of("${model.data.train_ds.add_eos}")  # as train_ds
    add_sep: bool = of("${model.data.train_ds.add_sep}")  # as train_ds
    add_bos: bool | None = of("${model.data.train_ds.add_bos}")  # as train_ds
    truncation_field: str | None = of("${model.data.train_ds.truncation_field}")  # as train_ds
    prompt_template: str = of("${model.data.train_ds.prompt_template}")  # as train_ds


class ChatData(Section):
    # True: every line must be a conversation; False: pairs and conversations, told apart by their keys.
    chat: bool = False
    chat_prompt_tokens: ChatTokens  # strings that mark the parts of a conversation, where there is no chat template


class SFTData(ChatData):
    train_ds: SFTFiles

    validation_ds: Free[SFTValidationFiles]


class SFTModel(TrainedOnTexts):
    encoder_seq_length: Length = 4096
    restore_from_path: Given[str] = of("???")  # the base model (.nemo)
    global_batch_size: Filled[Count] = of("${.data.train_ds.global_batch_size}")  # examples per update, over all ranks
    # Examples per forward-backward pass and rank.
    micro_batch_size: Free[Filled[Count]] = of("${.data.train_ds.micro_batch_size}")

    data: SFTData

    # Loss on responses (in chats: on the assistant's turns) only; False: on prompts too.
    answer_only_loss: bool = True

    # Of models with experts. Weight of an auxiliary loss that keeps their loads even, the same in any layout
    # (docs/training.md); 0: none.
    moe_aux_loss_coeff: Number = 0.0
    # After each update the bias of an expert's choice moves by this much, towards even loads; 0: it stays.
    moe_router_bias_update_rate: Number = 0.0

    optim: Optimizer


class SFT(JobConfig):
    name: Free[str] = "megatron_gpt_sft"  # see exp_manager.name
    trainer: SFTTrainer
    exp_manager: Free[ExpManager]
    model: SFTModel


class RewardLoop(SupervisedLoop):
    train_random_sampler: bool = True  # shuffle the training data
    val_random_sampler: Free[bool] = False  # shuffle the validation data


class SupervisedModel(TrainedOnTexts):
    encoder_seq_length: Length = 4096
    # Examples (comparisons, pairs, responses, texts) per forward-backward pass and rank.
    micro_batch_size: Free[Filled[Count]] = 1
    global_batch_size: Filled[Count] = 64  # examples per update, over all ranks

    optim: Optimizer


class SupervisedJob(JobConfig):
    trainer: Trainer
    exp_manager: Free[ExpManager]
    pretrained_checkpoint: PretrainedCheckpoint
    model: SupervisedModel


class RewardTrainer(Trainer):
    rm: RewardLoop


class RewardAttributes(Attributes):
    loss_mask_val: Finite = -100  # labels with this value are left out of the loss


class RewardData(Data):
    append_eod: bool = False  # end each text with the EOS token, as a response generated in PPO ends
    # Put the BOS token first, once. null: as the base model was trained (its archive), else as its tokenizer is set up
    # (docs/data.md).
    add_bos: bool | None = None


class RewardModel(SupervisedModel):
    micro_batch_size: Free[Filled[Count]] = 2  # comparisons (binary_ranking: pairs) per forward-backward pass and rank

    # binary_ranking (Bradley-Terry) or regression (mean squared error on attributes).
    reward_model_type: str | None = "binary_ranking"
    regression: RewardAttributes
    use_avg_pool: bool | None = False  # average the hidden states of the sequence instead of taking the last token's
    # dtype of the head: float32 or bfloat16. The latter rounds its gradient in each micro batch, whatever the model's
    # precision.
    force_head_dtype: str | int | None = "bfloat16"

    data: RewardData


class RewardTraining(SupervisedJob):
    trainer: RewardTrainer
    model: RewardModel


# ---- preferences --------------------------------------------------------------------------------


class Preferences(Section):
    # Examples per pass for the reference's log-probs, and per rank. Each is two sequences.
    log_prob_forward_micro_batch_size: Free[Count] = of("${model.micro_batch_size}")
    ref_policy_kl_penalty: Positive = 0.2  # beta: the larger, the nearer the policy stays to the reference
    # The preference loss is of the mean log-probs of a response's tokens, and not of their sum.
    preference_average_log_probs: bool = False
    sft_average_log_probs: bool = of("${.preference_average_log_probs}")  # the same in the SFT loss
    preference_loss_weight: Number = 1  # of the preference loss
    sft_loss_weight: Number = 0  # of the SFT loss: the negative log-probs of the responses that are preferred
    # Where the reference's weights are kept while not in use: `swap` has one set of weights on the device and the other
    # on the CPU, `resident` has both on the device. auto: resident on a CPU, and on a GPU if the weights of a rank take
    # at most a sixteenth of its memory.
    reference_policy_placement: Free[Placement] = "auto"
    # A folder in which the reference's log-probs of all examples are kept, under a fingerprint of model and data: they
    # are computed once, before training and by any run, and no second set of weights is needed. null: in each step.
    reference_logprobs_dir: Free[str | None] = None


class DPOTrainer(Trainer):
    dpo: RewardLoop


class DPO(Preferences):
    # dpo, ipo; rpo_sq, rpo_bwd_kl or rpo_fwd_kl, which fit the difference of the implicit rewards to that of the given
    # ones (chosen_reward and rejected_reward of a line).
    preference_loss: PreferenceLoss = "dpo"
    gt_reward_scale: Finite = 1.0  # of the given rewards, in RPO


class DPOData(RewardData):
    # {train: [files], validation: [files], test: [files]}: JSONL (docs/preferences.md); test is not read. A pair per
    # line, {"prompt": ..., "chosen": ..., "rejected": ...} or {"prompt": ..., "chosen_response": ...,
    # "rejected_response": ...}; or one {"text": ...} per line, good and bad response on consecutive lines.
    data_prefix: Given[Open[dict[str, Any] | Files]] = of(None)
    default_chosen_reward: Finite = 1.0  # RPO: of chosen responses without a chosen_reward
    default_rejected_reward: Finite = 0.0  # RPO: of rejected responses without a rejected_reward


class DPOModel(SupervisedModel):
    dpo: DPO

    data: DPOData


class DPOTraining(SupervisedJob):
    trainer: DPOTrainer
    model: DPOModel


class KTOTrainer(Trainer):
    kto: RewardLoop


class KTO(Preferences):
    desirable_loss_weight: Number = 1.0  # of the losses of good responses
    undesirable_loss_weight: Number = 1.0  # of the losses of bad responses


class KTOData(RewardData):
    # {train: [files], validation: [files], test: [files]}: JSONL (docs/preferences.md); test is not read. A response
    # per line, {"prompt": ..., "response": ..., "preference": "chosen" or "rejected"} or {"prompt": ..., "completion":
    # ..., "label": true or false}.
    data_prefix: Given[Open[dict[str, Any] | Files]] = of(None)


class KTOModel(SupervisedModel):
    kto: KTO

    data: KTOData


class KTOTraining(SupervisedJob):
    trainer: KTOTrainer
    model: KTOModel


# ---- distillation -------------------------------------------------------------------------------


class DistillationTrainer(Trainer):
    knowledge_distillation: RewardLoop


class Distillation(Section):
    target_logits_scale: Positive = 1.0  # the teacher's logits are multiplied by it first
    logits_scale: Positive = 1.0  # the student's logits are multiplied by it first, for the SFT loss, too
    kd_loss_weight: Number = 1.0  # of the distillation loss
    sft_loss_weight: Number = 0.0  # of the SFT loss: the negative log-probs of the text
    # Over the teacher's top-k tokens. fwd_kl: KL(teacher || student), which covers all that the teacher says; bwd_kl:
    # KL(student || teacher), which prefers what it is surest of.
    kd_loss: DistillationLoss = "fwd_kl"


class DistillationData(Data):
    # {train: [files], validation: [files], test: [files]}: JSONL as compute_topk_logits.py writes it
    # (docs/distillation.md); test is not read. CHUNK_ID in a name stands for 0, 1, 2, ...: the files that are there.
    data_prefix: Given[Open[dict[str, Any] | Files]] = of(None)
    top_k: Count | None = None  # use so many of the teacher's tokens, the most likely ones; null: all that lines have


class DistillationModel(SupervisedModel):
    knowledge_distillation: Distillation

    data: DistillationData


class DistillationTraining(SupervisedJob):
    name: Free[str] = "megatron_gpt_knowledge_distillation"  # see exp_manager.name
    trainer: DistillationTrainer
    model: DistillationModel


class TeacherData(ChatData):
    data: SFTFiles


class TeacherModel(Model):
    encoder_seq_length: Filled[Length] = 4096  # longest sequence
    micro_batch_size: Free[Count] = 1  # sequences per pass and rank, packed without padding
    # At most this many tokens per pass and rank, in place of a number of sequences; longer sequences are computed
    # alone. null: off.
    max_tokens_per_micro_batch: Free[Count | None] = None
    global_batch_size: Free[Count] = 1  # examples between two writes, over all ranks


class TeacherLogits(JobConfig):
    name: Free[str] = "megatron_gpt_infer_topk_logits"  # see exp_manager.name
    # JSONL, for model.data.data_prefix of the student; examples that it has already are not computed again.
    output_path: Given[str] = of(None)
    top_k: Count = 100  # tokens at each position, the most likely ones
    start_from_idx: CountFrom0 | None = None  # the first example, counted from 0; null: 0
    end_at_idx: CountFrom0 | None = None  # the last one; null: that of the file
    trainer: Trainer
    exp_manager: ExpManager
    pretrained_checkpoint: PretrainedCheckpoint
    data: TeacherData
    model: TeacherModel


# ---- the reward model's service -----------------------------------------------------------------


class ServedRewardModel(Model):
    forward_micro_batch_size: Free[Filled[Count]] = 4  # sequences per pass, per rank, packed without padding
    # At most this many tokens per pass and rank, in place of a number of sequences; longer sequences are computed
    # alone. null: off.
    forward_max_tokens_per_micro_batch: Free[Count | None] = None

    reward_standardization: Standardization  # (reward - mean) / std
    # Reward model. null: the checkpoint's value.
    use_avg_pool: bool | None = None  # average the hidden states of the sequence instead of taking the last token's
    force_head_dtype: str | int | None = None  # dtype of the head: float32 or bfloat16
    reward_model_type: str | None = None  # binary_ranking (one reward) or regression (one or several attributes)
    regression: Attributes


class RewardServer(Service):
    model_name: str = "reward_model"  # its model name on the wire


class RewardService(JobConfig):
    trainer: Trainer
    inference: Free[RewardServer]
    exp_manager: Free[ExpManager]
    rm_model_file: Given[str] = of(None)  # the reward model (.nemo)
    model: ServedRewardModel


# ---- the critic ---------------------------------------------------------------------------------


class CriticLoop(Service, Updates):
    command_timeout_seconds: Free[Seconds] = 3600  # the same as infer_timeout_seconds for training and saving
    combine_rm_and_critic_server: bool = True  # serve the reward model too: rewards come with the values
    max_steps: Steps = 10000  # length of the learning rate schedule, in critic updates


class CriticTrainer(Trainer):
    ppo: CriticLoop


class CriticModel(TrainedModel):
    global_batch_size: Filled[Count] = 64  # sequences per critic update, over all ranks
    # Sequences per pass in inference, per rank.
    forward_micro_batch_size: Free[Filled[Count]] = of("${.micro_batch_size}")
    # Tokens per such pass, at most; null: off.
    forward_max_tokens_per_micro_batch: Free[Count | None] = of("${.max_tokens_per_micro_batch}")
    # While the critic scores, keep the optimizer's states (fp32 main weights, Adam's moments) in host memory and free
    # the gradients. No effect on a CPU. The states take 12 bytes per parameter, divided over all ranks: where few ranks
    # share a large model (70B on 16 GPUs: 53 GB each), it fits only if they are away during the passes.
    offload_adam_states: Free[bool | None] = False
    # Keep the activations of the pass for values, which then serves as the next update's forward pass. auto: as many as
    # fit into half of the free memory, on a CPU at least as many as before; always; never. Impossible with pipeline
    # stages, dropout or rm_placement=swap.
    keep_activations: Free[KeepChoice] = "auto"

    # Critic
    loss_clip_val: Number | None = 0.2  # range of the clipped value loss; 0: no clipping
    # Where the reward model's weights are kept while not in use, if combined: `swap` has one set of weights on the
    # device and the other on the CPU, `resident` has both on the device. auto: resident on a CPU, and on a GPU if the
    # weights of a rank take at most a sixteenth of its memory.
    rm_placement: Free[Placement] = "auto"

    # Reward model. null: the checkpoint's value.
    reward_standardization: Standardization  # (reward - mean) / std, for rewards and for the critic's values
    use_avg_pool: bool | None = None  # average the hidden states of the sequence instead of taking the last token's
    force_head_dtype: str | int | None = "float32"  # dtype of the head: float32 or bfloat16
    reward_model_type: str | None = None  # binary_ranking (one reward) or regression (one or several attributes)
    regression: Attributes

    optim: Optimizer


class Critic(JobConfig):
    trainer: CriticTrainer
    pretrained_checkpoint: PretrainedCheckpoint
    exp_manager: Free[ExpManager]
    model: CriticModel


# ---- actors -------------------------------------------------------------------------------------


class DynamicSampling(Section):
    # Leave out prompts whose responses all have the same reward, which teach nothing, and take more, up to
    # num_rollout_samples that do. A run has as many steps as without, and so passes over the prompts more often. With
    # staleness these are of the rounds that were begun ahead.
    enable: bool = False
    max_rounds: Count = 4  # of generation in a step, at most; then it trains on what there is


class RewardFunctions(Section):
    # Calls at a time, per rank. More than 1 only of a function that several threads may call at once. null: 1, or 64
    # of an `async def`.
    threads: Threads | None = None
    seconds: Seconds = 60  # longest time of one call; then it has failed, as with an error (on_nonfinite)


class ListedReward(Section):
    name: Filled[str] = of(None)  # by which it is logged; null: that of its function, model or kind
    # exact_match, math_verify (responses against the prompt line's answer), FILE.py:NAME, MODEL.nemo (a reward model in
    # this job), service (that of remote_critic_rm), http://HOST:PORT/NAME (another one) or environment (what
    # trainer.ppo.environment gives).
    source: Given[str] = of(None)
    weight: float = 1.0  # of its rewards in the sum
    # The prompts whose line has VALUE, or one of [VALUES], in FIELD: {FIELD: VALUE}.
    only: Open[dict[str, Any]] = of({})
    devices: CountFrom0 = 0  # how many of the job's ranks a reward model has for itself; 0: those that train
    tensor_parallel_size: Count = 1  # of its own ranks, those that share each layer
    pipeline_parallel_size: Count = 1  # of its own ranks, stages that the layers are divided into


class OwnRanks(Section):
    # How many of the job's ranks the model has for itself, where it gives log-probs of responses while others are
    # generated (docs/placement.md). 0: it is on the ranks that train, in their layout.
    devices: Free[CountFrom0] = 0
    tensor_parallel_size: Free[Count] = 1  # of its own ranks, those that share each layer
    pipeline_parallel_size: Free[Count] = 1  # of its own ranks, stages that the layers are divided into


class Teacher(OwnRanks):
    # On-policy distillation (docs/distillation.md): a model (.nemo) with the policy's tokenizer; null: none.
    restore_from_path: str | None = None
    # The advantage of each token gains this times (its log-prob by the teacher - that by the policy).
    weight: Number = 1.0


class Overlong(Section):
    buffer_tokens: CountFrom0 = 0  # so many tokens before max_length the reward begins to fall, linearly; 0: off
    penalty: Number = 1.0  # by how much it is lower at max_length


class Generation(Section):
    # embedded: the project's own engine, anywhere; trtllm: TensorRT-LLM (see trt_llm below), an error if it is not
    # installed.
    engine: Literal["embedded", "trtllm"] = "embedded"
    # Responses generated at the same time per engine; null: model.ppo.rollout_micro_batch_size.
    num_slots: Count | None = 32
    # The following keys are for the embedded engine.
    # Neighbouring ranks, on one machine, that share an engine's weights and KV cache. null: 1 (each rank's engine has
    # the whole model), or model.tensor_model_parallel_size with trt_llm.reshard=True. Training may have any layout;
    # where the whole model does not fit beside it, give the value of model.tensor_model_parallel_size.
    tensor_parallel_size: Count | None = None
    # Capacity of the KV cache in tokens, for all responses in flight. When it is full, the youngest responses are
    # evicted and their tokens computed again later. null: num_slots * (longest prompt + longest response).
    kv_cache_tokens: Count | None = None
    # Limit on the prompt tokens in a forward pass that also decodes. null: 512 on a CPU, 4096 on a GPU.
    prefill_chunk_tokens: Count | None = None
    # Implementation of the forward pass: native (C++, CPUs), torch (its functions alone) or auto (the fastest here).
    step: StepChoice = "auto"
    # Where slots are free, guess the next tokens from other responses to the same prompt, and have each pass check
    # several: the same responses in fewer passes, with the torch step up to rounding. null: with the native step alone.
    lookup_decoding: bool | None = None


class SidecarTimeouts(Section):
    start_seconds: Seconds = 1800  # loading, compiling, capturing
    refit_seconds: Seconds = 300  # one bucket of weights, or putting the sidecar to sleep or waking it up
    request_seconds: Seconds = 1800  # one response


class TensorRTLLM(Section):
    enable: bool = False  # generate with TensorRT-LLM if it is installed, otherwise with the embedded engine
    reshard: bool = False  # under pipeline parallelism: generate with tensor parallelism only
    # Longest prompt in tokens. Longer ones are dropped from the data, with a count.
    max_input_len: int = of("${subtract:${model.encoder_seq_length},${model.ppo.length_params.max_length}}")
    seed: int = of("${model.seed}")  # random seed of sampling
    model_type: str = "llama"  # has no effect: TensorRT-LLM is told the policy's own shape
    unload_engine_train: bool = False  # free the engine's memory while training; reloading takes time in every step
    # TensorRT-LLM (1.2 and later) runs in a process beside each tensor-parallel group.
    sidecar_python: str | None = None  # python of the environment that has TensorRT-LLM; null: this one
    kv_cache_memory_fraction: ShareAbove0 = 0.4  # of the GPU memory that is free when the sidecar starts
    refit_bucket_mebibytes: Count = 512  # size of the pieces in which weights are handed over
    timeouts: SidecarTimeouts  # seconds


class BatchIterator(Section):
    # True: a Flask server on rank 0 (the first rollout rank, if there are any) hands out prompts, so that ranks with
    # short responses take more of them. False: every rank gets the same number.
    use_flask: bool = False
    port: Port = 5557  # of that server; 0: any free one
    # Address to listen on; null: 127.0.0.1 on one machine, else the address of its machine; 0.0.0.0: all.
    host: str | None = None
    # Longest time that a rank with nothing left to do waits for the others to finish their responses, or
    # trainer.distributed_timeout_minutes if that is longer. With rollout_devices: that ranks wait for any response.
    wait_seconds: Seconds = 3600


class ServePolicy(Section):
    # True: rank 0 answers requests to an OpenAI-compatible API with the policy's newest rollout weights, read only
    # (docs/serving.md). It has an engine of its own, which takes memory for another copy of the whole model, and time
    # of the processor while it answers; the run's samples and numbers stay as they are.
    enable: bool = False
    port: Port = 5558  # 0: any free one
    host: str = "127.0.0.1"  # address to listen on
    num_slots: Count = 4  # responses generated at the same time
    # Tokens of a prompt and its response. null: as in the run (longest prompt + longest response).
    max_length: Count | None = None


class Program(Section):
    # One of both (docs/environments.md). Its arguments: a program that is started for each episode.
    command: list[str] | None = None
    url: str | None = None  # http://HOST:PORT/PATH, of a program that is there and is sent each episode


class Episodes(Section):
    max_replies: Count = 16  # of an episode; the response, with what is inserted, has length_params.max_length tokens
    seconds: Seconds = 300  # of an episode in its environment; a longer one has failed (on_nonfinite)
    blocked_seconds: Seconds = 60  # a coroutine that holds the event loop for longer ends the run, and is named
    # Reward of an episode whose environment wanted another reply when there was no room, or had been as many as there
    # may be: it is cut off there, and counted (cut_episodes). null: it has failed.
    limit_reward: Finite | None = 0.0
    max_running: Count | None = None  # episodes of an engine that are under way at once; null: as many as it can begin
    # Address at which each engine listens for programs (environment.command, environment.url); where they run on
    # another machine, one of this machine's that they reach.
    host: str = "127.0.0.1"


class ActorLoop(Updates):
    max_epochs: Count = 1  # passes over the training prompts
    max_steps: Steps = -1  # steps of the whole run, over all restarts; -1: as many as max_epochs allows
    val_check_interval: Free[Interval | None] = 10  # steps between validations; 0: none
    val_check_at_start: Free[bool] = True  # validate before the first step as well: what later ones are compared with
    # Steps between checkpoints; 0: only at the end and when stopped.
    save_interval: Free[Interval | None] = of("${.val_check_interval}")
    # NaN or Inf in loss, gradients, rewards, values or log-probs. stop: the job ends with an error before an update is
    # applied; skip: the update is skipped (counted in metric skipped_updates), or the samples are left out (metric
    # nonfinite_samples), and the log names the samples.
    on_nonfinite: Free[Action] = "stop"
    # Rounds of rollouts in which only the critic learns, before the first policy update.
    critic_warmup_steps: CountFrom0 = 0
    num_ppo_epochs: Count = 1  # passes over each step's rollouts in the policy's training; the critic makes one

    # The algorithm. FILE.py:NAME is a function in a file of yours (docs/extending.md).
    # From rewards to advantages: gae, the only one that needs a critic; grpo, dr_grpo or rloo (the mean reward of a
    # prompt's other responses is the baseline), which compare the responses to a prompt; reinforce_plus_plus;
    # best_of_n, which imitates the best responses (top_n_rollouts); on_policy_distillation, which learns from the
    # teacher alone; or FILE.py:NAME.
    estimator: str = "gae"
    num_rollouts_per_prompt: Count = 1  # responses to a prompt in a step, a group; grpo, dr_grpo, rloo need 2 or more
    # Train on this many responses of each prompt, those with the largest rewards; null: on all of them.
    top_n_rollouts: Count | None = None
    policy_loss: str = "ppo"  # ppo, gspo, cispo, reinforce, or FILE.py:NAME
    # How the losses of tokens add up. token_mean: the mean over all tokens; sequence_mean: over responses, of each
    # one's mean; sequence_sum: over responses, of each one's sum divided by loss_constant_length. Responses that are
    # left out (mask_truncated) are in no mean: for Dr. GRPO, which learns from them as well, set mask_truncated=False.
    loss_aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    loss_constant_length: Count | None = None  # tokens, for sequence_sum; null: model.ppo.length_params.max_length
    # With ppo: of tokens with a negative advantage, no loss is above -dual_clip times it; above 1; null: no bound.
    dual_clip: Annotated[float, Range(1, low_excluded=True)] | None = None
    dynamic_sampling: DynamicSampling

    # FILE.py:NAME, an `async def NAME(policy, line)`: a response is an episode of several replies, between which this
    # function tells the policy what its tools, or others, say (docs/environments.md). {command: [...]} or {url: ...}: a
    # program does. null: it is one reply.
    environment: str | Program | None = None
    episodes: Free[Episodes]

    # Rewards
    # A list of {name, source, weight: 1.0, only: {FIELD: VALUE}}: the weighted sum counts, and each is logged by name
    # (docs/rewards.md). null: the service that remote_critic_rm names; []: none, beside a teacher.
    # source: exact_match, math_verify (responses against the prompt line's answer), FILE.py:NAME, MODEL.nemo (a reward
    # model in this job), service (that of remote_critic_rm), http://HOST:PORT/NAME (another one), or environment (what
    # the episode's function returns).
    # only: the prompts whose line has VALUE, or one of [VALUES], in FIELD.
    rewards: list[ListedReward] | None = None
    reward_functions: Free[RewardFunctions]  # those of rewards: FILE.py:NAME
    overlong: Overlong

    reference: OwnRanks  # the initial policy, from which the KL penalty keeps the policy
    teacher: Teacher

    # KL divergence and advantages
    initial_policy_kl_penalty: Number = 0.01  # weight of the KL divergence from the initial policy
    # reward: it lowers the rewards (best_of_n, on_policy_distillation: the advantage of each token); loss: it is part
    # of the policy's loss, for which k3 is usual, and k1 impossible, as its gradient is noise.
    kl_in: Literal["reward", "loss"] = "reward"
    use_absolute_kl: bool = True  # penalise |log ratio| instead of the log ratio
    kl_estimator: KLEstimator | None = None  # abs, k1, k2 or k3; null: abs if use_absolute_kl, else k1
    kl_clamp: Positive | None = None  # bounds each token's KL estimate to [-kl_clamp, kl_clamp]; null: unbounded
    discount_factor: Share = 1.0  # gamma of gae and reinforce_plus_plus
    gae_lambda: Share = 0.95  # lambda of gae
    # To mean 0 and variance 1, over the tokens of all rollouts that enter the policy's loss. null: as the estimator is
    # defined: gae and reinforce_plus_plus.
    normalize_advantages: bool | None = None
    advantage_whitening_unbiased: bool = False  # divide the variance by n - 1 instead of n
    mask_truncated: bool = True  # responses without a stop token (cut off at max_length) give no policy gradient
    # The policy's log-probs for the KL penalty and, as the old log-probs, for PPO's ratio. trainer: from a pass of the
    # trained model; engine: as reported by the engine during generation, which saves that pass but leaves the gap
    # between the two uncorrected (importance_weight_cap and importance_sequence_bounds must be null). With staleness=1
    # the ratio is then relative to the weights that generated.
    policy_logprobs: Literal["trainer", "engine"] = "trainer"
    # Truncated importance sampling: multiply each token's loss by min(cap, trainer's probability / engine's
    # probability), which corrects for different numerics and, with staleness, for older weights; null: off. The gap is
    # logged in either case, except with policy_logprobs=engine.
    importance_weight_cap: Positive | None = of("${by_index:${.staleness},[null,2.0]}")
    # [low, high]: responses whose ratio exp(mean over tokens of log(trainer's probability / engine's probability)) is
    # outside give no policy gradient; null: off.
    importance_sequence_bounds: list[float] | None = None
    # The same for single tokens: outside, one gives no policy gradient.
    importance_token_bounds: list[float] | None = None
    # Around which weights the policy loss clips. step: those that the step starts from (decoupled PPO); sampling: those
    # that sampled each token, for which importance_weight_cap must be null; both: a token that has left either range,
    # in the way its advantage pulls, has no gradient (docs/performance.md, Learning).
    trust_region: Literal["step", "sampling", "both"] = of("${by_index:${.staleness},[step,both]}")
    sampling_kl: Number = 0.0  # weight, in the loss, of KL(what sampled || policy), which keeps the policy near
    # With experts: compute the policy with those that the engine has chosen for each token, in log-probs and updates;
    # its routers learn all the same (R3, arXiv:2510.11370). False: as its own routers choose; metric
    # routing_disagreement says how often that is otherwise.
    replay_routes: bool = False

    # How many of the job's ranks (the last of trainer.devices x trainer.num_nodes, but for those of critic and frozen
    # models) only generate, with the embedded engine; the others only train. 0: every rank does both.
    rollout_devices: Free[CountFrom0] = 0
    # How many of the job's ranks (after those that train and those that generate) have the critic of the section
    # critic, with a layout of its own. 0: there are none.
    critic_devices: Free[CountFrom0] = 0
    # 0: each step trains on rollouts of its current weights. k: a step's rollouts are generated with the weights from
    # which the k-th step before it started, while that one and those after it train. This needs rollout_devices. Take
    # the smallest that keeps the ranks busy, which is usually 1: 2 or more cost learning, less with half the
    # model.ppo.ratio_eps (docs/performance.md, Learning).
    staleness: CountFrom0 = 0
    # With staleness, what becomes of responses that are under way when weights are replaced. wait: they are finished
    # first, so that a step lasts as long as its longest response. keep: a step takes the first groups to finish, and
    # the others go on with the new weights. restart: they begin again. null: keep, but wait with an environment.
    in_flight: Literal["keep", "restart", "wait"] | None = None

    # Where the initial policy's weights are kept while not in use: `swap` has one set of weights on the device and the
    # other on the CPU, `resident` has both on the device. auto: resident on a CPU, and on a GPU if the weights of a
    # rank take at most a sixteenth of its memory. The same goes for the teacher and the reward models in `rewards`:
    # with `swap` they are on the device only while they score.
    reference_policy_placement: Free[Placement] = "auto"

    generation: Free[Generation]

    # TensorRT-LLM; but `reshard`, `max_input_len`, `seed` and `unload_engine_train` apply to every engine.
    trt_llm: Free[TensorRTLLM]

    batch_iterator: Free[BatchIterator]

    serve_policy: Free[ServePolicy]

    num_table_rows: Free[CountFrom0] = 8  # sample responses logged per step
    # Append every training sample to samples.jsonl: texts, tokens, rewards and, per token, log-probs of policy and
    # initial policy, advantages, values. Some 50 bytes per token.
    save_samples: Free[bool] = False


class ActorTrainer(Trainer):
    ppo: ActorLoop


class RewardAddress(Section):
    name: str = "reward_model"  # its model name on the wire
    ip: str = "localhost"  # host name or address
    port: Annotated[int, Range(1, LARGEST_PORT)] = 5555  # its inference.port, or --port of serve_reward_function.py


class CriticModelNames(Section):
    train: str = "critic_train"  # one critic update
    infer: str = "critic_infer"  # values, and rewards if combined
    save: str = "critic_save"  # write a checkpoint


class CriticAddress(Section):
    name: CriticModelNames  # the model names on the wire
    ip: str = "localhost"  # host name or address
    port: Annotated[int, Range(1, LARGEST_PORT)] = 5556  # its trainer.ppo.port


class RemoteTimeouts(Section):
    connect_seconds: Seconds = 5  # to open a connection
    read_seconds: Seconds = 1260  # longest silence of the server in one attempt: over twice its infer_timeout_seconds
    # One request over all attempts, counted anew whenever the service answers another request for scores.
    total_seconds: Seconds = 1800
    training_seconds: Seconds = 7800  # one critic update or save, over all attempts
    # How long a service may be away (killed, restarting) before the job ends; does not count towards the limits above.
    restart_seconds: Seconds = 1200
    ready_seconds: Seconds = 1800  # until the services are ready, at start


class RemoteCritic(Section):
    pad_to_length: Count | None = None  # pad shorter sequences for the service to so many tokens; null: none is needed
    # The critic job returns rewards along with values. Must match its trainer.ppo.combine_rm_and_critic_server.
    combine_rm_and_critic_server: bool = True
    reward_model: RewardAddress  # where the reward model's service is, if not combined with the critic
    critic: CriticAddress
    # What a new run (no checkpoint and no critic_journal in the log directory) does if its critic has already been
    # trained: refuse it (an error), or keep its weights.
    trained_critic: TrainedCritic = "refuse"
    # Shared secret of the services and of the work queue; must match the services'. auto: $NEMO_STYLE_ALIGNER_TOKEN,
    # the file $NEMO_STYLE_ALIGNER_TOKEN_FILE, or this user's own in ~/.nemo_style_aligner; none: no authentication; any
    # other word is the secret itself.
    token: str = "auto"
    timeouts: RemoteTimeouts  # seconds


class Sampling(Section):
    use_greedy: bool = False  # always take the most likely token
    temperature: Positive = 1.0  # divides the logits, also for log-probs; no effect with use_greedy
    top_k: CountFrom0 = 0  # sample among the k most likely tokens; 0: all
    top_p: ShareAbove0 = 1.0  # sample among the most likely tokens that hold this probability; 1.0: all
    repetition_penalty: Positive = 1.0  # 1.0: none
    # Put the BOS token before each prompt, once. null: as the policy was trained (its archive), else as its tokenizer
    # is set up (docs/data.md).
    add_BOS: bool | None = None
    # Strings that end a response, besides the tokenizer's EOS token, those that its generation_config.json names, and
    # what the policy has learnt to end with (its archive).
    # Escapes as typed on a command line ('\x11', '\n') are replaced.
    end_strings: list[Any] | None = of(["<|endoftext|>", "<extra_id_1>"])


class Lengths(Section):
    max_length: Count = of("${int_div:${model.encoder_seq_length},2}")  # longest response in tokens
    min_length: CountFrom0 = 1  # tokens before a stop token can come


class Policy(Section):
    # Prompts per step. Responses, num_rollouts_per_prompt (or top_n_rollouts) times as many, must be a multiple of
    # model.global_batch_size.
    num_rollout_samples: Count = 512
    # Responses per scoring request; also the default of forward_micro_batch_size, and of generation.num_slots=null.
    rollout_micro_batch_size: Free[Count] = 8
    # Sequences per pass for log-probs or rewards, per rank.
    forward_micro_batch_size: Free[Count] = of("${.rollout_micro_batch_size}")
    # Tokens per such pass, at most; null: off.
    forward_max_tokens_per_micro_batch: Free[Count | None] = of("${model.max_tokens_per_micro_batch}")
    num_val_samples: Free[Count] = of("${.num_rollout_samples}")  # prompts per validation, with one response each
    # From a step's last update to the next step's first, keep the optimizer's states (fp32 main weights, Adam's
    # moments) in host memory, and free the gradients. Makes room for the engine on a GPU; no effect on a CPU.
    offload_adam_states: Free[bool] = True
    # Keep the activations of the pass for the policy's log-probs, which then serves as the update's forward pass, where
    # a step makes one update of all its responses (as many as model.global_batch_size). auto: as many as fit
    # into half of the free memory, on a CPU at least as many as before; always; never. Impossible with pipeline stages,
    # dropout or reference_policy_placement=swap.
    keep_activations: Free[KeepChoice] = "auto"
    entropy_bonus: Number = 0.0  # weight of the policy's entropy in the loss
    ratio_eps: Positive = 0.2  # clip range of ppo and gspo (3e-4 is usual there); its lower part, with ratio_eps_high
    ratio_eps_high: Positive | None = None  # its upper part: ratios are clipped at 1 + this; null: ratio_eps
    cispo_ratio_max: Positive = 5.0  # cispo's bound of the ratio, a weight there

    sampling_params: Sampling

    length_params: Lengths


class ActorModel(TrainedOnTexts):
    encoder_seq_length: Length = 4096
    ppo: Policy

    optim: Optimizer

    data: Data


class PPOActor(JobConfig):
    trainer: ActorTrainer
    remote_critic_rm: Free[RemoteCritic]
    exp_manager: Free[ExpManager]
    pretrained_checkpoint: PretrainedCheckpoint
    model: ActorModel

    # Which role is on which ranks (docs/placement.md). interleave: the critic in a job of its own or, with
    # critic_devices, on ranks of its own; flatten (colocated, colocate_all): all roles on all ranks of this job;
    # separate (disaggregated): rollout_devices ranks only generate. null: separate with rollout_devices, else
    # interleave.
    placement: Free[Strategy | None] = None
    # The critic in this job, by the keys of conf/gpt_ppo_critic.yaml. It needs pretrained_checkpoint.restore_from_path,
    # its model and, with combine_rm_and_critic_server (the default), the reward model.
    critic: Open[dict[str, Any]] = of({})


# ---- jobs ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class JobKind:
    """The config of a job.

    Attributes:
        title: the first line of its YAML file.
        sections: the class of the whole.
        defaults: of this job, where they differ.
        without: keys and sections of these classes that it does not have.
        names: dotted names of sections in the package -> in the YAML; they differ in their last part.
    """

    title: str
    sections: type[JobConfig]
    defaults: Mapping[str, Any]
    without: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)


_PARAMS, _WANDB = "exp_manager.checkpoint_callback_params", "exp_manager.wandb_logger_kwargs"
_ACTOR = {
    "model.optim.lr": 9e-7,
    "model.optim.sched.min_lr": 9e-8,
    f"{_PARAMS}.monitor": "val_rewards",
    f"{_PARAMS}.mode": "max",
    f"{_PARAMS}.save_top_k": 1,
}
_NAME = "megatron_gpt-{step}-{consumed_samples}-{ALGORITHM_optimization_step}-{epoch}-{val_rewards:.3f}"

_WITHOUT_CHECKPOINTS = (
    *("exp_manager.create_*_logger", "exp_manager.*_logger_kwargs", "exp_manager.resume_*", _PARAMS),
    *("exp_manager.dashboard_port", "exp_manager.timeline", "trainer.profile"),
)
_WITHOUT_CRITIC = (
    "trainer.ppo.critic_devices",
    "trainer.ppo.critic_warmup_steps",
    "trainer.ppo.gae_lambda",
    "critic",
    *(f"remote_critic_rm.{name}" for name in ("critic", "trained_critic")),
    "remote_critic_rm.combine_rm_and_critic_server",
    "remote_critic_rm.timeouts.training_seconds",
)

_AS_SFT: Mapping[str, Any] = {
    "exp_manager.explicit_log_dir": None,
    "exp_manager.name": "${name}",
    f"{_PARAMS}.save_top_k": 5,
    f"{_PARAMS}.filename": "megatron_gpt_sft--{${.monitor}:.3f}-{step}-{consumed_samples}-{epoch}",
    "model.optim.lr": 3e-5,
    "model.optim.weight_decay": 0.01,
}
"""What NeMo-Aligner's files of SFT and of distillation say alike."""

JOBS: Mapping[str, JobKind] = {
    "gpt_sft": JobKind(
        "Supervised fine-tuning: examples/nlp/gpt/train_gpt_sft.py",
        SFT,
        _AS_SFT,
    ),
    "training_rm": JobKind(
        "Reward model training: examples/nlp/gpt/train_reward_model.py",
        RewardTraining,
        {
            f"{_WANDB}.project": "nemo_aligner_rm",
            f"{_WANDB}.name": "rlhf_gpt3_rm_2b",
            "trainer.rm.save_interval": 100,
            "model.regression.num_attributes": 1,
        },
    ),
    "gpt_dpo": JobKind(
        "Direct preference optimization: examples/nlp/gpt/train_gpt_dpo.py",
        DPOTraining,
        {
            f"{_WANDB}.project": "nemo_aligner_dpo",
            f"{_WANDB}.name": "rlhf_gpt3_dpo",
            "trainer.dpo.val_check_interval": 0.1,
            "trainer.dpo.save_interval": 100,
        },
    ),
    "gpt_kto": JobKind(
        "Kahneman-Tversky optimization: examples/nlp/gpt/train_gpt_kto.py",
        KTOTraining,
        {
            f"{_WANDB}.project": "nemo_aligner_kto",
            f"{_WANDB}.name": "rlhf_gpt3_kto",
            "trainer.kto.val_check_interval": 0.1,
            "trainer.kto.save_interval": 100,
        },
    ),
    "gpt_knowledge_distillation": JobKind(
        "Knowledge distillation: examples/nlp/gpt/train_gpt_knowledge_distillation.py",
        DistillationTraining,
        _AS_SFT,
    ),
    "compute_topk_logits": JobKind(
        "A teacher's logits, for distillation: examples/nlp/synthetic_data_gen/compute_topk_logits.py",
        TeacherLogits,
        {
            "exp_manager.explicit_log_dir": None,
            "exp_manager.name": "${name}",
            "data.data.file_path": None,
        },
        without=(
            *_WITHOUT_CHECKPOINTS,
            *(f"data.data.{name}" for name in ("shuffle", "global_batch_size", "micro_batch_size")),
        ),
    ),
    "inference_rm": JobKind(
        "The reward model as a service of its own: examples/nlp/gpt/serve_reward_model.py",
        RewardService,
        {"inference.port": 5555, "exp_manager.explicit_log_dir": None, "exp_manager.name": "inference_rm"},
        without=_WITHOUT_CHECKPOINTS,
    ),
    "gpt_ppo_critic": JobKind(
        "The critic job: examples/nlp/gpt/serve_ppo_critic.py",
        Critic,
        {
            "exp_manager.name": "megatron_gpt_critic",
            f"{_WANDB}.project": "nemo_aligner_ppo",
            f"{_WANDB}.name": "gpt3_ppo_2b",
            f"{_PARAMS}.monitor": "step",
            f"{_PARAMS}.mode": "max",
            f"{_PARAMS}.save_top_k": 0,
            f"{_PARAMS}.filename": "megatron_gpt-{step}",
            "model.regression.merge_attributes": True,
        },
        without=(f"{_PARAMS}.save_best_model", "trainer.profile"),
    ),
    "gpt_ppo_actor": JobKind(
        "The PPO actor job: examples/nlp/gpt/train_gpt_ppo_actor.py",
        PPOActor,
        {
            **_ACTOR,
            "exp_manager.name": "megatron_gpt_ppo_actor",
            f"{_WANDB}.project": "nemo_aligner_ppo",
            f"{_WANDB}.name": "gpt3_ppo_2b",
            f"{_PARAMS}.filename": _NAME.replace("ALGORITHM", "ppo"),
        },
    ),
    "gpt_reinforce_actor": JobKind(
        "The REINFORCE actor job: examples/nlp/gpt/train_gpt_reinforce_actor.py. It needs no critic.",
        PPOActor,
        {
            **_ACTOR,
            "trainer.ppo.estimator": "rloo",
            "trainer.ppo.num_rollouts_per_prompt": 4,
            "trainer.ppo.policy_loss": "reinforce",
            "exp_manager.name": "megatron_gpt_reinforce_actor",
            f"{_WANDB}.project": "nemo_aligner_reinforce",
            f"{_WANDB}.name": "gpt3_reinforce_2b",
            f"{_PARAMS}.filename": _NAME.replace("ALGORITHM", "reinforce"),
        },
        without=_WITHOUT_CRITIC,
        names={"trainer.ppo": "trainer.reinforce", "model.ppo": "model.reinforce", "remote_critic_rm": "remote_rm"},
    ),
    "gpt_rs_actor": JobKind(
        "Best of n (rejection sampling): examples/nlp/gpt/train_gpt_rs_actor.py. It needs no critic.",
        PPOActor,
        {
            **_ACTOR,
            "trainer.ppo.estimator": "best_of_n",
            "trainer.ppo.num_rollouts_per_prompt": 4,
            "trainer.ppo.top_n_rollouts": 1,
            "trainer.ppo.policy_loss": "reinforce",
            "trainer.ppo.policy_logprobs": "engine",
            "trainer.ppo.initial_policy_kl_penalty": 0.0,
            "exp_manager.name": "megatron_gpt_rs_actor",
            f"{_WANDB}.project": "nemo_aligner_rs",
            f"{_WANDB}.name": "gpt3_rs_2b",
            f"{_PARAMS}.filename": _NAME.replace("ALGORITHM", "rs"),
        },
        without=_WITHOUT_CRITIC,
        names={"trainer.ppo": "trainer.rs", "model.ppo": "model.rs", "remote_critic_rm": "remote_rm"},
    ),
}
"""The jobs, by the names of their YAML files, without their ending."""

_SCALINGS: dict[str, Any] = {"seq_len_interpolation_factor": 2.0, "rope_scaling": {}}
_EXAMPLE = ModelArchitecture(
    num_layers=1,
    hidden_size=2,
    ffn_hidden_size=1,
    num_attention_heads=1,
    num_query_groups=1,
    vocab_size=1,
    rope_scaling=RopeScaling("llama3", 2.0, 2, 0.5, 2.0),
    no_rope_layers=(0,),
    experts=Experts(number=1, per_token=1, ffn_hidden_size=1, scores="sigmoid", scaling=2.0, shared_ffn_hidden_size=1),
    sliding_window=1,
    windowed_layers=(0,),
    local_rotary_base=2.0,
    attention_sinks=True,
    clamped_swiglu=True,
    layer_norms="both",
    normalization="rmsnorm1p",
    qk_layernorm=True,
    qk_norm_over_heads=True,
    softmax_scale=2.0,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=2.0,
    embedding_multiplier=2.0,
    residual_multiplier=2.0,
    logits_scaling=2.0,
)

ARCHITECTURE: Mapping[str, Field] = {
    **{
        name: Field((type(value),), is_nullable=True) for name, value in (_SCALINGS | _EXAMPLE.to_nemo_config()).items()
    },
    "rope_scaling": Field((dict, bool), is_nullable=True, marks=frozenset({"open"})),
    "rope_scaling_factor": Field((float,), is_nullable=True),
    "moe_layer_freq": Field((int, list), is_nullable=True),
    "add_qkv_bias": Field((bool,), is_nullable=True),
    "encoder_seq_length": Field((int,), is_nullable=True, range=Range(2, LARGEST_LENGTH)),
    "max_position_embeddings": Field((int,), is_nullable=True, range=Range(2, LARGEST_LENGTH)),
    "make_vocab_size_divisible_by": Field((int,), is_nullable=True, range=Range(1, 1 << 16)),
}
"""Keys of ``model`` that come with a checkpoint's own config: the YAML files leave them out."""


@functools.cache
def fields_of_job(name: str) -> Mapping[str, Field]:
    """The keys that a job knows, and its sections, by their dotted names in the package, in their order."""
    job = JOBS[name]
    absent = [f"{pattern}{below}" for pattern in job.without for below in ("", ".*")]
    own = {
        key: dataclasses.replace(field, default=job.defaults.get(key, field.default))
        for key, field in fields_of(job.sections).items()
        if not any(fnmatchcase(key, pattern) for pattern in absent)
    }
    return {f"model.{name}": field for name, field in ARCHITECTURE.items()} | own


def may_change(key: str) -> bool:
    """Whether starts of the same run may differ in a key."""
    found = (find_field(fields_of_job(job), key) for job in JOBS)
    return any(field is not None and field.may_change for field in found)
