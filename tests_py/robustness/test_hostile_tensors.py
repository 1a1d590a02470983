# SPDX-License-Identifier: Apache-2.0
"""Tensors that are not what they seem are refused; lists may change while they are read."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import cpattn
from cpattn.sparse import sglang_0_5_23
from support.api.hostile_values import Index

PyCapsule_New = ctypes.pythonapi.PyCapsule_New
PyCapsule_New.restype = ctypes.py_object
PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class DLTensor(ctypes.Structure):
    _fields_ = [
        *[("data", ctypes.c_void_p), ("device_type", ctypes.c_int32)],
        *[("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8)],
        *[("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)],
        *[("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64))],
        *[("byte_offset", ctypes.c_uint64)],
    ]


class DLManagedTensor(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Exported:
    """A DLPack capsule of sixteen floats in a row, with some fields of its description changed."""

    def __init__(
        self, shape: tuple[int, ...] | None = (1, 16), strides: Any = None, **fields: Any
    ) -> None:
        self.memory = (ctypes.c_float * 16)(*[1.0] * 16)
        self.shape_values = (ctypes.c_int64 * 2000)(*(shape or (1, 16)))
        self.managed = DLManagedTensor()
        tensor = self.managed.tensor
        tensor.data = ctypes.addressof(self.memory)
        tensor.device_type = 1
        tensor.ndim = len(shape or (1, 16))
        tensor.code, tensor.bits, tensor.lanes = 2, 32, 1
        if shape is not None:
            tensor.shape = self.shape_values
        if strides is not None:
            tensor.strides = (ctypes.c_int64 * len(strides))(*strides)
        for name, value in fields.items():
            setattr(tensor, name, value)

    def __dlpack__(self, **options: Any) -> Any:
        return PyCapsule_New(ctypes.addressof(self.managed), b"dltensor", None)


def transformed(x: Any) -> Any:
    return cpattn.sparse.hadamard_transform(x)


def test_a_well_described_tensor_is_read():
    assert transformed(Exported()).tolist() == transformed(np.ones((1, 16), np.float32)).tolist()


@pytest.mark.parametrize(
    ("tensor", "error", "message"),
    [
        (Exported((-1, 16)), TypeError, "invalid DLPack description"),
        (Exported((2**40, 2**40)), TypeError, "invalid DLPack description"),
        (Exported((2, 16), strides=(2**62, 1)), TypeError, "invalid DLPack description"),
        (Exported(None), TypeError, "invalid DLPack description"),
        (Exported(ndim=-5), TypeError, "invalid DLPack description"),
        (Exported(ndim=1000), ValueError, "has 1000 dimensions, at most 6 are supported"),
        (Exported(byte_offset=2**64 - 64), TypeError, "invalid DLPack description"),
        (Exported(byte_offset=2), ValueError, "is not aligned to its element size"),
        (Exported(data=None), TypeError, "has no storage, it is a Exported that only stands for"),
        (Exported((2, 16), strides=(-16, 1)), ValueError, r"has a negative stride \(-16 elements"),
        (Exported(lanes=4), TypeError, r"has an unsupported dtype \(float32 x 4\)"),
        (Exported(code=200), TypeError, r"has an unsupported dtype \(DLPack code 200, bits 32\)"),
        (Exported(code=6), TypeError, r"has an unsupported dtype"),
        (Exported(device_type=2), TypeError, r"must be on the CPU, got one on CUDA; pass x.cpu()"),
        (Exported(device_type=77), TypeError, "must be on the CPU, got one on DLPack device type"),
    ],
)
def test_descriptions_that_cannot_be_true(tensor, error, message):
    with pytest.raises(error, match=f"^hadamard_transform: x .*{message}|^hadamard.*{message}"):
        transformed(tensor)


def raising(error: BaseException) -> Callable[..., Any]:
    def method(*args: Any, **options: Any) -> Any:
        raise error

    return method


def used_capsule(*args: Any, **options: Any) -> Any:
    capsule = torch.ones(2, 16).__dlpack__()
    torch.from_dlpack(type("Owner", (), {"__dlpack__": lambda self, **options: capsule,
                                         "__dlpack_device__": lambda self: (1, 0)})())  # fmt: skip
    return capsule


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (raising(RuntimeError("no")), "got Strange whose __dlpack__ fails"),
        (lambda self: 7, "whose __dlpack__ returns no capsule named dltensor"),
        (lambda self: None, "whose __dlpack__ returns no capsule named dltensor"),
        (lambda self: PyCapsule_New(64, b"another", None), "returns no capsule named dltensor"),
        (lambda self: PyCapsule_New(64, None, None), "returns no capsule named dltensor"),
        (used_capsule, "returns no capsule named dltensor that is yet to be used"),
        (property(raising(RuntimeError("no"))), "got Strange whose __dlpack__ fails"),
        (property(raising(AttributeError("no"))), "must be a tensor .*, got Strange"),
        (3, "got Strange whose __dlpack__ fails"),
    ],
)
def test_methods_that_export_nothing(method, message):
    strange = type("Strange", (), {"__dlpack__": method})()
    with pytest.raises(TypeError, match=f"^hadamard_transform: x .*{message}"):
        transformed(strange)


def test_interrupts_and_lack_of_memory_are_not_types():
    for error in (KeyboardInterrupt(), MemoryError("no")):
        strange = type("Strange", (), {"__dlpack__": raising(error), "__index__": raising(error)})()
        with pytest.raises(type(error)):
            transformed(strange)
        with pytest.raises(type(error)):
            sglang_0_5_23.fast_topk(np.ones((1, 8), np.float32), [8], strange)


def test_the_error_of_an_argument_is_the_cause():
    strange = type("Strange", (), {"__dlpack__": raising(RuntimeError("its own"))})()
    with pytest.raises(TypeError) as raised:
        transformed(strange)
    assert isinstance(raised.value.__cause__, RuntimeError)


KINDS = {
    "gradient": (torch.Tensor.requires_grad_, "requires a gradient"),
    "meta": (lambda x: x.to("meta"), "must be on the CPU, got one on meta, which has no elements"),
    "sparse": (torch.Tensor.to_sparse, "must be dense, got torch.sparse_coo; pass x.to_dense"),
    "nested": (lambda x: torch.nested.nested_tensor([x, x[:1]]), "is a nested .*one plain tensor"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
        "is a nested tensor; pass the rows of all its parts as one plain tensor",
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "is quantized; pass x.dequantize",
    ),
    "uint16": (lambda x: x.bfloat16().view(torch.uint16), "has an .*of bfloat16, pass a view"),
    "negated": (lambda x: torch.complex(x, x).conj().imag, "is a negated view; pass x.resolve_neg"),
    "float64": (torch.Tensor.double, "must be float32, float16 or bfloat16, got float64"),
    "masked": (lambda x: np.ma.array(x.numpy(), mask=True), "is a masked .*one, such as x.filled"),
    "memoryview": (lambda x: memoryview(x.numpy()), "got memoryview, which numpy.asarray makes"),
    "uint16 of NumPy": (lambda x: x.numpy().view(np.uint16), r"has an .*bfloat16, pass a view\(ml"),
    "big-endian": (lambda x: x.numpy().astype(">f4"), r"is not in .*order; pass x.astype\(x.dtype"),
    "reversed": (lambda x: x.numpy()[::-1], "has a negative .*pass numpy.ascontiguousarray"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch warns of nested and quantised tensors
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_other_kinds(kind):
    make, message = KINDS[kind]
    with pytest.raises((TypeError, ValueError), match=f"^hadamard_transform: x .*{message}"):
        transformed(make(torch.ones(2, 16)))


class BeforeTorch210:
    """A tensor of a torch without the exchange API, which exports negated views as they are."""

    requires_grad = False

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.is_neg = tensor.is_neg

    def __dlpack__(self) -> Any:
        return self._tensor.resolve_neg().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_negated_views_of_any_torch_are_refused():
    ones = torch.ones(2, 16)
    assert transformed(BeforeTorch210(ones)).tolist() == transformed(ones).tolist()
    with pytest.raises(TypeError, match=r"^hadamard_transform: x is a negated view; pass x\."):
        transformed(BeforeTorch210(torch.complex(ones, ones).conj().imag))


def test_masked_arrays_are_refused_as_indices():
    for lens in (np.ma.array([4, 4], mask=[False, True]), [np.ma.masked, 4]):
        with pytest.raises(TypeError, match=r"^build_cp_metadata: extend_lens "):
            cpattn.build_cp_metadata(lens, cp_rank=0, cp_size=2)
    with pytest.raises(TypeError, match=r"^page_table_to_topk: page_table is a masked array"):
        sglang_0_5_23.page_table_to_topk(np.ma.zeros((1, 4), np.int32), [3], 2)


def test_a_list_is_read_as_it_was_when_its_first_number_was_read():
    lens: list[Any] = [5, Index(6, lambda: lens.clear())]
    lens += [10**6 + i for i in range(1000)]  # clear() frees these objects
    wanted = [5, 6, *lens[2:]]
    metadata = cpattn.build_cp_metadata(lens, cp_rank=0, cp_size=1)
    assert lens == []
    assert metadata.actual_seq_q_prev_list == [(length + 1) // 2 for length in wanted]


def test_a_table_that_changes_while_it_is_read():
    table: list[Any] = [[2, Index(0, lambda: table.clear())], [1, 3]]
    plan = cpattn.plan_attention(
        q_lens=[3, 3], kv_lens=[10, 10], block_tables=table, page_size=8, num_pages=4, num_heads=2,
        num_kv_heads=1, head_dim=16,
    )  # fmt: skip
    assert plan.page_ids.tolist() == [2, 0, 1, 3]
    grown: list[Any] = []
    grown.append([Index(0, lambda: grown.append([0]))])
    with pytest.raises(ValueError, match=r"^plan_attention: block_tables must have one row"):
        cpattn.plan_attention(
            q_lens=[1, 1], kv_lens=[1, 1], block_tables=grown, page_size=8, num_pages=4,
            num_heads=2, num_kv_heads=1, head_dim=16,
        )  # fmt: skip
