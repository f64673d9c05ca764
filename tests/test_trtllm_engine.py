"""TensorRT engines: the weight converter's numbers, and every call into the library against its recorded signature.

The library is a stand-in: TensorRT-LLM was never executed here (docs/tensorrt_llm.md).
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generation_models import EOS, VOCAB, architecture, engine_for, hf_model, ragged_requests, weights_of
from small_models import TensorSource
from transformers import AutoModelForCausalLM, LlamaConfig
from trtllm_reference import forward
from trtllm_standins import Standins

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.generation.engine import GenerationRequest, SamplingParams
from nemo_style_aligner.generation.engine_group import EngineGroup
from nemo_style_aligner.generation.shard import TensorParallel
from nemo_style_aligner.generation.trtllm.engine_weights import EngineModel, EngineWeights, engine_model
from nemo_style_aligner.generation.trtllm.tensorrt_engine import TensorRTEngine
from nemo_style_aligner.generation.trtllm.tensorrt_library import BuildShape, TensorRTLibrary, stop_words
from nemo_style_aligner.rope import RopeScaling
from nemo_style_aligner.telemetry import activity

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ["llama", "llama-tied", "llama-3.1", "llama-geglu-bias", "qwen2", "nemotron"]


def _model_type(family: str) -> str:
    return "gptnext" if family == "nemotron" else "llama"


def _ranks(a: ModelArchitecture, weights: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    return [
        dict(EngineWeights(a, dtype=torch.float32, tp_size=size, tp_rank=rank).convert(weights.items()))
        for rank in range(size)
    ]


# ---- the converter --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_converted_weights_compute_hugging_faces_logits(family: str, size: int) -> None:
    model, a = hf_model(family), architecture(family)
    config = engine_model(a, _model_type(family), torch.float32).config
    ids = list(range(2, 40))
    ranks = _ranks(a, weights_of(model), size)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
        found = forward(config, ranks, ids)[:, : a.vocab_size]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    for rank, converted in enumerate(ranks):
        table = EngineWeights(a, dtype=torch.float32, tp_size=size, tp_rank=rank).shapes
        assert {name: tuple(tensor.shape) for name, tensor in converted.items()} == table
        assert all(tensor.is_contiguous() for tensor in converted.values())


def test_ranks_share_a_key_head_and_the_vocabulary_is_padded() -> None:
    """One k/v head on two ranks, and 97 tokens that two ranks cannot share evenly."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97}
    hf = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=False, rms_norm_eps=1e-5
    )
    model = AutoModelForCausalLM.from_config(hf).float().eval()
    a = ModelArchitecture(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=1, vocab_size=97
    )
    ranks = _ranks(a, weights_of(model), 2)
    logits = forward(engine_model(a, "llama", torch.float32).config, ranks, [5, 6, 7])
    with torch.no_grad():
        torch.testing.assert_close(logits[:, :97], model(torch.tensor([[5, 6, 7]])).logits[0], atol=1e-4, rtol=1e-4)
    assert logits.shape[-1] == 98
    assert not ranks[1]["lm_head.weight"][-1].any()


