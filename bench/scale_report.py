"""The table and the plot of docs/scale.md, from the results of bench/scale.py."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.results_file import RESULTS

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
PLOT: Final = "scale.svg"
BEGIN, END = "<!-- table: written by bench/scale.py -->", "<!-- end of the table -->"
PANELS: Final = (
    ("first start: all pods in the kernel, s", "first start, s"),
    ("first start: agent CPU, s", "CPU of a first start, s"),
    ("agent, MB", "memory, MB"),
    ("a node's address changes: agent CPU, s", "CPU per change of a node, s"),
    ("all nodes change: agent CPU per event, ms", "CPU per change of pods, ms"),
    ("churn: agent, % of a CPU", "1 % churn/min, % of a CPU"),
)
_WIDTH, _HEIGHT, _COLUMNS = 300, 190, 3
_COLOURS: Final = ("#7aa6c2", "#4f81a8", "#2f5d86", "#173b5c")

Results = Mapping[str, Mapping[str, float]]


def write(found: Results) -> None:
    """Put the table into docs/scale.md between its marks, and the plot beside it."""
    page = DOCS / "scale.md"
    head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    tail = rest.partition(END)[2]
    page.write_text(f"{head}{BEGIN}\n{make_table(found)}\n{END}{tail}", encoding="utf-8")
    (DOCS / PLOT).write_text(make_plot(found), encoding="utf-8")


def make_table(found: Results) -> str:
    """Give the table in Markdown: a row for each figure, a column for each size."""
    sizes = list(found)
    lines = ["| | " + " | ".join(sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for name in dict.fromkeys(name for figures in found.values() for name in figures):
        if name not in ("nodes", "pods"):
            cells = (_shown(found[size].get(name)) for size in sizes)
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(figure: float | None) -> str:
    if figure is None:
        return ""
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def make_plot(found: Results) -> str:
    """Give one SVG with a bar chart for each figure that says which size costs what."""
    rows = -(-len(PANELS) // _COLUMNS)
    width, height = _COLUMNS * _WIDTH, rows * _HEIGHT
    panels = [
        f'<g transform="translate({index % _COLUMNS * _WIDTH},{index // _COLUMNS * _HEIGHT})">'
        f"{_panel(title, [(size, one.get(name, 0.0)) for size, one in found.items()])}</g>"
        for index, (name, title) in enumerate(PANELS)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' font-family="sans-serif" font-size="11" role="img">'
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


def _panel(title: str, bars: Sequence[tuple[str, float]]) -> str:
    largest = max((figure for _, figure in bars), default=0.0) or 1.0
    step = (_HEIGHT - 50) / max(1, len(bars))
    parts = [f'<text x="12" y="22" font-weight="bold">{title}</text>']
    for index, (size, figure) in enumerate(bars):
        y, length = 34 + index * step, max(1.0, figure / largest * (_WIDTH - 80))
        parts.append(f'<text x="12" y="{y + 10:.0f}" fill="#555">{size}</text>')
        parts.append(
            f'<rect x="12" y="{y + 14:.0f}" width="{length:.0f}" height="{step - 20:.0f}"'
            f' fill="{_COLOURS[index % len(_COLOURS)]}"/>'
        )
        parts.append(f'<text x="{length + 18:.0f}" y="{y + step - 8:.0f}">{_shown(figure)}</text>')
    return "".join(parts)


def main() -> None:
    """Write both anew from the results that are kept, or from a file that is named."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / "scale.json"
    document: Any = msgspec.json.decode(path.read_bytes())
    write(document["summary"])


if __name__ == "__main__":
    main()
