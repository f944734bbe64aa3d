"""Small tables, as text and as HTML, in which objects show themselves."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def aligned(lines: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return rows of cells as lines of text with columns, the first ``left`` of them flush left.

    Args:
        lines: cells, of one number a row.
        left: number of columns that are flush left.
    """
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def html_table(lines: Iterable[Sequence[str]], left: int) -> str:
    """Return rows of cells as an HTML table, the first of them its head; whatever they hold is shown as text.

    Args:
        lines: cells, of one number a row.
        left: number of columns that are flush left.
    """
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
    """Return a title and facts by name as HTML; whatever they hold is shown as text.

    Args:
        title: above them.
        facts: by name.
    """
    rows = "".join(
        f'<tr><th style="text-align: left">{html.escape(name)}</th>'
        f'<td style="text-align: left">{html.escape(str(fact))}</td></tr>'
        for name, fact in facts.items()
    )
    return f"<p><b>{html.escape(title)}</b></p><table><tbody>{rows}</tbody></table>"


class Page:
    """An HTML page of a file, which shows itself in a notebook, where its style reaches nothing else.

    Args:
        path: of the file.
        text: of the page: one ``style``, and a ``body``.
    """

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text

    def __repr__(self) -> str:
        return f"Page('{self.path}')"

    def _repr_html_(self) -> str:
        style, body = (
            match[1] if (match := re.search(f"<{tag}>(.*)</{tag}>", self.text, re.DOTALL)) else ""
            for tag in ("style", "body")
        )
        style = re.sub(r"\bbody\b|:root", "&", style)  # of the nested rules: the page itself
        return f'<style>.peerbayes-page {{ {style} }}</style><div class="peerbayes-page">{body}</div>'
