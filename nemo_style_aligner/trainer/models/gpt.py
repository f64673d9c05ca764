"""Builds megatron-core `GPTModel`s, with a language-model head or a reward head, from the config."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module, MegatronModule

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import ParallelLayout, current_layout, device
from nemo_style_aligner.engine.softcaps import capped
from nemo_style_aligner.engine.weights.layout import ROUTER_BIAS, dtype_of
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import HEAD_PREFIX, Part, parameter_parts
from nemo_style_aligner.trainer.config.schema import Optimizer
from nemo_style_aligner.trainer.models.attention import LayerConfig
from nemo_style_aligner.trainer.models.gpu_kernels import prepare_kernels
from nemo_style_aligner.trainer.models.heads import RewardHead, RewardHeadConfig
from nemo_style_aligner.trainer.models.layers import block_spec, uses_transformer_engine
from nemo_style_aligner.trainer.models.linear import add_in_place
from nemo_style_aligner.trainer.models.logprobs import predict
from nemo_style_aligner.trainer.models.lora import Adapter, LoraSettings, add_adapters

if TYPE_CHECKING:
    from nemo_style_aligner.trainer.models.kept_passes import KeptPasses
    from nemo_style_aligner.trainer.models.routes import Balance

logger = logging.getLogger(__name__)

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),
    "squared-relu": squared_relu,
}


def parse_precision(precision: Any, name: str = "trainer.precision") -> torch.dtype:
    """The weights' dtype for ``trainer.precision``: "bf16" or 32 ("fp32"), with or without "-mixed" or "-true".

    Args:
        name: where the value comes from, for the error.

    Raises:
        ValueError: any other value (fp16 with loss scaling is not supported: use bf16).
    """
    text = str(precision).removesuffix("-mixed").removesuffix("-true")
    if text == "bf16":
        return torch.bfloat16
    if text in ("32", "fp32"):
        return torch.float32
    raise ValueError(f"{name}={precision!r}: choose bf16 or 32")


@dataclasses.dataclass
class MegatronModel:
    """A built model on this rank: this stage's module, wrapped for training or bare.

    Attributes:
        module: what the pipeline schedule calls (DDP, `Float16Module` or the bare model).
        gpt: the bare `GPTModel` inside.
        config: the `LayerConfig` of its layers.
        architecture: its global shape.
        layout: the parallel layout it was built for.
        adapters: what is trained beside frozen weights, by weight; none where every weight is trained.
        kept_passes: forward passes that are kept for the next training step; None: none are kept.
        balance: what is done for even loads of experts; None: nothing.
    """

    module: torch.nn.Module
    gpt: GPTModel
    config: LayerConfig
    architecture: ModelArchitecture
    layout: ParallelLayout
    adapters: dict[torch.nn.Parameter, Adapter] = dataclasses.field(default_factory=dict)
    kept_passes: KeptPasses | None = None
    balance: Balance | None = None

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under `GPTModel`'s names (without wrappers' prefixes)."""
        return self.gpt.named_parameters()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """`named_parameters`, and what no optimizer changes but belongs to the weights: routers' biases."""
        yield from self.named_parameters()
        yield from ((name, bias) for name, bias in self.gpt.named_buffers() if name.endswith(".router.expert_bias"))

    def trained_parameters(self) -> list[torch.nn.Parameter]:
        """This rank's parameters that an update may change."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """A parameter's values as others are to have them: with its adapter, if it has one. Live ones otherwise."""
        adapter = self.adapters.get(weight)  # type: ignore[call-overload]
        return weight.detach() if adapter is None else adapter.merged(weight)

    def trained_parts(self) -> list[tuple[torch.Tensor, list[Part]]]:
        """What training checkpoints have of this rank's parameters, by parameter: adapters alone, if there are any."""
        own = parameter_parts(self.gpt)
        if not self.adapters:
            return own
        adapted = [part for adapter in self.adapters.values() for part in adapter.parameter_parts()]
        return adapted + [(weight, parts) for weight, parts in own if parts[0].key.startswith(HEAD_PREFIX)]

    def merged_parts(self) -> list[Part]:
        """What archives have of this rank's parameters; those with adapters are copies, on the CPU."""
        frozen = {weight: weight.data for weight in self.adapters}
        try:
            for weight, adapter in self.adapters.items():
                weight.data = adapter.merged(weight).cpu()
            return [part for _, parts in parameter_parts(self.gpt) for part in parts]
        finally:
            for weight, data in frozen.items():
                weight.data = data

    @property
    def cuts_experts(self) -> bool:
        """Whether ranks divide its experts otherwise than its other weights."""
        return self.architecture.experts is not None and self.layout.cuts_experts

    @property
    def computes_together(self) -> bool:
        """Whether data-parallel ranks share experts: all must make as many passes, and export weights together."""
        return self.architecture.experts is not None and self.layout.shares_experts

    @property
    def has_reward_head(self) -> bool:
        """Whether the model ends in a reward head (on the last stage) instead of the vocabulary."""
        return isinstance(self.gpt, GPTRewardModel)


