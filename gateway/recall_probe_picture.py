"""The heat map of a recall probe as a PNG: lengths down, depths across."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ctxgate.gateway.recall_probe import Result

NEEDS_PICTURES: Final = "needs the extra `pictures` (`pip install 'ctxgate[pictures]'`)"
CELL: Final = (56, 32)  # width and height of a cell
LEFT: Final = 96
TOP: Final = 40
MARGIN: Final = 16
UNKNOWN: Final = (190, 190, 190)
_NONE: Final = (200, 40, 40)
_HALF: Final = (240, 210, 60)
_ALL: Final = (40, 150, 70)
_INK: Final = (20, 20, 20)
_PAPER: Final = (255, 255, 255)

Colour = tuple[int, int, int]


def colour(share: float | None) -> Colour:
    """From red (nothing found) by yellow to green (everything); grey where it is unknown."""
    if share is None:
        return UNKNOWN
    low, high, part = (_NONE, _HALF, share * 2) if share < 0.5 else (_HALF, _ALL, share * 2 - 1)
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(low, high, strict=True))
    return red, green, blue


def centre(row: int, column: int) -> tuple[int, int]:
    """The middle of a cell in the picture."""
    return LEFT + column * CELL[0] + CELL[0] // 2, TOP + row * CELL[1] + CELL[1] // 2


def picture(result: Result) -> bytes:
    """A PNG. Raises ImportError without the extra `pictures`, ValueError for a result without lengths."""
    from PIL import Image, ImageDraw  # noqa: PLC0415 - belongs to an extra

    if not result.rows:
        raise ValueError("the result has no lengths")
    columns = len(result.rows[0].cells)
    size = (LEFT + columns * CELL[0] + MARGIN, TOP + len(result.rows) * CELL[1] + MARGIN)
    image = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(image)
    draw.text((MARGIN, 4), f"{result.model} on {result.pool}: needles found, by depth", fill=_INK)
    for column, cell in enumerate(result.rows[0].cells):
        draw.text((centre(0, column)[0], TOP - 10), f"{cell.depth}%", fill=_INK, anchor="mm")
    for number, row in enumerate(result.rows):
        middle = centre(number, 0)[1]
        label = f"{row.wanted if row.tokens is None else row.tokens:,}"
        draw.text((LEFT - 8, middle), label, fill=_INK, anchor="rm")
        for column, cell in enumerate(row.cells):
            x, y = LEFT + column * CELL[0], TOP + number * CELL[1]
            draw.rectangle((x, y, x + CELL[0] - 2, y + CELL[1] - 2), fill=colour(cell.share))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
