"""The native step computes what `transformers` computes, with every kernel, whatever else is in a pass."""

from __future__ import annotations

import dataclasses
import errno
import os
import pwd
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from generation_models import EOS, FAMILIES, VOCAB, architecture, hf_model, weights_of

from nemo_style_aligner.engine.contract import SamplingParams
from nemo_style_aligner.engine.embedded.arena import Arena
from nemo_style_aligner.engine.embedded.engine import choose_step
from nemo_style_aligner.engine.embedded.native import library
from nemo_style_aligner.engine.embedded.native.library import check, compile_command, load_library
from nemo_style_aligner.engine.embedded.native.native_step import NativeStep
from nemo_style_aligner.engine.embedded.step import EngineShape, StepInput
from nemo_style_aligner.engine.embedded.torch_step import TorchStep
from nemo_style_aligner.engine.embedded.trainer_weights import TrainerWeights
from nemo_style_aligner.engine.native import compilation
from nemo_style_aligner.engine.native.compilation import KERNELS, NativeUnavailable, usable_kernels
from nemo_style_aligner.engine.sampling import SamplingRows, sample
from nemo_style_aligner.engine.shard import TensorParallel

pytestmark = pytest.mark.skipif(
    not usable_kernels(torch.float32), reason="the native step needs an x86-64 processor with AVX2 and FMA"
)

FP32_KERNELS = [name for name in KERNELS if not KERNELS[name].bf16_activations]
BF16_KERNELS = list(KERNELS)


def native_step(family: str, dtype: torch.dtype, kernel: str | None, **options: object) -> NativeStep:
    if kernel is not None and not KERNELS[kernel].emulated and kernel not in usable_kernels(dtype):
        pytest.skip(f"this processor has no {kernel}")
    shape = EngineShape(
        architecture(family), dtype, num_slots=6, max_sequence_length=160, num_pages=60, max_step_tokens=256, **options
    )
    step = NativeStep(shape, TrainerWeights(), kernel)
    step.build()
    return step


def run(step: NativeStep, chunks: list[tuple[int, int, list[int]]], decode: int = 0) -> torch.Tensor:
    """Logits of every token of ``chunks`` (slot, first position, tokens)."""
    table = np.arange(60, dtype=np.int32).reshape(6, 10)
    tokens = [t for _, _, ids in chunks for t in ids]
    lengths = [len(ids) for _, _, ids in chunks]
    starts = np.cumsum([0, *lengths[:-1]])

    def int32(values: object) -> np.ndarray:
        return np.ascontiguousarray(values, dtype=np.int32)

    logits = []
    # All rows' logits, as many at a time as there are slots; computing a pass again changes nothing.
    for first in range(0, len(tokens), 6):
        logits.append(
            step.forward(
                StepInput(
                    token_ids=int32(tokens),
                    positions=int32([p + i for _, p, ids in chunks for i in range(len(ids))]),
                    slots=int32([slot for slot, _, ids in chunks for _ in ids]),
                    segments=int32(np.stack([starts, lengths], 1)),
                    num_decode=decode,
                    output_rows=int32(range(first, min(first + 6, len(tokens)))),
                    block_table=table,
                )
            ).clone()
        )
    return torch.cat(logits)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (1, 17, 33, 70, 100)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", FP32_KERNELS)
def test_fp32_logits_equal_hugging_face(family: str, kernel: str) -> None:
    model = hf_model(family)
    step = native_step(family, torch.float32, kernel)
    step.weights.copy_from(weights_of(model).items())
    logits = run(step, [(slot, 0, ids) for slot, ids in enumerate(prompts())])
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts()])
    torch.testing.assert_close(logits, expected, atol=3e-5, rtol=1e-5)


def test_an_odd_number_of_rotated_channels_is_one_more_as_in_megatron() -> None:
    config = dataclasses.replace(architecture("nemotron"), rotary_percentage=0.4)
    assert config.rotary_size % 2 == 1
    shape = EngineShape(config, torch.float32, num_slots=6, max_sequence_length=160, num_pages=60, max_step_tokens=256)
    native, reference = NativeStep(shape, TrainerWeights()), TorchStep(shape, torch.device("cpu"), TrainerWeights())
    for step in (native, reference):
        step.build()
        step.weights.copy_from(weights_of(hf_model("nemotron")).items())
    ids = [(7 * i) % VOCAB for i in range(20)]
    torch.testing.assert_close(run(native, [(0, 0, ids)]), run(reference, [(0, 0, ids)]), atol=3e-5, rtol=1e-5)


def test_what_the_step_does_not_know_is_named() -> None:
    """Ranks have no way to sum squares over all heads in the middle of a layer."""
    shape = EngineShape(architecture("olmo2"), torch.float32, 6, 160, 60, 256, TensorParallel(0, 2))
    with pytest.raises(NativeUnavailable, match="does not know the model's qk_norm_over_heads over several ranks"):
        NativeStep(shape, TrainerWeights())


