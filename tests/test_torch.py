"""The way to torch and back, by integer views where NumPy and torch do not know each other's types: never a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from strategies import NAMED
from support import POOL, Array, worked

import hurray_wire as hw

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", [d for d in NAMED if d.name not in ("uint16", "uint32", "uint64")], ids=str)
def test_torch_both_ways_without_a_copy(dtype: hw.Dtype) -> None:
    assert dtype.numpy is not None
    bits: Array = np.arange(320 * dtype.bit_width // 8, dtype=np.uint8)
    array = bits.view(dtype.numpy).reshape(5, 4, 2, 8)
    tensor = hw.to_torch(array)
    assert hw.Dtype.of(tensor.dtype) is dtype
    assert tensor.shape == array.shape
    assert tensor.data_ptr() == array.ctypes.data
    back = hw.from_torch(tensor)
    assert (back.dtype, back.tobytes()) == (array.dtype, array.tobytes())
    assert np.shares_memory(back, array)
    strided = hw.from_torch(tensor.permute(0, 2, 1, 3)[::2])
    assert np.shares_memory(strided, array)
    assert strided.tobytes() == array.transpose(0, 2, 1, 3)[::2].tobytes()
    assert worked(page_pool=tensor) == worked(page_pool=array)
    assert np.shares_memory(worked(page_pool=tensor).page_pool, array)
    assert worked(block_table=torch.tensor([0, 1, 0]), seq_ptr=torch.tensor([0, 2, 3], dtype=torch.int32)) == worked()


def test_torch_refusals() -> None:
    for name in ("float8_e4m3fnuz", "float8_e5m2fnuz"):
        for make in (hw.from_torch, lambda tensor: worked(page_pool=tensor)):
            with pytest.raises(hw.UnsupportedError) as caught:
                make(torch.zeros((5, 4, 2, 8), dtype=getattr(torch, name)))
            assert caught.value.code == "dtype"
    wrong: list[Any] = [POOL, None, [1.0]]
    for other in wrong:
        with pytest.raises(TypeError):
            hw.from_torch(other)
    assert hw.from_torch(torch.ones(2, dtype=torch.bfloat16, requires_grad=True)).tolist() == [1, 1]


def test_a_torch_tensor_on_a_device_is_told_what_to_do() -> None:
    on_device = torch.zeros((5, 4, 2, 8), dtype=torch.bfloat16, device="meta")
    for make in (lambda: worked(page_pool=on_device), lambda: hw.from_torch(on_device)):
        with pytest.raises(TypeError, match=r"\.cpu\(\)"):
            make()
