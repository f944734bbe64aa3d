"""Small tables, as text and as HTML, in which objects show themselves."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return rows of cells as lines of text with columns, the first ``left`` of them flush left."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def html_table(lines: Iterable[Sequence[str]], left: int) -> str:
    """Return rows of cells as an HTML table, the first of them its head; whatever they hold is shown as text."""
    head, *rows = lines

    def row(cells: Sequence[str], tag: str) -> str:
        sides = ("left" if column < left else "right" for column in range(len(cells)))
        shown = (
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for cell, side in zip(cells, sides, strict=True)
        )
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><thead>{row(head, 'th')}</thead><tbody>{body}</tbody></table>"


def html_facts(title: str, facts: Mapping[str, object]) -> str:
    """Return a title and facts by name as HTML; whatever they hold is shown as text."""
    rows = "".join(
        f'<tr><th style="text-align: left">{html.escape(name)}</th>'
        f'<td style="text-align: left">{html.escape(str(fact))}</td></tr>'
        for name, fact in facts.items()
    )
    return f"<p><b>{html.escape(title)}</b></p><table><tbody>{rows}</tbody></table>"
