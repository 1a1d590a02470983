# SPDX-License-Identifier: Apache-2.0
"""Bounds of results are in tolerances.py alone, and for bench in accuracy.py."""

import ast
from collections.abc import Iterator

from support.places import ROOT

PLACES = [ROOT / "tests_py/support/tolerances.py", ROOT / "bench/harness/accuracy.py"]
FILES = sorted({*(ROOT / "tests_py").rglob("*.py"), *(ROOT / "bench").rglob("*.py")} - {*PLACES})

COMPARISONS = {"allclose", "approx", "assert_allclose", "assert_close", "isclose"}
KEYWORDS = {"abs", "abs_tol", "atol", "rel", "rel_tol", "rtol"}
POSITIONAL = {"allclose", "assert_allclose", "isclose"}  # they may take rtol and atol by position
LIBRARIES = {"testing", "np", "torch"}  # they have tolerances of their own
SPACINGS = {"EPS", "SPACINGS", "eps"}
LIMITS = ("allowed", "bound", "rounding", "tolerance", "tolerances")
SMALL = 0.02  # a number up to this is a tolerance where others are compared with it


def literal_tolerances(source: str) -> list[int]:
    return sorted({node.lineno for node in ast.walk(ast.parse(source)) if is_tolerance(node)})


def is_tolerance(node: ast.AST) -> bool:
    match node:
        case ast.Call():
            name = name_of(node.func)
            given = [word.value for word in node.keywords if word.arg in KEYWORDS]
            given += node.args[2:4] if name in POSITIONAL else []
            default = name_of(getattr(node.func, "value", node)) in LIBRARIES and len(given) < 2
            return name in COMPARISONS and (default or any(any(numbers(x)) for x in given))
        case ast.Compare():
            return any(is_small(x) or counts_spacings(x) for x in upper_limits(node))
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            is_limit = any(name_of(target).lower().endswith(LIMITS) for target in targets)
            return node.value is not None and (
                counts_spacings(node.value) or (is_limit and is_small(node.value))
            )
    return False


def upper_limits(node: ast.Compare) -> Iterator[ast.expr]:
    """Yield the larger side of `x <= limit` or `limit > x`."""
    sides = [node.left, *node.comparators]
    for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
        if isinstance(op, (ast.Lt, ast.LtE)):
            yield right
        elif isinstance(op, (ast.Gt, ast.GtE)):
            yield left


def numbers(node: ast.AST) -> Iterator[float]:
    """Yield the numbers of an expression: a power is one number, arguments of calls are none."""
    match node:
        case ast.Constant(value=bool()):
            return
        case ast.Constant(value=int() | float() as value):
            yield abs(float(value))
        case ast.BinOp(left=ast.Constant(value=base), op=ast.Pow(), right=power):
            yield from (base**exponent for exponent in signed(power))
        case ast.BinOp() | ast.UnaryOp() | ast.IfExp() | ast.Tuple() | ast.List() | ast.Dict():
            for child in ast.iter_child_nodes(node):
                yield from numbers(child)


def signed(node: ast.AST) -> Iterator[float]:
    match node:
        case ast.Constant(value=int() | float() as value):
            yield float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield from (-value for value in signed(operand))


def is_small(node: ast.AST) -> bool:
    return any(0 < number <= SMALL for number in numbers(node))


def counts_spacings(node: ast.AST) -> bool:
    """Return whether a number is multiplied by the spacing of a dtype, or stands beside it."""
    parts = [part for part in parts_of(node) if not isinstance(part, ast.Constant)]
    return any(numbers(node)) and any(name_of(part) in SPACINGS for part in parts)


def parts_of(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp):
        yield from parts_of(node.left)
        yield from parts_of(node.right)
    else:
        yield node


def name_of(node: ast.AST) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return str(getattr(node, "attr", getattr(node, "id", "")))


def test_no_tolerance_is_written_down_elsewhere():
    found = {str(path): literal_tolerances(path.read_text(encoding="utf-8")) for path in FILES}
    wrong = {path: lines for path, lines in found.items() if lines}
    assert not wrong, "give the numbers of these lines names and reasons, where PLACES says"


TOLERANCES = r"""
assert_close(x, y, rtol=0, atol=1e-5)
torch.testing.assert_close(x, y, rtol=0, atol=100 * EPS * y.abs().max())
assert x == pytest.approx(1.41, abs=0.005)
np.testing.assert_allclose(x, y, 1e-12)
torch.testing.assert_close(x, y)
torch.allclose(x, y, rtol=0)
assert (x - y).abs().max() < 1e-3
assert 0.001 >= error
assert torch.all(error <= 2.0**-20 * sizes)
assert torch.all(error <= 1.5 * EPS['bfloat16'] * magnitude)
LOGITS = 100 * EPS
bound = 64 * torch.finfo(x.dtype).eps
rounding = 1e-4 * scores.max()
TOLERANCES = {'ours': 1e-5, 'torch': 0.03}
"""
OTHERS = r"""
torch.testing.assert_close(x, y, rtol=0, atol=0)
assert_close(x, y, 1, 'attention', 'float32')
assert x == pytest.approx(3 * 0.2)
assert share > 2 * TOLERANCES[op, dtype] * EPS[dtype]
assert (wrong - whole).abs().max() > 0.01
assert error <= LIMIT * EPS[dtype]
rms_norm(x, eps=1e-6)
assert len(x) < 3
"""


def test_literal_tolerances_are_found_and_others_left_alone():
    assert literal_tolerances(TOLERANCES) == list(range(2, 1 + len(TOLERANCES.splitlines())))
    assert not literal_tolerances(OTHERS)
