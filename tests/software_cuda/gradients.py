"""Run with the software devices: gradients of weights in bf16, by torch versions that add them in one call and others.

Prints ``added`` at the end.
"""

from typing import Any

import pytest
import software_tensors
import torch
from software_tensors import aten

from nemo_style_aligner.trainer.models import products


def add() -> tuple[torch.Tensor, torch.Tensor]:
    """A sum after a product was added to it, and what it should be."""
    draw = torch.Generator().manual_seed(1)
    total, columns, rows = (torch.randn(*shape, generator=draw) for shape in ((20, 6), (9, 20), (9, 6)))
    expected = total + columns.bfloat16().float().t() @ rows.bfloat16().float()
    on_device = total.cuda()
    products.add_product(on_device, columns.bfloat16().cuda(), rows.bfloat16().cuda())
    return on_device.cpu(), expected


def refuse(*_: Any, **__: Any) -> torch.Tensor:
    """As torch 2.9."""
    raise RuntimeError("self and mat2 must have the same dtype, but got Float and BFloat16")


assert products._adds_in_one_call()
torch.testing.assert_close(*add())

products._adds_in_one_call.cache_clear()
with pytest.MonkeyPatch.context() as patch:
    patch.setitem(software_tensors._OF_GPUS_ALONE, aten.addmm.dtype_out, refuse)
    patch.setattr(products, "_ELEMENTS_ADDED_ON_GPU", 6 * 7)
    assert not products._adds_in_one_call()
    torch.testing.assert_close(*add())
print("added")
