"""Products of matrices by both libraries, against exact ones."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import threadpoolctl
import torch

from nemo_style_aligner.trainer.models import products

LIBRARIES = pytest.mark.parametrize("openblas", [False, True], ids=["torch", "openblas"])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@LIBRARIES
@pytest.mark.parametrize("m, k, n", [(700, 48, 520), (300, 64, 1100), (1, 40, 30), (3, 1, 5), (0, 8, 4)])
def test_products_are_exact(
    openblas: bool, threads: int, m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all ways in which the factors may lie, in parts and whole, into given memory and added to it."""
    monkeypatch.setattr(products, "_prefers_openblas", lambda: openblas)
    monkeypatch.setattr(products, "_ELEMENTS_ADDED", 50 * max(n, 1))
    plain = random(m, k), random(k, n)
    transposed = tuple(x.t().contiguous().t() for x in plain)
    strided = random(m, 2 * k)[:, ::2], random(2 * k, 3 * n)[::2, ::3]
    sliced = random(m, k + 5)[:, 2 : k + 2], random(n + 7, k)[3 : n + 3].t()
    for a, b in (plain, transposed, strided, sliced, (plain[0][:1].expand(m, k), plain[1])):
        exact = a.double() @ b.double()
        found = products.product(a, b)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, exact.float(), atol=1e-6 * k, rtol=1e-5)
        memory = random(m + 1, n)
        before = memory[m].clone()
        assert products.product(a, b, out=memory[:m]) is not None
        assert torch.equal(memory[:m], found) and torch.equal(memory[m], before)
        total = random(m, n)
        expected = total.double() + exact
        products.add_product(total, a.t(), b)
        torch.testing.assert_close(total, expected.float(), atol=1e-6 * k, rtol=1e-5)
    rows = random(2, 5, k).requires_grad_()
    torch.testing.assert_close(products.product(rows, plain[1]), (rows.detach() @ plain[1]), atol=1e-6 * k, rtol=1e-5)


@LIBRARIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_one_product(openblas: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows [s, 1, k] whose second stride means nothing, matmul makes s products, in bf16 each with a copy of b."""
    monkeypatch.setattr(products, "_prefers_openblas", lambda: openblas)
    rows, weight = random(1, 60, 40).to(dtype).transpose(0, 1), random(30, 40).to(dtype)
    assert rows.is_contiguous() and rows.stride(1) != 40
    with torch.profiler.profile() as profile:
        found = products.product(rows, weight.t())
    torch.testing.assert_close(found, rows.contiguous() @ weight.t())
    assert found._base is None, "a pipeline stage's output must not be a view"
    assert "aten::bmm" not in {event.name for event in profile.events()}


@LIBRARIES
def test_storages_can_be_resized_afterwards(openblas: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `offload` and `swap` do with weights and gradients."""
    monkeypatch.setattr(products, "_prefers_openblas", lambda: openblas)
    weight, total, out = random(30, 40), torch.zeros(20, 40), torch.empty(20, 40)
    products.product(random(20, 30), weight, out=out)
    products.add_product(total, random(30, 20), weight)
    torch.testing.assert_close(total, random(30, 20).t() @ weight)
    for tensor in (weight, total, out):
        tensor.untyped_storage().resize_(0)


def test_openblas_gives_the_same_bits_again(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread computes which part."""
    monkeypatch.setattr(products, "_prefers_openblas", lambda: True)
    a, b = random(900, 130), random(130, 1000)
    first = products.product(a, b)
    assert all(torch.equal(products.product(a, b), first) for _ in range(20))


def test_errors_of_threads_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_prefers_openblas", lambda: True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(ValueError, match="mismatch"):
        products.product(random(1000, 130), random(131, 1000))


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_who_computes(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS on AMD's processors, in one thread then; bf16 and other devices stay torch's."""
    monkeypatch.setattr(products, "processor_model", lambda: f"vendor_id\t: {vendor}")
    products._prefers_openblas.cache_clear()
    x = torch.ones(2, 2)
    found = threadpoolctl.ThreadpoolController().select(internal_api="openblas").info()
    try:
        has_both = torch.backends.mkl.is_available() and bool(found)
        assert products._go_to_openblas(x, x) == (vendor == "AuthenticAMD" and has_both)
        with monkeypatch.context() as many:
            many.setattr(torch, "get_num_threads", lambda: 64)
            assert not products._go_to_openblas(x, x)
        assert not products._go_to_openblas(x.bfloat16(), x.bfloat16())
        assert not products._go_to_openblas(x.to("meta"), x.to("meta"))
        if products._prefers_openblas():
            limited = threadpoolctl.ThreadpoolController().select(internal_api="openblas").info()
            assert {library["num_threads"] for library in limited} == {1}
    finally:
        products._prefers_openblas.cache_clear()


@pytest.mark.long
def test_helpers_leave_the_core_that_openmp_gives_the_first_thread() -> None:
    """With OMP_PROC_BIND a process's first thread has one core, which threads inherit."""
    code = """
import os, torch
os.sched_setaffinity(0, range(os.cpu_count()))  # those that this process may have, however few it was given
cores = os.sched_getaffinity(0)
os.sched_setaffinity(0, {min(cores)})
from nemo_style_aligner.trainer.models import products
print(len(cores), len(products._helpers(1).submit(os.sched_getaffinity, 0).result()))
"""
    binding = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
    plain = {name: value for name, value in os.environ.items() if name not in binding}
    for bound in ("true", ""):
        environment = plain | ({"OMP_PROC_BIND": bound} if bound else {})
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
        assert out.returncode == 0, out.stderr
        cores, of_helper = map(int, out.stdout.split()[-2:])
        assert of_helper == (cores if bound else 1)
