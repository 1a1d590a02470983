# SPDX-License-Identifier: Apache-2.0
"""Documents ``cpattn-plan/1``: reading, and validation by the published schema."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from .. import strict_json
from ..findings import NotUsable

SCHEMA = "cpattn-plan/1"
MOST_TOKENS = 2**24  # of a part; more would take minutes and gigabytes
MOST_PARTS = 2**18  # nested objects and lists, which the schema checks one by one
_SCHEMA_FILE = Path(__file__).with_name("plan.schema.json")


def schema() -> dict[str, Any]:
    """Return the published JSON Schema of plans."""
    return json.loads(_SCHEMA_FILE.read_text(encoding="utf-8"))


def read(path: Path) -> dict[str, Any]:
    """Read a document from a file; `NotUsable` describes other contents."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotUsable(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise NotUsable(f"{path}: must be JSON in UTF-8, got other bytes") from None
    try:
        document = strict_json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotUsable(f"{path}: must be JSON: {error}") from None
    return validated(document, str(path))


def plain(value: Any) -> Any:
    """Convert a document made in Python to JSON types, from NumPy numbers and arrays and others."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        whole = set(map(type, value)) <= {int, float, str}
        return list(value) if whole else [plain(part) for part in value]
    return value


def validated(document: Any, name: str) -> dict[str, Any]:
    """Return a valid document; `NotUsable` names place, rule and value of a fault."""
    if not isinstance(document, Mapping):
        raise NotUsable(f"{name}: must be an object with schema {SCHEMA!r}")
    if document.get("schema") != SCHEMA:
        raise NotUsable(f"{name}: schema must be {SCHEMA!r}, got {_shown(document.get('schema'))}")
    if (parts := _count_parts(document)) > MOST_PARTS:
        raise NotUsable(f"{name}: must have at most {MOST_PARTS} objects and lists, got {parts}")
    try:
        error = next(iter(_validator().iter_errors(document)), None)
    except (RecursionError, ValueError):  # jsonschema shows its findings, of any depth
        raise NotUsable(
            f"{name}: must be of schema {SCHEMA!r}, got something too large to be shown"
        ) from None
    if error is not None:
        place = error.json_path.removeprefix("$").removeprefix(".") or "the document"
        place = "".join(c if c.isprintable() else repr(c)[1:-1] for c in place)
        raise NotUsable(f"{name}: {place}: {_rule(error)}")
    _check_columns(document, name)
    return dict(document)


def _count_parts(document: Mapping[str, Any]) -> int:
    """Count objects and lists at any depth, up to the limit."""
    left: list[Any] = [document]
    count = 0
    while left and count <= MOST_PARTS:
        value = left.pop()
        count += 1
        inner = list(value.values()) if isinstance(value, Mapping) else value
        if set(map(type, inner)) & {dict, list}:
            left += (one for one in inner if isinstance(one, (Mapping, list)))
            count += len(left) if len(left) > MOST_PARTS else 0
    return count


@cache
def _validator() -> Any:
    """Return a validator that checks long lists of numbers as a whole."""
    from jsonschema import Draft202012Validator, ValidationError, validators

    slowly = Draft202012Validator.VALIDATORS["items"]

    def items(validator: Any, rule: Any, instance: Any, schema: Any) -> Any:
        if isinstance(instance, list) and instance:
            if rule == {"type": "number"} and all(number(None, one) for one in instance):
                return
            if (
                rule.get("type") == "integer"
                and set(map(type, instance)) == {int}
                and rule["minimum"] <= min(instance)
                and max(instance) <= rule["maximum"]
            ):
                return
        yield from slowly(validator, rule, instance, schema)

    def integer(_: Any, instance: Any) -> bool:
        return type(instance) is int

    def number(_: Any, instance: Any) -> bool:
        if type(instance) is int:
            return abs(instance) <= sys.float_info.max
        return type(instance) is float and math.isfinite(instance)

    def printable(_: Any, instance: Any) -> bool:
        return isinstance(instance, str) and instance.isprintable()

    def at_least(_: Any, bound: int, instance: Any, __: Any) -> Iterator[Any]:
        if type(instance) in (int, float) and instance < bound:
            yield ValidationError("too small")

    def at_most(_: Any, bound: int, instance: Any, __: Any) -> Iterator[Any]:
        if type(instance) in (int, float) and instance > bound:
            yield ValidationError("too large")

    kinds = {"integer": integer, "number": number, "string": printable}
    types = Draft202012Validator.TYPE_CHECKER.redefine_many(kinds)
    # jsonschema cannot compare integers beyond float64 with bounds, so there are none here.
    rules = {"items": items, "minimum": at_least, "maximum": at_most}
    kind = validators.extend(Draft202012Validator, rules, type_checker=types)
    return kind(schema())


def _rule(error: Any) -> str:
    """Describe the rule of the schema, and the value."""
    got = _shown(error.instance)
    match error.validator:
        case "type":
            wanted = error.validator_value
            wanted = " or ".join(wanted) if isinstance(wanted, list) else wanted
            if wanted == "string" and isinstance(error.instance, str):
                return f"must be printable, got {got}"
            return f"must be of type {wanted}, got {got}"
        case "minimum":
            return f"must be at least {error.validator_value}, got {got}"
        case "maximum":
            return f"must be at most {error.validator_value}, got {got}"
        case "minItems" | "maxItems":
            bound = "at least" if error.validator == "minItems" else "at most"
            return f"must have {bound} {error.validator_value} entries, got {len(error.instance)}"
        case "enum":
            return f"must be one of {', '.join(map(str, error.validator_value))}, got {got}"
        case "required":
            unknown = sorted({*error.instance} - {*error.schema["properties"]})
            hint = f"; unknown: {', '.join(map(_shown, unknown[:3]))}" if unknown else ""
            return f"{error.message}{hint}"
    return str(error.message) if len(error.message) < 200 else f"{error.message[:200]}..."


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # deeply nested lists, or thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


#: Parts made of columns, in a rank and in the document.
_OF_RANKS = ("rows", "positions", "segments", "writes", "selections", "units")


def _check_columns(document: Mapping[str, Any], name: str) -> None:
    """Check that columns of a part are equally long, which no schema can express."""
    parts = [("restore", document.get("restore", {}))]
    for number, rank in enumerate(document.get("ranks", ())):
        parts += [(f"ranks[{number}].{part}", rank.get(part, {})) for part in _OF_RANKS]
    for number, transfer in enumerate(document.get("transfers", ())):
        blocks = {key: transfer[key] for key in ("src", "dst", "length")}
        pages = {key: transfer[key] for key in ("src_pages", "dst_pages")}
        parts += [(f"transfers[{number}]", blocks), (f"transfers[{number}]", pages)]
    for place, columns in parts:
        lengths = {key: len(values) for key, values in columns.items()}
        if len(set(lengths.values())) > 1:
            counts = ", ".join(f"{key} {count}" for key, count in lengths.items())
            raise NotUsable(f"{name}: {place}: columns must have equal lengths, got {counts}")
        _check_sum(f"{name}: {place}.count", columns.get("count", ()))
    requests = document.get("requests", ())
    _check_sum(f"{name}: requests", [request["extend"] for request in requests])


def _check_sum(place: str, counts: Iterable[int]) -> None:
    """Check that counts are small enough for arrays of all counted things."""
    if (total := sum(counts)) > MOST_TOKENS:
        raise NotUsable(f"{place}: must be at most {MOST_TOKENS} together, got {total}")
