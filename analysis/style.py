"""How figures look and how they become files: one drawing serves PNG, SVG, PDF and the report's light and dark themes.

Figures are drawn in the light theme's colours. In the report each of those exact colours becomes a CSS variable, so the
same SVG follows the reader's theme; text stays text. Hues differ in lightness too, and markers and dashes repeat what
colour says (for colour-blind readers and black-and-white print).
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# name -> (light, dark)
THEME: dict[str, tuple[str, str]] = {
    "ink": ("#1b1f24", "#e8e6e1"),
    "muted": ("#5b6470", "#a7adb5"),
    "grid": ("#dfe2e6", "#343a41"),
    "s0": ("#1f5fa8", "#7db4f2"),
    "s1": ("#c2481c", "#f59a6e"),
    "s2": ("#18795a", "#63c9a2"),
    "s3": ("#7b4aa5", "#c9a5ec"),
    "s4": ("#8f6a00", "#e3b74a"),
    "s5": ("#a8325e", "#f08fb3"),
}
INK, MUTED, GRID = (THEME[n][0] for n in ("ink", "muted", "grid"))
SERIES = tuple(THEME[f"s{i}"][0] for i in range(6))
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 3)), (0, (8, 3)))
WIDE, NARROW = "wide", "narrow"
WIDTHS = {WIDE: 7.6, NARROW: 3.75}  # inches; narrow is drawn for a phone, not shrunk to it


@contextmanager
def drawing() -> Iterator[None]:
    """Matplotlib settings of all figures; no display is needed."""
    import matplotlib

    matplotlib.use("Agg")
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "pdf.fonttype": 42,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelsize": 9.5,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": MUTED,
        "axes.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelsize": 9,
        "ytick.labelsize": 9,
        "text.color": INK,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "lines.markersize": 5.5,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "figure.constrained_layout.use": True,
    }
    with matplotlib.rc_context(settings):
        yield


def svg_text(figure: Figure, name: str) -> str:
    """Lay the figure out, once and for all formats, and render it as SVG; `name` salts the ids in it."""
    import matplotlib

    figure.draw_without_rendering()
    with matplotlib.rc_context({"figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)  # else every format lays it out anew, which takes most of the time
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def save(figure: Figure, svg: str, stem: Path) -> None:
    """Write STEM.png (200 dpi, white ground), .svg and .pdf. No dates inside: the same figure is the same file."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".svg").write_text(svg, encoding="utf-8")
    figure.savefig(stem.with_suffix(".png"), dpi=200, facecolor="white", metadata={"Software": None})
    figure.savefig(stem.with_suffix(".pdf"), metadata={"CreationDate": None})


def inline_svg(svg: str, name: str, alt: str, css_class: str) -> str:
    """An SVG for the report: themed by CSS variables, ids made unique by `name`, described by `alt`."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", body)
    body = re.sub(r'xlink:href="#([^"]+)"', rf'xlink:href="#{name}-\1"', body)
    for variable, (light, _) in THEME.items():
        body = re.sub(re.escape(light), f"var(--{variable})", body, flags=re.IGNORECASE)
    body = re.sub(r"(font(?:-family)?:[^;\"]*?)'DejaVu Sans'[^;\"]*", r"\1var(--sans)", body)
    head = re.match(r"<svg[^>]*>", body)
    assert head is not None
    opening = re.sub(r'\s(?:width|height)="[^"]*"', "", head[0])
    opening = opening[:-1] + f' class="{css_class}" role="img" aria-label="{_attribute(alt)}">'
    return opening + body[head.end() :].strip()


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")


def css_variables() -> tuple[str, str]:
    """Declarations of the colours for the light and the dark theme."""
    light = " ".join(f"--{name}: {pair[0]};" for name, pair in THEME.items())
    dark = " ".join(f"--{name}: {pair[1]};" for name, pair in THEME.items())
    return light, dark
