"""Tables of measured numbers for a terminal or a log of any width: no number is ever cropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

NAME_WIDTH = 24  # longer names are folded where the table does not fit otherwise
IN_A_LINE = 4  # alphas, where a cell has several lines


@dataclass(frozen=True)
class Column:
    """`cells`: one a row, as parts that stand side by side, or below each other where the table would be too wide.

    `describes`: it says what was measured, not what came out: it goes into the title where it is equal in all rows, and
    is repeated where a table is divided. `is_name`: text, no number.
    """

    head: str
    cells: Sequence[tuple[str, ...]]
    describes: bool = False
    is_name: bool = False

    def width(self, stacked: bool) -> int:
        """In characters, of its longest line."""
        lines = [line for cell in self.cells for line in _joined(cell, stacked).split("\n")]
        widest = max(map(len, [*self.head.split(), *lines]))
        return min(widest, NAME_WIDTH) if self.is_name and stacked else widest


def laid_out(title: str, columns: Sequence[Column], width: int) -> list[Table]:
    """The tables to print in `width` characters: one, with several lines a row if it must be; else several, below each
    other. Columns without any content are left out."""
    shown: list[Column] = []
    risen: list[Column] = []
    for column in columns:
        if not any(any(cell) for cell in column.cells):
            continue
        is_equal = column.describes and len(column.cells) > 1 and len(set(column.cells)) == 1
        (risen if is_equal else shown).append(column)
    if risen:
        title += "\n" + ", ".join(f"{c.head} {_joined(c.cells[0], stacked=False)}" for c in risen)
    for stacked in (False, True):
        if _width(shown, stacked) <= width:
            return [_table(title, shown, stacked)]
    repeated = [c for c in shown if c.describes]
    groups = [list(repeated)]
    for column in (c for c in shown if not c.describes):
        if len(groups[-1]) > len(repeated) and _width([*groups[-1], column], stacked=True) > width:
            groups.append(list(repeated))
        groups[-1].append(column)
    return [_table(title if i == 0 else "", group, stacked=True) for i, group in enumerate(groups)]


def alphas(values: Sequence[float | None]) -> tuple[str, ...]:
    """Parts of a cell; `-` for a position that was never reached."""
    texts = [number(a) for a in values]
    return tuple(" ".join(texts[i : i + IN_A_LINE]) for i in range(0, len(texts), IN_A_LINE))


def alpha_head(steps: int) -> str:
    return f"alpha 0-{steps - 1}" if steps > 1 else "alpha 0"


def interval(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    return number(value), f"({number(low)}-{number(high)})"


def number(x: float | None) -> str:
    return "-" if x is None else f"{x:,.2f}"


def _joined(parts: Sequence[str], stacked: bool) -> str:
    return ("\n" if stacked else " ").join(parts)


def _width(columns: Sequence[Column], stacked: bool) -> int:
    """With the borders and the space beside them."""
    return sum(column.width(stacked) + 3 for column in columns) + 1


def _table(title: str, columns: Sequence[Column], stacked: bool) -> Table:
    tall = stacked and any(len(cell) > 1 for column in columns for cell in column.cells)
    table = Table(title=title or None, show_lines=tall)
    for column in columns:
        table.add_column(
            _joined(column.head.split(), stacked=True),
            justify="left" if column.is_name else "right",
            no_wrap=not column.is_name,
            max_width=column.width(stacked),
            overflow="fold",
        )
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(_joined(cell, stacked) for cell in cells))
    return table
