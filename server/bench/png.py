"""A canvas of dots, and the PNG file it becomes (PNG specification, third edition): no library needed."""

import struct
import zlib

from server.bench.font import HEIGHT, WIDTH, read_glyphs

Colour = tuple[int, int, int]
BLACK, GREY, PALE, WHITE = (40, 40, 40), (120, 120, 120), (225, 225, 225), (255, 255, 255)

LINE_HEIGHT = HEIGHT + 5

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_TRUE_COLOUR = 2


class Canvas:
    """A white sheet; (0, 0) is its upper left corner, and what falls outside is left out.

    Args:
        width: In dots.
        height: In dots.
    """

    def __init__(self, width: int, height: int) -> None:
        self.width = width
        self.height = height
        self._rows = [bytearray(b"\xff" * 3 * width) for _ in range(height)]
        self._glyphs = read_glyphs()

    def colour_at(self, x: int, y: int) -> Colour:
        """The colour of a dot."""
        red, green, blue = self._rows[y][3 * x : 3 * x + 3]
        return red, green, blue

    def fill(self, x: int, y: int, width: int, height: int, colour: Colour) -> None:
        """Fills a rectangle from its upper left corner."""
        left, right = max(0, x), min(self.width, x + width)
        for row in self._rows[max(0, y) : max(0, y + height)]:
            row[3 * left : 3 * right] = bytes(colour) * max(0, right - left)

    def line(self, start: tuple[int, int], end: tuple[int, int], colour: Colour) -> None:
        """Draws a line two dots wide."""
        (x, y), (to_x, to_y) = start, end
        steps = max(abs(to_x - x), abs(to_y - y), 1)
        for step in range(steps + 1):
            part = step / steps
            self.fill(round(x + (to_x - x) * part), round(y + (to_y - y) * part), 2, 2, colour)

    def text(self, x: int, y: int, text: str, colour: Colour = BLACK) -> None:
        """Writes a line; a letter that the font lacks becomes a question mark, a space stays one."""
        for place, letter in enumerate(text.upper()):
            glyph = () if letter == " " else self._glyphs.get(letter, self._glyphs["?"])
            for down, row in enumerate(glyph):
                for right, dot in enumerate(row):
                    if dot == "#":
                        self.fill(x + place * (WIDTH + 1) + right, y + down, 1, 1, colour)

    def png(self) -> bytes:
        """The file."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, _TRUE_COLOUR, 0, 0, 0)
        # Each row starts with the number of its filter: 0, none.
        dots = b"".join(b"\0" + row for row in self._rows)
        chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(dots, 9)), (b"IEND", b""))
        return _SIGNATURE + b"".join(_chunk(kind, data) for kind, data in chunks)


def text_width(text: str) -> int:
    """Dots that a line of text takes."""
    return len(text) * (WIDTH + 1) - 1 if text else 0


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