def test_gates_far_from_zero() -> None:
    """SiLU below -88, where e^-x is beyond float32, is 0: neither NaN nor x itself."""
    model = hf_model("llama")
    with torch.no_grad():
        for layer, scale in zip(model.model.layers, (100, 300, 3000), strict=True):
            layer.mlp.gate_proj.weight *= scale
    step = native_step("llama", torch.float32, "avx2")
    step.weights.copy_from(weights_of(model).items())
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts()])
    logits = run(step, [(slot, 0, ids) for slot, ids in enumerate(prompts())])
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss"])
@pytest.mark.parametrize("kernel", BF16_KERNELS)
def test_bf16_logits_are_those_of_rounded_weights(kernel: str, family: str) -> None:
    """Against fp32 arithmetic on the same bf16 weights; activations and cache are rounded to bf16 here and there."""
    family = "llama-geglu-bias" if "emulated" in kernel and family == "qwen3" else family
    model = hf_model(family).bfloat16().float()
    step = native_step(family, torch.bfloat16, kernel)
    step.weights.copy_from((name, tensor.bfloat16()) for name, tensor in weights_of(model).items())
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in prompts()])
    logits = run(step, [(slot, 0, ids) for slot, ids in enumerate(prompts())])
    error = (logits - expected).abs().mean() / expected.std()
    assert error < 0.02, error


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
@pytest.mark.parametrize("kernel", BF16_KERNELS)
def test_bits_do_not_depend_on_the_pass(kernel: str, family: str) -> None:
    """Whole prompts at once, prompts in chunks beside others, and token by token: the same bits."""
    step = native_step(family, torch.bfloat16, kernel)
    step.weights.copy_from(weights_of(hf_model(family)).items())
    together = run(step, [(slot, 0, ids) for slot, ids in enumerate(prompts())])
    ids = prompts()[4]
    whole = together[-len(ids) :]
    step.clear_pages()
    chunks = [run(step, [(2, start, ids[start : start + 23])]) for start in range(0, len(ids), 23)]
    assert torch.equal(torch.cat(chunks), whole)
    step.clear_pages()
    single = [run(step, [(5, i, [token]), (1, i, [token])], decode=2)[0] for i, token in enumerate(ids)]
    assert torch.equal(torch.stack(single), whole)


@pytest.mark.parametrize(("threads", "family"), [(1, "llama"), (2, "llama"), (3, "llama"), (3, "glm4-moe")])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int, family: str) -> None:
    shape = EngineShape(architecture(family), torch.float32, 6, 160, 60, 256)
    logits = []
    for count in (1, threads):
        step = NativeStep(shape, TrainerWeights(), num_threads=count)
        step.build()
        step.weights.copy_from(weights_of(hf_model(family)).items())
        logits.append(run(step, [(slot, 0, ids) for slot, ids in enumerate(prompts())]))
    assert torch.equal(*logits)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("grammar", [None, "masks"])