class GPTLanguageModel(GPTModel):
    """A `GPTModel` that returns log-probs for a `Prediction` passed as ``labels``, without storing all logits."""

    def __init__(self, *args: Any, architecture: ModelArchitecture, **kwargs: Any) -> None:
        super().__init__(*args, share_embeddings_and_output_weights=architecture.tied_embeddings, **kwargs)
        self.architecture = architecture

    def _postprocess(self, hidden_states: torch.Tensor, *, labels: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """[s, b, h] -> the prediction's log-probs on the last stage, or logits without ``labels``."""
        a = self.architecture
        if not self.post_process:
            return super()._postprocess(hidden_states, labels=None, **kwargs)
        if a.logits_scaling != 1:
            hidden_states = hidden_states / a.logits_scaling
        if labels is None:
            return capped(super()._postprocess(hidden_states, labels=None, **kwargs), a.final_logit_softcapping)
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return predict(
            hidden_states,
            weight,
            a.vocab_size,
            labels,
            sequence_parallel=self.config.sequence_parallel,
            softcap=a.final_logit_softcapping,
        )


class GPTRewardModel(GPTModel):
    """A `GPTModel` that ends in a `RewardHead`: ``[b, s]`` tokens -> ``[b, s, attributes]``."""

    def __init__(self, *args: Any, head: RewardHeadConfig, **kwargs: Any) -> None:
        # Untied and without an output layer: the head takes its place.
        super().__init__(*args, share_embeddings_and_output_weights=False, **kwargs)
        if self.post_process:
            del self.output_layer
            self.rm_head = RewardHead(self.config, head)

    def _postprocess(self, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:  # type: ignore[override]
        """[s, b, h] -> head outputs [b, s, attributes] in fp32 on the last stage, else unchanged."""
        return self.rm_head(hidden_states) if self.post_process else hidden_states

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As `GPTModel`'s, without the output layer this model does not have."""
        # Bypasses GPTModel and LanguageModule, which both expect that layer.
        return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)


def transformer_config(
    architecture: ModelArchitecture, model_cfg: Mapping[str, Any], dtype: torch.dtype, layout: ParallelLayout
) -> LayerConfig:
    """megatron-core's config for ``architecture`` with the training options of ``model_cfg``.

    Raises:
        ValueError: the architecture cannot be laid out on this many ranks.
    """
    problems = architecture.layout_problems(layout.tp_size, layout.pp_size)
    if problems := problems or architecture.expert_layout_problems(layout.ep_size, layout.etp_size):
        raise ValueError("; ".join(problems))
    granularity, skipped = model_cfg.get("activations_checkpoint_granularity"), architecture.no_rope_layers
    is_te, local = uses_transformer_engine(dtype, architecture.layers), architecture.local_frequencies()
    recompute: dict[str, Any] = {}
    if granularity == "full":
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": model_cfg.get("activations_checkpoint_method") or "uniform",
            "recompute_num_layers": model_cfg.get("activations_checkpoint_num_layers") or 1,
        }
    elif granularity == "selective":
        # Our own layers recompute activations themselves, not through megatron-core: see `models.recompute`.
        recompute = {"recompute_granularity": "selective", "recompute_modules": ["mlp"] if is_te else []}
    return LayerConfig(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.kv_channels,
        layers=architecture.layers,
        normalization="LayerNorm" if architecture.norm_has_bias else "RMSNorm",
        layernorm_zero_centered_gamma=architecture.norm_offset == 1,
        layernorm_epsilon=architecture.layernorm_epsilon,
        activation_func=_ACTIVATIONS[architecture.activation],
        gated_linear_unit=architecture.gated,
        add_bias_linear=architecture.bias,
        add_qkv_bias=architecture.qkv_bias or architecture.bias,
        qk_layernorm=architecture.qk_layernorm,
        init_method_std=architecture.init_method_std,
        hidden_dropout=model_cfg.get("hidden_dropout") or 0.0,
        attention_dropout=model_cfg.get("attention_dropout") or 0.0,
        tensor_model_parallel_size=layout.tp_size,
        pipeline_model_parallel_size=layout.pp_size,
        sequence_parallel=layout.tp_size > 1 and bool(model_cfg.get("sequence_parallel")),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Loss functions return sums; gradients are divided by the global count when they are finalised.
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        # On CPUs, initialise whole matrices and cut them up: the same start whatever the tensor-parallel size.
        use_cpu_initialization=not torch.cuda.is_available(),
        attention_softmax_in_fp32=True,
        bias_activation_fusion=False,
        # The option for an activation that is a module, here our `SwiGLU`; see `block_spec`.
        use_te_activation_func=architecture.gated and architecture.activation == "silu",
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        attention_factor=architecture.frequencies()[1],
        local_frequencies=() if local is None else tuple(local.tolist()),
        no_rope_freq=[int(layer in skipped) for layer in range(architecture.num_layers)] if skipped else None,
        softmax_scale=architecture.softmax_scale,
        apply_rope_fusion=is_te,  # unfused, packed rows make the CPU wait for the GPU in every layer
        deallocate_pipeline_outputs=True,
        # Packed rows differ in length, for which megatron-core requires this dispatcher even without experts.
        variable_seq_lengths=layout.pp_size > 1,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=torch.cuda.is_available(),
        **_expert_options(architecture, layout),
        **recompute,
    )