@pytest.mark.parametrize("family", ["llama", "llama-geglu-bias", "nemotron"])
def test_the_converter_agrees_with_megatron_cores_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's on-device converter, fed with the Megatron parameters, makes the tensors that ours makes of the
    exported stream."""
    from megatron.core.export.data_type import DataType
    from megatron.core.export.trtllm.model_to_trllm_mapping.default_conversion_dict import DEFAULT_CONVERSION_DICT
    from megatron.core.export.trtllm.trtllm_weights_converter import distributed_trtllm_model_weights_converter as core

    from nemo_style_aligner.models.gpt import build_model
    from nemo_style_aligner.parallel.groups import single_process
    from nemo_style_aligner.weights.stream import export_weights, import_weights

    empty = torch.empty
    monkeypatch.setattr(core, "str_dtype_to_torch", lambda dtype: torch.float32)  # TensorRT-LLM's table
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **kw: empty(*a, **kw))  # no CUDA, no pinning
    a = architecture(family)
    with single_process():
        model = build_model(a, {"make_vocab_size_divisible_by": 64}, torch.float32, trainable=False)
        import_weights(model, TensorSource(weights_of(hf_model(family))))
        activation = "swiglu" if a.activation == "silu" else "geglu" if a.gated else a.activation
        converter = core.DistributedTRTLLMModelWeightsConverter(model.config, DataType.float32, activation=activation)
        state = {name: parameter.detach() for name, parameter in model.named_parameters()}
        converter.convert(state, DEFAULT_CONVERSION_DICT, a.vocab_size)
        ours = dict(EngineWeights(a, dtype=torch.float32, tp_size=1, tp_rank=0).convert(export_weights(model)))
    theirs = converter.trtllm_model_weights
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].reshape(tensor.shape)), name


_NAME = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    "broken, named",
    [
        (lambda w: [(n, t) for n, t in w.items() if n != _NAME], rf"lacks {_NAME}"),
        (lambda w: [*w.items(), ("model.layers.9.mlp.up_proj.weight", torch.zeros(1))], "layers.9.mlp.up_proj"),
        (lambda w: [*w.items(), (_NAME, w[_NAME])], rf"{_NAME} twice"),
        (lambda w: [(n, t[:-1] if n == _NAME else t) for n, t in w.items()], rf"{_NAME} of shape \(47, 48\)"),
    ],
)
def test_a_broken_stream_is_an_error_that_names_the_tensor(broken: Any, named: str) -> None:
    converter = EngineWeights(architecture(), dtype=torch.float32, tp_size=1, tp_rank=0)
    with pytest.raises(ValueError, match=named):
        list(converter.convert(broken(weights_of(hf_model()))))


def test_models_that_tensorrt_llm_cannot_express_are_refused() -> None:
    with pytest.raises(ValueError, match=r"qk_layernorm.*backend=pytorch"):
        engine_model(architecture("qwen3"), "llama", torch.bfloat16)
    with pytest.raises(ValueError, match=r"model_type=llama does not fit.*gptnext"):
        engine_model(architecture("nemotron"), "llama", torch.bfloat16)
    with pytest.raises(ValueError, match=r"model_type=gptnext does not fit.*llama"):
        engine_model(architecture("llama"), "gptnext", torch.bfloat16)
    for family, feature in {"smollm3": "layers without a rotary", "granite": "multipliers"}.items():
        with pytest.raises(ValueError, match=rf"{feature}.*engine=embedded"):
            engine_model(architecture(family), "llama", torch.bfloat16)
    yarn = dataclasses.replace(architecture("llama"), rope_scaling=RopeScaling("yarn", 2.0, 64))
    with pytest.raises(ValueError, match=r"rope_type=yarn.*engine=embedded"):
        engine_model(yarn, "llama", torch.bfloat16)
    with pytest.raises(ValueError, match=r"model_type='gemma'"):
        engine_model(architecture("llama"), "gemma", torch.bfloat16)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=4: .*num_attention_heads=6"):
        EngineWeights(architecture(), dtype=torch.float32, tp_size=4, tp_rank=0)


def test_stop_words_are_one_token_each() -> None:
    words = stop_words((7, 9), 3)
    assert words.dtype == np.int32 and words.shape == (3, 2, 2)
    assert words[2].tolist() == [[7, 9], [1, 2]]


# ---- the library: a stand-in that computes ---------------------------------------------------------

CONSTANT = "rotary_inv_freq"


@dataclasses.dataclass
class FakeTensorRT:
    """What the stand-ins answer: an "engine" is a file of named tensors, and it decodes with `forward`.

    Attributes:
        refuse: a weight that `set_named_weights` refuses.
        lose, invent: weights that the engine does not list, or lists though nobody has them.
        obey: whether the runner heeds the logits processor.
    """

    config: dict[str, Any]
    refuse: str | None = None
    lose: str | None = None
    invent: str | None = None
    refit_result: bool = True
    obey: bool = True
    runners: int = 0

    def __post_init__(self) -> None:
        answers: dict[str, Any] = {
            "tensorrt:Refitter.get_all_weights": lambda instance: instance.engine.listed(),
            "tensorrt:Refitter.get_missing_weights": self._missing,
            "tensorrt:Refitter.set_named_weights": self._set,
            "tensorrt:Refitter.refit_cuda_engine": self._refit,
            "tensorrt_llm._utils:mpi_world_size": lambda: 1,
            "tensorrt_llm.builder:build": self._build,
            "tensorrt_llm.builder:Engine.save": lambda instance, engine_dir: torch.save(
                instance.tensors, f"{engine_dir}/e.pt"
            ),
            "tensorrt_llm.builder:Engine.from_dir": self._from_dir,
            "tensorrt_llm.runtime:ModelRunner.from_engine": self._runner,
            "tensorrt_llm.runtime:ModelRunner.generate": self._generate,
        }
        for name in ("LLaMAForCausalLM", "GPTForCausalLM"):
            answers[f"tensorrt_llm.models:{name}.from_config"] = lambda cls, config: object.__new__(cls)
            answers[f"tensorrt_llm.models:{name}.load"] = lambda instance, weights: setattr(
                instance, "tensors", weights
            )
            answers[f"tensorrt_llm.models:{name}.named_parameters"] = lambda instance: [
                *((name, SimpleNamespace(is_buffer=False)) for name in instance.tensors),
                (CONSTANT, SimpleNamespace(is_buffer=True)),
            ]
        self.standins = Standins("engine", answers)
        self.standins.modules["tensorrt_llm.logger"] = logger = type(np)("tensorrt_llm.logger")
        logger.logger = SimpleNamespace(trt_logger="trt logger")  # type: ignore[attr-defined]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, module in self.standins.modules.items():
            monkeypatch.setitem(sys.modules, name, module)

    def _build(self, model: Any, build_config: Any) -> Any:
        engine = object.__new__(self.standins.modules["tensorrt_llm.builder"].Engine)  # type: ignore[attr-defined]
        engine.engine, engine.tensors = b"plan", {name: tensor.clone() for name, tensor in model.tensors.items()}
        Path(getattr(build_config, "output_timing_cache", "model.cache")).touch()
        return engine

    def _from_dir(self, cls: type, engine_dir: str, rank: int) -> Any:
        engine = object.__new__(cls)
        engine.tensors = torch.load(f"{engine_dir}/e.pt")
        return engine

    def _runner(self, cls: type, engine: Any, **options: Any) -> Any:
        def listed() -> list[str]:
            names = {*engine.tensors, CONSTANT} - {self.lose}
            return sorted(names | ({self.invent} if self.invent else set()))

        self.runners += 1
        runner = object.__new__(cls)
        cuda_engine = SimpleNamespace(refittable=True, tensors=engine.tensors, listed=listed, given={})
        runner.session = SimpleNamespace(runtime=SimpleNamespace(engine=cuda_engine))
        return runner

    def _missing(self, instance: Any) -> list[str]:
        return sorted(set(instance.engine.listed()) - instance.engine.given.keys())

    def _set(self, instance: Any, name: str, weights: Any, location: Any) -> bool:
        """Keep the pointer, as TensorRT does; it is read in the refit."""
        assert weights.type.name == "FLOAT" and location.name == "HOST"
        if name == self.refuse or weights.count != instance.engine.tensors[name].numel():
            return False
        instance.engine.given[name] = weights
        return True

    def _refit(self, instance: Any) -> bool:
        engine = instance.engine
        for name, weights in engine.given.items():
            data = (ctypes.c_float * weights.count).from_address(weights.ptr)
            engine.tensors[name] = torch.frombuffer(data, dtype=torch.float32).clone().view(engine.tensors[name].shape)
        engine.given.clear()
        return self.refit_result

    def _generate(
        self, instance: Any, batch_input_ids: list[torch.Tensor], sampling_config: Any, streaming: bool, **others: Any
    ) -> dict[str, torch.Tensor]:
        """TensorRT-LLM's decoding loop: logits, our processor, argmax, stop words.

        As `GenerationSession.handle_per_step` does: the engine writes into the tensor that was bound at first, and the
        processor is given what it returned in the step before.
        """
        assert not streaming
        prompts = [prompt.tolist() for prompt in batch_input_ids]
        sampling = sampling_config
        weights = instance.session.runtime.engine.tensors
        sequences, finished = [list(prompt) for prompt in prompts], [False] * len(prompts)
        words: Any = sampling.stop_words_list
        bound = scores = torch.empty(0)
        for step in range(sampling.max_new_tokens):
            logits = torch.stack([forward(self.config, [weights], ids)[-1] for ids in sequences])
            bound.resize_(logits.shape).copy_(logits)
            scores = others["logits_processor"](step, torch.zeros(1), scores)
            chosen = (scores if self.obey else logits).argmax(-1).tolist()
            for row, token in enumerate(chosen):
                if not finished[row]:
                    sequences[row].append(token)
                    finished[row] = words is not None and token in words[row][0]
            if all(finished):
                break
        longest = max(map(len, sequences))
        padded = [ids + [sampling.end_id] * (longest - len(ids)) for ids in sequences]
        return {"output_ids": torch.tensor(padded, dtype=torch.int32)[:, None]}


def _engine(
    monkeypatch: pytest.MonkeyPatch, family: str = "llama", fake: FakeTensorRT | None = None, **options: Any
) -> tuple[TensorRTEngine, FakeTensorRT]:
    a = architecture(family)
    model: EngineModel = engine_model(a, _model_type(family), torch.float32)
    fake = fake or FakeTensorRT(model.config)
    fake.config = model.config
    fake.install(monkeypatch)
    shape = BuildShape(model=model, max_batch_size=3, max_input_len=60, max_seq_len=160)
    engine = TensorRTEngine(
        TensorRTLibrary(shape),
        EngineWeights(a, dtype=torch.float32, tp_size=1, tp_rank=0),
        lambda: weights_of(hf_model(family, seed=7)).items(),
        num_slots=3,
        max_input_length=60,
        max_sequence_length=160,
        vocab_size=a.vocab_size,
        eos_id=EOS,
        **options,
    )
    engine.build()
    return engine, fake


@pytest.mark.parametrize(
    "family, params",
    [
        ("llama", SamplingParams(max_new_tokens=6, use_greedy=True)),
        ("llama", SamplingParams(max_new_tokens=6, temperature=0.7, seed=5)),
        ("llama-tied", SamplingParams(max_new_tokens=6, min_new_tokens=4, temperature=1.5, top_k=20, top_p=0.9)),
        ("nemotron", SamplingParams(max_new_tokens=6, repetition_penalty=1.3, seed=2)),
    ],
)
def test_responses_are_those_of_the_embedded_engine(
    family: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same weights, requests and seeds: the same tokens, lengths and reasons; log-probs up to rounding."""
    model = hf_model(family)
    engine, _ = _engine(monkeypatch, family)
    engine.refit(weights_of(model).items(), version=4)
    requests, passes = ragged_requests(4, longest=12), []
    with monkeypatch.context() as patch:
        patch.setattr(activity, "progress", lambda: passes.append(1))
        found = {result.request_id: result for result in engine.generate(iter(requests), params)}
    assert len(passes) == engine.statistics.steps > 0
    expected = {r.request_id: r for r in engine_for(family, model).generate(requests, params)}
    assert found.keys() == expected.keys()
    for number, result in found.items():
        assert result.token_ids == expected[number].token_ids
        assert result.finish_reason == expected[number].finish_reason
        assert result.weight_version == 4
        assert result.logprobs == pytest.approx(expected[number].logprobs, abs=1e-3)
    assert {r.finish_reason for r in found.values()} <= {"stop", "length"}
    assert engine.statistics.generated_tokens == sum(len(r.token_ids) for r in found.values())