def test_native_sampling_is_that_of_the_sampling_module(greedy: bool, grammar: str | None) -> None:
    step = native_step("llama", torch.float32, None)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(200, VOCAB, generator=generator) * 4
    logits[:100, EOS] += 12.0  # nearly certain, and held back in every other row
    params = SamplingParams(max_new_tokens=5, temperature=0.7, use_greedy=greedy, grammar=grammar)
    masks = torch.randint(0, 256, (200, 12), generator=generator, dtype=torch.uint8)  # of 96 ids, of which 80 count
    rows = SamplingRows(
        keys=torch.randint(-(2**62), 2**62, (200,), generator=generator),
        positions=torch.randint(0, 500, (200,), generator=generator),
        suppress_stop=torch.arange(200) % 2 == 0,
        allowed=masks if grammar else None,
    )
    stop_ids = torch.tensor([EOS, 90])
    before = logits.clone()
    tokens, logprobs = step.sample(logits, params, rows, stop_ids, 80)
    assert torch.equal(logits, before)
    expected_tokens, expected_logprobs = sample(logits, params, rows, stop_ids, 80)
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logprobs, expected_logprobs, atol=2e-5, rtol=1e-5)
    assert tokens[rows.suppress_stop].ne(EOS).all() and tokens.max() < 80
    if grammar:
        assert (masks[torch.arange(200), tokens // 8] >> (tokens % 8).to(torch.uint8) & 1).all()


def test_native_sampling_reports_what_is_not_finite() -> None:
    step = native_step("llama", torch.float32, None)
    logits = torch.zeros(4, VOCAB)
    logits[1, 3], logits[2, 95], logits[3, 0] = torch.nan, torch.inf, -torch.inf
    rows = SamplingRows(keys=torch.arange(4), positions=torch.arange(4))
    for greedy in (True, False):
        params = SamplingParams(max_new_tokens=1, use_greedy=greedy)
        _, logprobs = step.sample(logits, params, rows, torch.empty(0, dtype=torch.int64), VOCAB)
        assert logprobs.isfinite().tolist() == [True, False, False, False]


SHAPE = EngineShape(architecture("llama"), torch.float32, 6, 160, 60, 256)


@pytest.mark.parametrize(
    "kernel", ["avx2", "amx-emulated", pytest.param("avx512-bf16-emulated", marks=pytest.mark.long)]
)
def test_the_check_of_compiled_kernels_passes(kernel: str, tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, dtype=torch.bfloat16)
    check(compile_command(["g++"], shape, kernel), tmp_path)


def test_a_failed_check_is_reported(tmp_path: Path) -> None:
    """The compiler here makes a program that finds wrong numbers."""
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/bash\necho -e "#!/bin/bash\\necho largest relative error 0.5\\nexit 1" > "${@: -1}"\n')
    compiler.chmod(0o700)
    with pytest.raises(NativeUnavailable, match=r"fail their check on this processor .*0\.5"):
        check([str(compiler)], tmp_path)


def test_the_check_survives_instructions_that_the_processor_lacks(tmp_path: Path) -> None:
    missing = [name for name in KERNELS if not KERNELS[name].emulated and name not in usable_kernels(torch.bfloat16)]
    if not missing:
        pytest.skip("this processor has every kernel's instructions")
    with pytest.raises(NativeUnavailable, match="fail their check"):
        check(compile_command(["g++"], dataclasses.replace(SHAPE, dtype=torch.bfloat16), missing[0]), tmp_path)


@pytest.mark.parametrize(("error", "hint"), [(errno.EOPNOTSUPP, "Linux 5.16"), (errno.ENOSPC, "signal stack")])
def test_why_the_system_refuses_instructions(error: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = SimpleNamespace(prepare=lambda: error)
    monkeypatch.setattr(library, "find_or_compile", lambda *_: refusing)
    with pytest.raises(NativeUnavailable, match=hint):
        load_library(SHAPE, "avx2")


@pytest.fixture
def compiler_that_copies(monkeypatch: pytest.MonkeyPatch) -> Path:
    """To save time: what it makes is a library that was made before, which is returned."""
    made = Path(load_library(SHAPE, "avx2")._name)
    monkeypatch.setattr(compilation, "compile_to", lambda command, source, path: shutil.copy(made, path))
    return made


@pytest.mark.usefixtures("compiler_that_copies")
def test_a_check_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every model shape, once it has passed."""
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation.Kernel, "checked", True)
    checks = []
    monkeypatch.setattr(library, "check", lambda *_: checks.append(1))
    load_library(SHAPE, "avx2")
    assert checks
    monkeypatch.setattr(library, "check", lambda *_: pytest.fail("checked again"))
    load_library(dataclasses.replace(SHAPE, architecture=architecture("qwen3")), "avx2")
    with monkeypatch.context() as elsewhere:  # a home folder is shared with machines of another processor
        elsewhere.setattr(compilation, "processor_model", lambda: "another")
        with pytest.raises(pytest.fail.Exception, match="checked again"):
            load_library(SHAPE, "avx2")


@pytest.mark.parametrize("program", ["exit 1", "kill -ILL $$", "kill -KILL $$", "sleep 9"])
def test_a_check_that_fails_is_made_again(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation.Kernel, "checked", True)
    monkeypatch.setattr(library, "_CHECK_SECONDS", 0.5 if program == "sleep 9" else 60.0)

    def compiled(command: list[str], source: Path, path: Path) -> None:
        path.write_text(f"#!/bin/bash\nexec 2>&-\n{program}\n")
        path.chmod(0o700)

    monkeypatch.setattr(library, "compile_to", compiled)
    with pytest.raises(NativeUnavailable, match="took more than" if program == "sleep 9" else "fail their check"):
        load_library(SHAPE, "avx2")
    assert not list((tmp_path / "nemo_style_aligner" / "native").glob("check-*"))


def test_a_compilation_that_fails_says_nothing_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path))
    monkeypatch.setattr(compilation.Kernel, "checked", True)
    monkeypatch.setattr(compilation, "_COMPILE_SECONDS", 0.01)
    with pytest.raises(NativeUnavailable, match="took more than"):
        load_library(SHAPE, "avx2")
    monkeypatch.setattr(compilation, "_VERSION_SECONDS", 1e-6)
    with pytest.raises(NativeUnavailable, match="--version took more than"):
        load_library(SHAPE, "avx2")
    assert not list((tmp_path / "nemo_style_aligner" / "native").glob("check-*"))


CHANGES: list[dict[str, Any]] = [{}, {"dtype": torch.bfloat16}]


def test_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path))
    load_library(SHAPE, "avx2")
    (made,) = (tmp_path / "nemo_style_aligner" / "native").glob("*.so")
    written = made.stat().st_mtime_ns
    load_library(SHAPE, "avx2")
    load_library(dataclasses.replace(SHAPE, num_slots=9, num_pages=99), "avx2")
    assert list(made.parent.glob("*.so")) == [made] and made.stat().st_mtime_ns == written
    # This takes long enough once: the next compiler copies.
    monkeypatch.setattr(compilation, "compile_to", lambda command, source, path: shutil.copy(made, path))
    load_library(dataclasses.replace(SHAPE, architecture=architecture("nemotron")), "avx2")
    assert len(list(made.parent.glob("*.so"))) == 2
    shapes = [dataclasses.replace(SHAPE, **change) for change in CHANGES]
    assert len({tuple(compile_command(["g++"], shape, "avx2")) for shape in shapes}) == 2


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path))
    folder = tmp_path / "nemo_style_aligner" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(NativeUnavailable, match="is writable by others"):
        load_library(SHAPE, "avx2")


def test_a_cached_library_that_cannot_be_loaded_is_made_again(
    tmp_path: Path, compiler_that_copies: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Cut short."""
    made = compiler_that_copies
    folder = tmp_path / "nemo_style_aligner" / "native"
    folder.mkdir(parents=True, mode=0o700)
    (folder / made.name).write_bytes(made.read_bytes()[:100])
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path))
    load_library(SHAPE, "avx2")
    assert "compiling it again" in caplog.text and (folder / made.name).read_bytes() == made.read_bytes()
    caplog.clear()
    load_library(SHAPE, "avx2")
    assert not caplog.text


@pytest.mark.parametrize("trouble", ["noexec", "unloadable", "no locks", "read-only", "no home"])
def test_without_a_usable_cache_torch_does_it(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(f"{trouble} file system")

    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path))
    if trouble == "noexec":
        monkeypatch.setattr(compilation.os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
        monkeypatch.setattr(compilation, "compile_to", lambda *_: pytest.fail("compiled what cannot be loaded"))
    elif trouble == "unloadable":  # compiled, and refused by the loader
        monkeypatch.setattr(library, "check", lambda *_: None)
        monkeypatch.setattr(compilation, "compile_to", lambda command, source, path: path.write_bytes(b"\x7fELF"))
    elif trouble == "no locks":
        monkeypatch.setattr(compilation.fcntl, "flock", refuse)
    elif trouble == "no home":  # a container's user whom the password database does not know
        for name in ("NEMO_STYLE_ALIGNER_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
        monkeypatch.chdir(tmp_path)
    else:
        monkeypatch.setattr(compilation.tempfile, "mkstemp", refuse)
    assert isinstance(choose_step("auto", SHAPE, torch.device("cpu"), TrainerWeights()), TorchStep)
    assert "falls back" in caplog.text and "set NEMO_STYLE_ALIGNER_CACHE" in caplog.text
    assert len(caplog.records) == 1  # no other kernel is tried: the folder is the same
    assert trouble != "no home" or not list(tmp_path.iterdir())


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_torch_does_it(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NEMO_STYLE_ALIGNER_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    assert isinstance(choose_step("auto", SHAPE, torch.device("cpu"), TrainerWeights()), TorchStep)
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "generation falls back to the slower torch step"
    ]
    with pytest.raises(NativeUnavailable):
        choose_step("native", SHAPE, torch.device("cpu"), TrainerWeights())


def test_memory_comes_and_goes() -> None:
    step = native_step("llama", torch.float32, None)
    weights = weights_of(hf_model("llama"))
    step.weights.copy_from(weights.items())
    chunks = [(slot, 0, ids) for slot, ids in enumerate(prompts())]
    before = run(step, chunks)
    step.release()
    step.acquire()
    step.weights.copy_from(weights.items())
    assert torch.equal(run(step, chunks), before)


def test_memory_is_taken_as_it_is_touched() -> None:
    """KV memory may be larger than the machine's; what cannot even be mapped is an error that says what to change."""
    try:
        never_refused = Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        never_refused = False
    if never_refused:
        arena = Arena({"keys": ((2**40,), torch.uint8)})  # 1 TiB
        arena["keys"][2**39] = 7
        assert arena["keys"][2**39 - 1 : 2**39 + 2].tolist() == [0, 7, 0]
        arena.release()
        assert arena["keys"][2**39] == 0
    with pytest.raises(MemoryError, match="lower kv_cache_tokens"):
        Arena({"keys": ((2**60,), torch.uint8)})
