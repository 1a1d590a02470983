# SPDX-License-Identifier: Apache-2.0
"""The C header has Python's functions and options, with equal defaults; the library has no more."""

import ctypes
import inspect
import re

import pytest

import cpattn
from support.c import cases
from support.c import library as c_library
from support.c.library import FUNCTIONS, STRUCTS, defaults
from support.tolerances import STORED_DIGITS

#: Options of Python without a field of their name.
NOT_IN_C = {
    "window": "window_left and window_right, which need no pair",
    "return_lse": "lse is returned where it is given",
    "plan": "a handle, which is an argument",
    "layout": "one buffer of it, and what says where it stands in the model",
    "peer": "a sender digests what it sends",
}
#: Fields without an option of their name.
ONLY_IN_C = {
    "struct_size": "says which version of the header the caller has",
    "window_left": "of `window`",
    "window_right": "of `window`",
    "causal_of_each": "`causal` as bools",
    "bias_of_each": "`bias` as a list",
    "num_bias_of_each": "its length",
    "q_rope": "an argument of do_cp_attn_fia in Python",
    "k_rope": "an argument of do_cp_attn_fia in Python",
    **dict.fromkeys(
        ("tensor", "layer_id", "kind", "kv_layout", "is_draft"), "arguments of KVEntry.from_tensor"
    ),
    **dict.fromkeys(
        (
            "tp_rank",
            "tp_size",
            "total_kv_heads",
            "dcp_rank",
            "dcp_size",
            "dcp_interleave",
            "shard_rank",
            "shard_size",
        ),
        "arguments of KVLayout",
    ),
}
#: Structs with the options of a Python function, and fields for its results.
FACES = [
    (cpattn.paged_attention, ("batch", "layer"), ()),
    (cpattn.plan_attention, ("batch", "attention_shape"), ()),
    (cpattn.run_attention, ("layer",), ()),
    (cpattn.kv.write_pages, ("page_writes",), ()),
    (cpattn.build_cp_metadata, ("cp_batch",), ()),
    (cpattn.sparse.topk_transform, ("topk_options",), ("out",)),
    (cpattn.transfer.digest, ("kv_digest",), ()),
]


def value_in_c(value):
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize(
    ("function", "structs", "results"), FACES, ids=lambda x: getattr(x, "__name__", "")
)
def test_options_have_fields_of_their_names_with_their_defaults(function, structs, results):
    filled = [defaults(struct) for struct in structs]
    fields = {name: getattr(x, name) for x in filled for name, _ in type(x)._fields_}
    parameters = inspect.signature(function).parameters
    assert set(parameters) - set(fields) <= set(NOT_IN_C)
    for name in parameters.keys() & fields.keys():
        default = parameters[name].default
        if default is None or default is inspect.Parameter.empty:
            assert fields[name] in (None, -1, 0), name
        else:
            assert fields[name] == value_in_c(default), name
    if function is not cpattn.plan_attention and function is not cpattn.run_attention:
        assert set(fields) - set(parameters) - set(results) <= set(ONLY_IN_C)


def test_a_struct_of_another_size_is_refused():
    for name in (x for x in STRUCTS if f"{x}_init" in FUNCTIONS):
        struct = STRUCTS[name]()
        for size in (0, 8, ctypes.sizeof(struct) + 8):
            with pytest.raises(c_library.CallFailed, match="struct_size from"):
                c_library.call(
                    f"{name.removeprefix('cpattn_')}_init",
                    ctypes.byref(struct),
                    ctypes.c_size_t(size),
                )


def test_the_library_exports_what_the_header_declares(children):
    """The list in the tree has them, too, so that a removed symbol is noticed."""
    library = c_library.build_folder() / "libcpattn.so"
    listed = re.findall(r"^    (cpattn_\w+);", (c_library.FOLDER / "cpattn.map").read_text(), re.M)
    assert sorted(listed) == FUNCTIONS
    done = children.run(["nm", "-D", "--defined-only", "--with-symbol-versions", library])
    exported = {line.split()[-1] for line in done.stdout.splitlines()}
    assert exported == {"CPATTN_0.1", *(f"{name}@@CPATTN_0.1" for name in listed)}


def test_versions_agree():
    text = c_library.HEADER.read_text()
    numbers = re.findall(r"^#define CPATTN_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text, re.M)
    assert ".".join(numbers) == cpattn.__version__
    assert c_library.load().cpattn_version().decode() == cpattn.__version__


def test_stored_results_are_those_of_the_oracle():
    """The oracle's last digits may differ between processors."""
    number = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")
    stored, made = cases.HEADER.read_text(), cases.header()
    assert number.sub("#", stored) == number.sub("#", made)
    for old, new in zip(number.findall(stored), number.findall(made), strict=True):
        assert abs(float(old) - float(new)) <= STORED_DIGITS * max(1, abs(float(new)))
