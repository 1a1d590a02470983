# SPDX-License-Identifier: Apache-2.0
"""What may be changed in a source: one operator, constant, bound or statement at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tree_sitter_cpp
import tree_sitter_python
from tree_sitter import Language, Node, Parser

_LANGUAGES = {
    ".cc": Language(tree_sitter_cpp.language()),
    ".py": Language(tree_sitter_python.language()),
}

# The bound moves by one, or the comparison is the opposite.
_BINARY = {
    "<": ("<=", ">="),
    "<=": ("<", ">"),
    ">": (">=", "<="),
    ">=": (">", "<"),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "/": ("*",),
    "//": ("*",),
    "%": ("*",),
    "<<": (">>",),
    ">>": ("<<",),
    "&": ("|",),
    "|": ("&",),
    "&&": ("||",),
    "||": ("&&",),
    "and": ("or",),
    "or": ("and",),
    "in": ("not in",),
    "not in": ("in",),
    "is": ("is not",),
    "is not": ("is",),
    "+=": ("-=",),
    "-=": ("+=",),
    "*=": ("+=",),
    "/=": ("*=",),
    "++": ("--",),
    "--": ("++",),
}
_OPERATIONS = {
    *("binary_expression", "update_expression"),  # C++
    *("binary_operator", "boolean_operator", "comparison_operator"),  # Python
}
_WORDS = {
    "true": "false",
    "false": "true",
    "True": "False",
    "False": "True",
    "std::min": "std::max",
    "std::max": "std::min",
    "min": "max",
    "max": "min",
}
_FUNCTIONS = {"function_definition"}
# What the compiler, or the import of a module, evaluates: a switch while tests run is too late.
_CONSTANT = {
    *("template_argument_list", "static_assert_declaration", "enumerator", "type_descriptor"),
    *("parameters", "decorator", "type", "string_literal", "array_declarator"),
}


@dataclass(frozen=True)
class Mutant:
    """One change. What names it for good does not depend on its place in the file."""

    path: str
    function: str
    line: str
    """The line of the source where it begins, without a comment behind it."""
    original: str
    mutated: str
    nth: int
    """Which one, from 1, of those that agree in all this."""
    begin: int
    end: int
    line_number: int
    column: int
    is_statement: bool

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        return self.path, self.function, self.line, self.original, self.mutated, self.nth


def text_of(node: Node) -> str:
    assert node.text is not None
    return node.text.decode()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _replaced(node: Node, part: Node, text: str) -> str:
    """The text of `node` with another one for a part of it."""
    source = node.text
    assert source is not None
    before = source[: part.start_byte - node.start_byte]
    return (before + text.encode() + source[part.end_byte - node.start_byte :]).decode()


def _function_name(node: Node) -> str:
    """Classes and functions around, from the outside; lambdas have no name."""
    names: list[str] = []
    at: Node | None = node
    while at is not None:
        name = at.child_by_field_name("name")
        if at.type in {"class_definition", "class_specifier", "struct_specifier"} and name:
            names.append(text_of(name))
        elif at.type in _FUNCTIONS:
            if name is None:  # C++
                name = at.child_by_field_name("declarator")
                while name is not None and (inner := name.child_by_field_name("declarator")):
                    name = inner
                while name is not None and name.type == "reference_declarator":
                    name = name.named_children[0].child_by_field_name("declarator")
            names.append(text_of(name) if name is not None else "?")
        at = at.parent
    return ".".join(reversed(names))


def _is_constant(node: Node) -> bool:
    if node.type in _CONSTANT:
        return True
    if node.type == "keyword_argument":  # zip(strict=...) asserts what holds anyway
        return text_of(node).startswith("strict=")
    if node.type == "expression_statement":  # only how soon memory is there
        return ".reserve(" in text_of(node)
    if node.type == "declaration":
        return any(text_of(c) == "constexpr" for c in node.children if "qualifier" in c.type)
    return False


def _operators(node: Node) -> Iterator[Node]:
    for child in node.children:
        if not child.is_named or child.type in {"not in", "is not"}:
            yield child


def _changes(node: Node) -> Iterator[str]:
    """Other texts for an expression."""
    kind = node.type
    if kind in _OPERATIONS:
        for operator in _operators(node):
            for other in _BINARY.get(text_of(operator), ()):
                yield _replaced(node, operator, other)
    elif kind == "assignment_expression":
        operator = node.child_by_field_name("operator")
        for other in _BINARY.get(text_of(operator), ()) if operator else ():
            yield _replaced(node, operator, other)
    elif kind in {"integer", "number_literal"} and not any(c in text_of(node) for c in ".eEjf"):
        yield f"{text_of(node)} + 1"
        yield f"{text_of(node)} - 1"
    elif kind in {"true", "false"}:
        yield _WORDS[text_of(node)]
    elif kind == "unary_expression" and text_of(node)[0] == "!":
        yield f"!{text_of(node)}"
    elif kind == "unary_expression" and text_of(node)[0] == "-":
        yield text_of(node)[1:]
    elif kind in {"unary_operator", "not_operator"} and text_of(node)[0] in "-n":
        yield text_of(node.named_children[-1])
    elif kind in {"call_expression", "call"}:
        function = node.child_by_field_name("function")
        base = function
        if base is not None and base.type == "qualified_identifier":
            inner = base.child_by_field_name("name")
            if inner is not None and inner.type == "template_function":
                base = inner.child_by_field_name("name")
        if function is not None and base is not None:
            name = text_of(function).split("<")[0]
            if name in _WORDS:
                other = _WORDS[name].rpartition(":")[2]
                old = base if ":" not in text_of(base) else base.child_by_field_name("name")
                yield _replaced(node, old, other)
    parent = node.parent
    if parent is not None and _is_condition(node, parent) and kind not in _OPERATIONS:
        yield f"!({text_of(node)})" if _is_cpp(parent) else f"not ({text_of(node)})"


def _is_cpp(parent: Node) -> bool:
    return parent.type in {"condition_clause", "conditional_expression"} and (
        parent.type == "condition_clause" or parent.child_by_field_name("condition") is not None
    )


def _is_condition(node: Node, parent: Node) -> bool:
    if parent.type == "condition_clause":
        return node.is_named and node.type not in {"declaration", "init_statement"}
    if parent.type in {"if_statement", "while_statement", "elif_clause", "conditional_expression"}:
        return parent.child_by_field_name("condition") == node and node.type != "condition_clause"
    return False


def _removed(node: Node) -> str | None:
    """The text in place of a statement that is left out, or None if it stays."""
    if node.type == "continue_statement":
        return "break;" if text_of(node).endswith(";") else "break"
    if node.type == "raise_statement":
        return "pass"
    if node.type == "throw_statement":
        return ";"
    if node.type == "expression_statement" and len(node.named_children) == 1:
        if node.named_children[0].type == "call_expression":
            return ";"
        if node.named_children[0].type == "call":
            return "pass"
        operator = node.named_children[0].child_by_field_name("operator")
        if node.named_children[0].type == "augmented_assignment" and operator is not None:
            for other in _BINARY.get(text_of(operator), ()):
                return _replaced(node, operator, other)
    return None


def mutants(path: Path, root: Path) -> list[Mutant]:
    """All of a file, in the order of the text."""
    source = path.read_bytes()
    tree = Parser(_LANGUAGES[path.suffix]).parse(source)
    lines = source.decode().split("\n")
    comment = "  #" if path.suffix == ".py" else "  //"
    name = str(path.relative_to(root))
    seen: Counter[tuple[str, str, str, str]] = Counter()
    found: list[Mutant] = []

    def add(node: Node, mutated: str, is_statement: bool) -> None:
        original = text_of(node)
        if path.suffix == ".cc" and "//" in original:
            return  # on one line, a comment would swallow what follows it
        if path.suffix == ".py" and "#" in original:
            return
        row, column = node.start_point
        line = lines[row].split(comment)[0].strip()
        key = (_function_name(node), line, _one_line(original), _one_line(mutated))
        seen[key] += 1
        place = (node.start_byte, node.end_byte, row + 1, column, is_statement)
        found.append(Mutant(name, *key, seen[key], *place))

    def walk(node: Node, inside: bool) -> None:
        if _is_constant(node):
            return
        if inside:
            for mutated in _changes(node):
                add(node, mutated, False)
            mutated = _removed(node)
            if mutated is not None:
                add(node, mutated, True)
        for child in node.children:
            label = node.type == "case_statement" and child == node.child_by_field_name("value")
            if not label:
                walk(child, inside or _is_body(node, child))

    walk(tree.root_node, False)
    return found


def _is_body(node: Node, child: Node) -> bool:
    body = child == node.child_by_field_name("body") or child.type == "field_initializer_list"
    return node.type in _FUNCTIONS and body
