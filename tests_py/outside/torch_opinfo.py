# SPDX-License-Identifier: Apache-2.0
"""Samples of `scaled_dot_product_attention` with which torch tests its own operators.

Results must be close to the operator's by the tolerance of its entry, or closer to float64 than it;
kernels that round weights to bfloat16 may miss both, and must keep cpattn's own bounds.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from outside.dense import attend
from outside.suite import Case, InexpressibleError
from support.tolerances import assert_close, rounds_weights

NAME = "nn.functional.scaled_dot_product_attention"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def cases() -> Iterator[Case]:
    from torch.testing._internal.common_methods_invocations import op_db

    (operator,) = (entry for entry in op_db if entry.name == NAME)
    for dtype in DTYPES:
        torch.manual_seed(0)
        for number, sample in enumerate(operator.sample_inputs("cpu", dtype)):
            yield Case(f"{dtype}, sample {number}", partial(check, operator, sample))


def check(operator: Any, sample: Any) -> None:
    out = compute(sample.input, *sample.args, **sample.kwargs)
    expected = result_of(operator, sample)
    rtol, atol = tolerance(operator, out.dtype)
    try:
        torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
    except AssertionError:
        precise = sample.transform(as_float64)
        exact = result_of(operator, precise)
        ours, theirs = (float((x.double() - exact).abs().sum()) for x in (out, expected))
        if out.shape != expected.shape or out.dtype != expected.dtype:
            raise
        if not ours <= theirs:
            name = str(out.dtype).removeprefix("torch.")
            if not rounds_weights(name):
                raise
            keys, values = precise.args
            precise.args = (keys, values.abs())
            magnitude = result_of(operator, precise)
            assert_close(out, exact.numpy(), magnitude.numpy(), "attention", name)


def result_of(operator: Any, sample: Any) -> torch.Tensor:
    return operator.op(sample.input, *sample.args, **sample.kwargs)


def as_float64(x: Any) -> Any:
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


def tolerance(operator: Any, dtype: torch.dtype) -> tuple[float, float]:
    from torch.testing._comparison import default_tolerances

    for decorator in operator.decorators:
        for change in getattr(decorator, "decorators", ()):
            if dtype in getattr(change, "d", {}):  # the change is a toleranceOverride
                return change.d[dtype].rtol, change.d[dtype].atol
    return default_tolerances(dtype)


def compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> torch.Tensor:
    if dropout_p:
        raise InexpressibleError("dropout")
    if q.dtype == torch.float64:
        raise InexpressibleError("float64")
    rank = max(x.ndim for x in (q, k, v))
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (q, k, v)))
    q, k, v = (x.expand(*batch, *x.shape[-2:]) for x in (q, k, v))
    if rank == 3:  # there is no axis of heads
        q, k, v = (x[:, None] for x in (q, k, v))
    right = 0 if is_causal else None
    out = attend(q, k, v, first=[0] * q.shape[0], right=right, mask=attn_mask)
    return out[:, 0] if rank == 3 else out