def test_stop_token_counts_and_stop_strings_end_a_response(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_model()
    engine, fake = _engine(
        monkeypatch, detokenize=lambda ids: "".join(f"<{i}>" for i in ids), token_to_id={"STOP": 33}.get
    )
    engine.refit(weights_of(model).items(), version=0)
    free = next(
        iter(engine.generate([GenerationRequest(0, [5, 6])], SamplingParams(max_new_tokens=6, use_greedy=True)))
    )
    assert free.finish_reason == "length" and len(free.token_ids) == 6
    text = SamplingParams(max_new_tokens=6, use_greedy=True, stop_strings=(f"<{free.token_ids[2]}>",))
    cut = next(iter(engine.generate([GenerationRequest(0, [5, 6])], text)))
    assert cut.token_ids == free.token_ids[:3] and cut.finish_reason == "stop" and len(cut.logprobs) == 3
    by_id = SamplingParams(max_new_tokens=6, use_greedy=True, stop_strings=("STOP",))
    next(iter(engine.generate([GenerationRequest(0, [5, 6])], by_id)))
    sampling = fake.standins.named("tensorrt_llm.runtime:ModelRunner.generate")[-1]["sampling_config"]
    assert sampling.stop_words_list[0].tolist() == [[EOS, 33], [1, 2]]
    assert sampling.end_id == sampling.pad_id == -1  # disabled: TensorRT-LLM does not count its end id


def test_requests_with_limits_of_their_own_and_no_end_of_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_model()
    engine, fake = _engine(monkeypatch)
    engine.refit(weights_of(model).items(), version=0)
    forced = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=3.0)
    requests = [GenerationRequest(i, [5 + i], seed=i, max_new_tokens=limit) for i, limit in enumerate((2, None, 5))]
    found = {r.request_id: r for r in engine.generate(requests, forced)}
    assert {i: len(r.token_ids) for i, r in found.items()} == {0: 2, 1: 6, 2: 5}
    for result in engine_for("llama", model).generate(requests, forced):
        assert found[result.request_id].token_ids == result.token_ids
    sampling = fake.standins.named("tensorrt_llm.runtime:ModelRunner.generate")[-1]["sampling_config"]
    assert sampling.stop_words_list is None and sampling.max_new_tokens == 6


