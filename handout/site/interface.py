"""The interface of a source file: signatures, docstrings, and the whole code of `@provided` functions."""

import ast
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_BODY = "..."  # replaces a body
_WIDTH = 88  # of lines in docstrings


def interface(source: str) -> str:
    """The public classes and functions of `source`, in order. Raises SyntaxError if it is not valid Python.

    It leaves out bodies (stubs too), private names, constants, and definitions inside functions.
    """
    lines = source.splitlines(keepends=True)
    parts = [_excerpt(node, lines) for node in ast.parse(source).body if _public(node)]
    return "\n\n\n".join(parts) + "\n" if parts else ""


def _public(node: ast.stmt) -> bool:
    return isinstance(node, Definition) and (not node.name.startswith("_") or node.name.endswith("__"))


def _excerpt(node: Definition, lines: list[str]) -> str:
    """One dedented definition, from its first decorator on."""
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    if any(ast.unparse(d).partition(".")[0] == "provided" for d in node.decorator_list):
        return textwrap.dedent("".join(lines[first - 1 : node.end_lineno])).rstrip()
    parts = list(_body_parts(node, lines))
    return f"{_header(node, lines, first)}\n{textwrap.indent(''.join(parts) or _BODY, '    ')}"


def _body_parts(node: Definition, lines: list[str]) -> Iterator[str]:
    """Yield the docstring and, for a class, its public methods."""
    if document := ast.get_docstring(node):
        raw, text = "r" if "\\" in document else "", _wrapped(document)
        yield f'{raw}"""{text}{chr(10) if chr(10) in text else ""}"""'
    if isinstance(node, ast.ClassDef):
        for method in filter(_public, node.body):
            yield f"\n\n{_excerpt(method, lines)}"


def _wrapped(document: str) -> str:
    """Wrap the paragraphs of a docstring. Indented text and lists stay as they are; "Source: …" begins a new line."""
    blocks = re.sub(r"(?m)^(?=Source: )", "\0", document).replace("\n\0", "\n\n\0").split("\n\n")
    wrapped = [b if re.search(r"(?m)^(\s|[-*|])|\S {2,}\S", b) else textwrap.fill(b, _WIDTH) for b in blocks]
    return "\n\n".join(wrapped).replace("\n\n\0", "\n").replace("\0", "")


def _header(node: Definition, lines: list[str], first: int) -> str:
    """The source text of decorators and signature, up to the colon before the body."""
    text = textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
    depth, in_signature = 0, False
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        in_signature = in_signature or (not depth and token.string in ("def", "class"))
        depth += (token.string in "([{") - (token.string in ")]}") if token.type == tokenize.OP else 0
        if in_signature and not depth and token.string == ":":
            row, column = token.end
            return "".join([*text.splitlines(keepends=True)[: row - 1], text.splitlines()[row - 1][:column]])
    raise SyntaxError(f"line {node.lineno}: no colon after {node.name}")  # cannot happen: ast.parse found a colon
