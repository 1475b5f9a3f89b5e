"""Matrices: in LaTeX's environments, or as lists of lists."""

import re
from collections.abc import Callable

from agentrl.mathematics.answers import Answer, Matrix, Value
from agentrl.mathematics.expressions import read_value
from agentrl.mathematics.notation import ROW_END
from agentrl.mathematics.structure import closing, split

Read = Callable[[str], Answer | None]
_MATRIX = re.compile(
    r"^(.*?)\\begin\{([pbvBV]?matrix|smallmatrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\2\}(.*)$",
    re.DOTALL,
)


def read_matrix(text: str, read: Read) -> Answer | None:
    """The matrix in a text; None if it is not one. `read`: parses cells."""
    found = _MATRIX.match(text)
    if found is None:
        return _nested_rows(text, read)
    before, _, body, after = (part.strip() for part in found.groups())
    if (before, after) in (("[", "]"), ("(", ")")):
        before = after = ""
    if after or r"\begin" in body:
        return None
    rows = [row.replace(r"\hline", "").split("&") for row in body.split(ROW_END) if row.strip()]
    items = [tuple(read(cell) for cell in row) for row in rows]
    if not items or any(len(row) != len(items[0]) or None in row for row in items):
        return None
    matrix = Matrix(tuple(tuple(cell for cell in row if cell is not None) for row in items))
    if not before:
        return matrix
    factor = read_value(re.sub(r"\\cdot\s*$", "", before) if before != "-" else "-1")
    return _scaled(matrix, factor) if factor is not None else None


def _nested_rows(text: str, read: Read) -> Answer | None:
    """A matrix as a list of lists, such as [[1, 2], [3, 4]]."""
    if not re.match(r"\[\s*\[", text) or closing(text, 0) != len(text) - 1:
        return None
    parts, _ = split(text[1:-1], re.compile(","))
    rows = []
    for part in (part.strip() for part in parts):
        if not part.startswith("[") or not part.endswith("]"):
            return None
        cells = [read(cell) for cell in split(part[1:-1], re.compile(","))[0]]
        rows.append(cells)
    if any(len(row) != len(rows[0]) or None in row for row in rows):
        return None
    return Matrix(tuple(tuple(cell for cell in row if cell is not None) for row in rows))


def _scaled(matrix: Matrix, factor: Value) -> Answer | None:
    cells = [cell for row in matrix.rows for cell in row]
    if not all(isinstance(cell, Value) for cell in cells):
        return None
    return Matrix(
        tuple(
            tuple(
                Value(cell.expression * factor.expression)
                for cell in row
                if isinstance(cell, Value)
            )
            for row in matrix.rows
        )
    )