def _expert_options(architecture: ModelArchitecture, layout: ParallelLayout) -> dict[str, Any]:
    """megatron-core's arguments for experts. No token is dropped, and no loss balances them."""
    if architecture.experts is None:
        return {}
    return architecture.experts.to_nemo_config() | {
        "moe_layer_freq": architecture.expert_layers,
        "expert_model_parallel_size": layout.ep_size,
        "expert_tensor_parallel_size": layout.etp_size,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
    }


def padded_vocab_size(vocab_size: int, divisor: int, tp_size: int) -> int:
    """Rows of the sharded embedding: the next multiple of ``divisor * tp_size``."""
    multiple = max(1, divisor) * tp_size
    return -(-vocab_size // multiple) * multiple


def build_model(
    architecture: ModelArchitecture,
    model_cfg: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    head: RewardHeadConfig | None = None,
    trainable: bool = True,
    initialize: bool = True,
) -> MegatronModel:
    """Build this rank's part of a model, on its device.

    Args:
        architecture: the model's global shape.
        model_cfg: the ``model`` section of a job's config (sequence parallelism, recompute, dropout, optimizer).
        dtype: bfloat16 (fp32 main weights in the optimizer) or float32.
        head: build a reward model or critic with this head instead of a language model.
        trainable: wrap in megatron-core's DDP with gradient buffers; without it the model is for inference.
        initialize: draw random weights; False: they will all be overwritten.
    """
    layout = current_layout()
    config = transformer_config(architecture, model_cfg, dtype, layout)
    config.perform_initialization = initialize
    lora = LoraSettings.from_config(model_cfg) if trainable else None
    prepare_kernels(dtype)  # compiled here, if at all, and not in the middle of the first step
    options: dict[str, Any] = {
        "config": config,
        "transformer_layer_spec": block_spec(config, separate_norms=lora is not None),
        "vocab_size": padded_vocab_size(
            architecture.vocab_size, model_cfg.get("make_vocab_size_divisible_by") or 1, layout.tp_size
        ),
        "max_sequence_length": architecture.max_position_embeddings,
        "pre_process": layout.is_first_stage,
        "post_process": layout.is_last_stage,
        "position_embedding_type": "rope",
        "rotary_percent": architecture.rotary_percentage,
        "rotary_base": architecture.rotary_base,
    }
    if head is None:
        gpt: GPTModel = GPTLanguageModel(architecture=architecture, **options)
    else:
        gpt = GPTRewardModel(head=head, **options)
    rotary = gpt.rotary_pos_emb
    rotary.inv_freq = architecture.frequencies()[0].to(rotary.inv_freq)  # megatron-core knows few scalings
    if layout.is_first_stage:
        gpt.embedding.register_forward_hook(
            lambda _module, _ids, out: _embedded(out, architecture.embedding_multiplier)
        )
    adapters = {} if lora is None else add_adapters(gpt, architecture, layout, lora)
    for name, parameter in gpt.named_parameters():
        if ".local_experts." in name:  # without expert parallelism, megatron-core takes their replicas for the others'
            parameter.allreduce = not layout.cuts_experts  # type: ignore[attr-defined]
            # Biases, too, are those of one rank's experts, or of replicas: as gradients are summed, and in their norm.
            parameter.sequence_parallel = False  # type: ignore[attr-defined]
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    module: torch.nn.Module = gpt.to(device())
    if dtype == torch.bfloat16:
        module = Float16Module(config, module)
        # Float16Module casts everything; the head has a dtype of its own, and so have routers' biases.
        if layout.is_last_stage and head is not None:
            gpt.rm_head.to(head.dtype)
        for name, bias in gpt.named_buffers():
            bias.data = bias.data.to(dtype_of(name.replace("expert_bias", ROUTER_BIAS), bias.dtype))
    if trainable:
        module = _wrap_for_training(module, gpt, config, model_cfg, layout)
    else:
        module.eval().requires_grad_(False)
    return MegatronModel(module, gpt, config, architecture, layout, adapters)


def _embedded(out: torch.Tensor, multiplier: float) -> torch.Tensor:
    """What the embedding says, [s, b, h], scaled. megatron-core transposes it: where b is 1 that leaves b a stride with
    which `torch.matmul` multiplies token by token.
    """
    out = out.view(out.shape)
    return out if multiplier == 1 else out * multiplier


def uses_distributed_optimizer(name: str) -> bool:
    """Whether ``model.optim.name`` asks for optimizer states sharded over data-parallel ranks."""
    return name.startswith(("distributed", "mcore_distributed"))


def _wrap_for_training(
    module: torch.nn.Module,
    gpt: GPTModel,
    config: LayerConfig,
    model_cfg: Mapping[str, Any],
    layout: ParallelLayout,
) -> DistributedDataParallel:
    optim = Optimizer.among(model_cfg.get("optim") or {})
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=optim.overlap_grad_sync and layout.num_replicas > 1 and layout.expert_dp_size > 1,
        use_distributed_optimizer=uses_distributed_optimizer(optim.name),
        check_for_nan_in_grad=False,
    )
    ddp = DistributedDataParallel(config, ddp_config, module)
    ddp.broadcast_params()
    if not ddp_config.overlap_grad_reduce:
        add_in_place(gpt)
    for size, groups in (
        (layout.num_replicas, ddp.bucket_groups),
        (layout.expert_dp_size, ddp.expert_parallel_bucket_groups),
    ):
        # There is no rank to exchange with, but megatron-core would copy whole buffers all the same.
        for group in groups if size == 1 else ():
            group.start_grad_sync = group.start_param_sync = _exchange_nothing
    config.no_sync_func = ddp.no_sync
    return ddp


def _exchange_nothing(**_: bool) -> None:
    """Replaces the exchange of gradients or parameters in a group of one rank."""