def test_requests_that_fit_alone_but_not_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM checks the longest prompt and the most new tokens of a batch against max_seq_len."""
    engine, _ = _engine(monkeypatch)
    engine.refit(weights_of(hf_model()).items(), version=0)
    decode, batches = engine._library.decode, []

    def checked(runner: Any, prompts: list[list[int]], **options: Any) -> torch.Tensor:
        batches.append(len(prompts))
        assert max(map(len, prompts)) + options["max_new_tokens"] <= 160
        return decode(runner, prompts, **options)

    monkeypatch.setattr(engine._library, "decode", checked)
    sizes = [(60, 3), (2, 110), (5, 4), (3, 157), (50, 2)]
    requests = [GenerationRequest(i, [7] * n, max_new_tokens=limit) for i, (n, limit) in enumerate(sizes)]
    params = SamplingParams(max_new_tokens=4, use_greedy=True, ignore_eos=True)
    found = list(engine.generate(iter(requests), params))
    assert [(r.request_id, len(r.token_ids)) for r in found] == [(i, limit) for i, (_, limit) in enumerate(sizes)]
    assert batches == [1, 2, 1, 1]


def test_build_is_refittable_and_keeps_the_names_of_a_refit(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, fake = _engine(monkeypatch)
    (call,) = fake.standins.named("tensorrt_llm.builder:build")
    config = call["build_config"]
    assert config.use_refit and config.max_batch_size == 3 and config.max_seq_len == 160
    assert config.max_num_tokens == 3 * 60
    assert not config.plugin_config.use_fused_mlp and not config.plugin_config.paged_kv_cache
    (mapping,) = fake.standins.named("tensorrt_llm:Mapping")
    assert mapping["world_size"] == mapping["tp_size"] == 1
    assert engine.num_compilations == 1
    # Built with real weights, not with placeholders.
    built = call["model"].tensors["transformer.ln_f.weight"]
    torch.testing.assert_close(built, weights_of(hf_model(seed=7))["model.norm.weight"])
    with pytest.raises(RuntimeError, match="already built"):
        engine.build()


def test_refit_brings_every_weight_and_leaves_constants_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_model()
    engine, fake = _engine(monkeypatch)
    engine.refit(weights_of(model).items(), version=0)
    given = {call["name"] for call in fake.standins.named("tensorrt:Refitter.set_named_weights")}
    assert given == set(EngineWeights(architecture(), dtype=torch.float32, tp_size=1, tp_rank=0).shapes)
    assert CONSTANT not in given


@pytest.mark.parametrize(
    "fault, error, named",
    [
        ({"lose": "transformer.layers.1.mlp.fc.weight"}, ValueError, r"only in the weights.*layers\.1\.mlp\.fc"),
        ({"invent": "transformer.layers.1.extra"}, ValueError, r"Only in the engine.*layers\.1\.extra"),
        ({"refuse": "transformer.ln_f.weight"}, RuntimeError, r"refused transformer\.ln_f\.weight"),
        ({"refit_result": False}, RuntimeError, "refused to refit"),
    ],
)
def test_a_refit_that_does_not_fit_is_an_error_and_the_engine_refuses(
    fault: dict[str, Any], error: type[Exception], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeTensorRT({}, **fault)
    engine, _ = _engine(monkeypatch, fake=fake)
    with pytest.raises(error, match=named):
        engine.refit(weights_of(hf_model()).items(), version=0)
    assert engine.weight_version == -1
    with pytest.raises(RuntimeError, match="without complete weights"):
        engine.generate([], SamplingParams(max_new_tokens=1))


def test_a_tied_engine_may_lack_the_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM merges equal tables: then the refit must bring the embedding only."""
    fake = FakeTensorRT({}, lose="lm_head.weight")
    engine, _ = _engine(monkeypatch, "llama-tied", fake)
    engine.refit(weights_of(hf_model("llama-tied")).items(), version=0)
    assert engine.weight_version == 0


