"""Draws docs/speed-with-unequal-ranks.svg from the tables in results/2026-11-16-stragglers.md.

    python bench/chart.py
"""

import pathlib
import re

BENCH = pathlib.Path(__file__).parent
RESULTS = BENCH / "results/2026-11-16-stragglers.md"
CHART = BENCH.parent / "docs/speed-with-unequal-ranks.svg"

LEFT, RIGHT, TOP, ROW, BAR = 250, 700, 86, 46, 15
GREY, BLUE, RED, DARK, PALE = "#9aa3ab", "#1d5a8a", "#b3261e", "#22272b", "#5c656c"
FASTEST = 1.6
OPTIMUM = 4 / 3  # of a step, where one rank of two is twice as slow


def rows(table):
    """The cells of the rows below the header that begins with `table`."""
    lines = RESULTS.read_text().splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(table)) + 2
    for line in lines[begin:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def cases():
    """(name, speed of auto where off has 1, its standard error or None, the optimum or None)"""
    for parts, off, _, _, _, auto, _, _ in rows("| parts | off |"):
        yield f"Llama, one H200 in parts of|{parts} multiprocessors", float(auto) / float(off), None, None
    for model, by, _, off, _, auto, _ in rows("| model | slowed down by |"):
        step, over_optimum, error = map(float, re.findall(r"[\d.]+", auto))
        speed = float(off) / step
        name = {"throttle": "throttled to half speed", "neighbour": "beside a busy process"}[by]
        yield f"{model}, one of two CPU ranks|{name}", speed, speed * error / over_optimum, float(off) / OPTIMUM


def x(speed):
    return LEFT + (RIGHT - LEFT) * speed / FASTEST


def text(left, y, words, **attributes):
    attributes = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f'<text x="{left:.1f}" y="{y:.1f}"{attributes}>{words}</text>'


def draw():
    drawn = list(cases())
    bottom = TOP + ROW * len(drawn)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {bottom + 48}" width="760" height="{bottom + 48}" '
        f'font-family="sans-serif" font-size="13" fill="{DARK}">',
        "<title>Training speed with unequal ranks, with and without balancing</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        text(16, 28, "Training speed with unequal ranks (tensor parallelism)", font_size=17, font_weight="bold"),
        f'<rect x="16" y="44" width="12" height="12" fill="{GREY}"/>',
        text(34, 55, "balance.mode = off"),
        f'<rect x="180" y="44" width="12" height="12" fill="{BLUE}"/>',
        text(198, 55, "balance.mode = auto"),
        f'<path d="M350 43V57" stroke="{RED}" stroke-width="2"/>',
        text(358, 55, "estimated optimum: all work divided by speed"),
    ]
    for number, (name, speed, error, optimum) in enumerate(drawn):
        y = TOP + ROW * number
        for line, words in enumerate(name.split("|")):
            lines.append(text(LEFT - 10, y + 13 + 15 * line, words, text_anchor="end"))
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{x(1) - LEFT:.1f}" height="{BAR}" fill="{GREY}"/>')
        lines.append(text(x(1) + 6, y + 12, "1.00", fill=PALE))
        lines.append(f'<rect x="{LEFT}" y="{y + BAR}" width="{x(speed) - LEFT:.1f}" height="{BAR}" fill="{BLUE}"/>')
        end = speed
        if error is not None:
            middle = y + BAR * 1.5
            low, end = x(speed - error), speed + error
            lines.append(
                f'<path d="M{low:.1f} {middle}H{x(end):.1f}M{low:.1f} {middle - 4}v8M{x(end):.1f} {middle - 4}v8" '
                f'stroke="{DARK}" fill="none"/>'
            )
        if optimum is not None:
            lines.append(f'<path d="M{x(optimum):.1f} {y + BAR - 2}v{BAR + 4}" stroke="{RED}" stroke-width="2"/>')
        lines.append(text(x(max(end, optimum or 0)) + 8, y + BAR + 12, f"{speed:.2f}", font_weight="bold"))
    notes = ["Measured on 2026-11-16, one run each; CPU ranks with the standard error of the balanced steps.",
             f"Source: bench/results/{RESULTS.name}"]
    lines += [text(16, bottom + 14 + 18 * number, note, fill=PALE) for number, note in enumerate(notes)]
    CHART.write_text("\n".join([*lines, "</svg>", ""]))


draw()