def test_unload_and_reload(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, greedy = hf_model(), SamplingParams(max_new_tokens=4, use_greedy=True)
    monkeypatch.chdir(tmp_path)
    engine, fake = _engine(monkeypatch, engine_dir=tmp_path / "engines")
    assert [path.name for path in tmp_path.iterdir()] == ["engines"]  # nothing is written elsewhere
    assert json.loads((tmp_path / "engines" / "group0" / "constants_rank0.json").read_text()) == [CONSTANT]
    engine.refit(weights_of(model).items(), version=0)
    before = [r.token_ids for r in engine.generate(ragged_requests(2, 10), greedy)]
    engine.unload()
    engine.unload()
    for forbidden in (lambda: engine.generate([], greedy), lambda: engine.refit([], 1)):
        with pytest.raises(RuntimeError, match="reload"):
            forbidden()
    engine.reload()
    engine.reload()
    assert fake.runners == 2 and engine.num_compilations == 1
    with pytest.raises(RuntimeError, match="without complete weights"):
        engine.generate([], greedy)
    engine.refit(weights_of(model).items(), version=1)
    assert [r.token_ids for r in engine.generate(ragged_requests(2, 10), greedy)] == before


def test_requests_that_do_not_fit_and_logits_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = _engine(monkeypatch)
    engine.refit(weights_of(hf_model()).items(), version=0)
    greedy = SamplingParams(max_new_tokens=4, use_greedy=True)
    with pytest.raises(ValueError, match=r"request 3: prompt of 61 tokens.*max_input_len=60"):
        list(engine.generate([GenerationRequest(3, [5] * 61)], greedy))
    with pytest.raises(ValueError, match=f"token id {VOCAB}"):
        list(engine.generate([GenerationRequest(3, [VOCAB])], greedy))
    weights = weights_of(hf_model())
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], torch.nan)
    engine.refit(weights.items(), version=1)
    with pytest.raises(FloatingPointError, match=r"requests \[3\]"):
        list(engine.generate([GenerationRequest(3, [5])], greedy))


def test_a_library_that_ignores_the_logits_processor_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = _engine(monkeypatch, fake=FakeTensorRT({}, obey=False))
    engine.refit(weights_of(hf_model()).items(), version=0)
    with pytest.raises(RuntimeError, match="ignored its logits processor"):
        list(engine.generate([GenerationRequest(0, [5], seed=1)], SamplingParams(max_new_tokens=8, temperature=5.0)))


def test_ids_the_tokenizer_does_not_know_are_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a stop token that the model does not know is no trouble."""
    engine, _ = _engine(monkeypatch, vocab_limit=50, detokenize=str, token_to_id={"<|new|>": VOCAB + 5}.get)
    engine.refit(weights_of(hf_model()).items(), version=0)
    hot = SamplingParams(max_new_tokens=8, min_new_tokens=2, temperature=50.0, stop_strings=("<|new|>",))
    for result in engine.generate(ragged_requests(3, 10), hot):
        assert max(result.token_ids) < 50


def test_tensor_parallelism_needs_mpi_over_all_ranks_and_splits_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine_model(architecture(), "llama", torch.float32)
    shape = BuildShape(
        model=model, max_batch_size=1, max_input_len=8, max_seq_len=16, tp_size=2, tp_rank=1, group_index=3
    )
    splits: list[dict[str, int]] = []
    fake = FakeTensorRT(model.config)
    fake.install(monkeypatch)
    with pytest.raises(RuntimeError, match=r"MPI over all 8 ranks.*it has 1.*srun --mpi=pmix"):
        TensorRTLibrary(shape, world_size=8)
    fake.standins._answers["tensorrt_llm._utils:mpi_world_size"] = lambda: 8
    fake.standins._answers["tensorrt_llm._utils:mpi_comm"] = lambda: SimpleNamespace(
        Split=lambda color, key: splits.append({"color": color, "key": key}) or "group communicator"
    )
    TensorRTLibrary(shape, world_size=8)
    assert fake.standins.named("tensorrt_llm.bindings:MpiComm.split") == [{"color": 3, "key": 1}]
    assert splits == [{"color": 3, "key": 1}]
    assert fake.standins.named("tensorrt_llm._utils:set_mpi_comm") == [{"new_comm": "group communicator"}]
    # Under mpirun a rank alone is split off, too; without MPI there is nothing to split.
    alone = dataclasses.replace(shape, tp_size=1, tp_rank=0, group_index=5)
    TensorRTLibrary(alone, world_size=8)
    assert splits[-1] == {"color": 5, "key": 0}
    fake.standins._answers["tensorrt_llm._utils:mpi_world_size"] = lambda: 1
    TensorRTLibrary(alone, world_size=8)
    assert len(splits) == 2


# ---- from the config ------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["engine", "pytorch"])
def test_an_engine_comes_out_of_the_actors_config(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    from nemo_style_aligner.config import load_defaults
    from nemo_style_aligner.generation.trtllm import construct, versions
    from nemo_style_aligner.generation.trtllm.sidecar_engine import SidecarEngine
    from nemo_style_aligner.models.gpt import build_model
    from nemo_style_aligner.parallel.groups import single_process
    from nemo_style_aligner.weights.stream import import_weights

    cfg = load_defaults("gpt_ppo_actor")
    changes = {"backend": backend, "max_input_len": 60, "unload_engine_train": True, "model_type": "llama"}
    for key, value in changes.items():
        OmegaConf.update(cfg, f"trainer.ppo.trt_llm.{key}", value)
    monkeypatch.setattr(versions, "installed_version", lambda python=None: "1.2.1")
    a = architecture()
    fake = FakeTensorRT(engine_model(a, "llama", torch.float32).config)
    fake.install(monkeypatch)
    options = {"num_slots": 3, "max_sequence_length": 160, "eos_id": EOS, "vocab_limit": 90}
    options |= {"detokenize": str, "token_to_id": {}.get}
    with single_process():
        model = build_model(a, {"make_vocab_size_divisible_by": 64}, torch.float32, trainable=False)
        import_weights(model, TensorSource(weights_of(hf_model())))
        with monkeypatch.context() as gpu:
            gpu.setattr(torch.cuda, "is_available", lambda: True)
            gpu.setattr(torch.cuda, "device_count", lambda: 1)
            gpu.setattr(torch.cuda, "current_device", lambda: 0)
            gpu.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="12-34"))
            gpu.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
            if backend == "pytorch":
                with pytest.raises(ValueError, match="expandable segments"):
                    construct.trtllm_engine(cfg, model, EngineGroup(), **options)
            gpu.delenv("PYTORCH_CUDA_ALLOC_CONF")
            if backend == "pytorch":
                with monkeypatch.context() as two, pytest.raises(ValueError, match=r"see their GPUs as 0, 0.*srun"):
                    two.setattr(
                        EngineGroup,
                        "gather",
                        lambda self, own: [own, (own[0], "another")] if isinstance(own, tuple) else [own],
                    )
                    construct.trtllm_engine(cfg, model, EngineGroup(), **options)
            for key, value, default in (
                ("trainer.ppo.policy_logprobs", "engine", "trainer"),
                ("trainer.ppo.importance_weight_cap", 2.0, None),
                ("model.ppo.sampling_params.repetition_penalty", 1.2, 1.0),
            ):
                OmegaConf.update(cfg, key, value)
                if backend == "pytorch":
                    with pytest.raises(ValueError, match=key.rpartition(".")[2]):
                        construct.trtllm_engine(cfg, model, EngineGroup(), **options)
                OmegaConf.update(cfg, key, default)
            if backend == "engine":
                pair = EngineGroup(TensorParallel(rank=0, size=2))
                with pytest.raises(ValueError, match=r"sees 1 of the 2 GPUs.*srun without --gpus-per-task"):
                    construct.trtllm_engine(cfg, model, pair, **options)
            engine = construct.trtllm_engine(cfg, model, EngineGroup(), **options)
        if backend == "engine":
            assert isinstance(engine, TensorRTEngine)
            engine.build()
            engine.refit(export_of(model), version=0)
            (result,) = engine.generate([GenerationRequest(0, [5, 6])], SamplingParams(max_new_tokens=3))
            assert len(result.token_ids) == 3
            return
    assert isinstance(engine, SidecarEngine)
    settings = engine._settings
    assert settings.device_uuids == ("GPU-12-34",) and settings.environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert settings.sleep and settings.bucket_bytes == 512 * 2**20 and settings.start_seconds == 1800
    assert settings.python == sys.executable and engine._recover_weights is not None


def export_of(model: Any) -> Any:
    """The stream that the trainer refits with."""
    from nemo_style_aligner.weights.stream import export_weights

    return export_weights(model)
