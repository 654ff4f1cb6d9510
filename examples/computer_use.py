"""A computer-use loop: look at a fake screen, do what the model says, look again.

The model must be one that sees, which the bundled one is not.
"""

from __future__ import annotations

import base64
import os
import re
import struct
import zlib

from openai import OpenAI

import autellix

SIDE = 32
STEPS = 4
MODEL = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")


def screenshot(x: int, y: int) -> str:
    """Return a small grey picture with a white cursor at x, y, as a data URL."""
    rows = [
        bytes([0] + [255 if (i, j) == (x, y) else 90 for i in range(SIDE)]) for j in range(SIDE)
    ]
    parts = {b"IHDR": struct.pack(">IIBBBBB", SIDE, SIDE, 8, 0, 0, 0, 0)}
    parts |= {b"IDAT": zlib.compress(b"".join(rows)), b"IEND": b""}
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in parts.items():
        png += (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )
    return "data:image/png;base64," + base64.b64encode(png).decode()


@autellix.tool("screen")
def act(answer: str, x: int, y: int) -> tuple[int, int]:
    """Move the cursor where the model says; the program waits for this tool meanwhile."""
    found = re.search(r"(\d+)\D+(\d+)", answer)
    return (int(found[1]) % SIDE, int(found[2]) % SIDE) if found else (x, y)


@autellix.session("computer use")
def main() -> None:
    client = OpenAI()
    x, y = 3, 3
    for _ in range(STEPS):
        picture = {"type": "image_url", "image_url": {"url": screenshot(x, y)}}
        wish = {"type": "text", "text": "Move the cursor to the middle: answer with x and y."}
        answer = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [picture, wish]}], max_tokens=16
        )
        x, y = act(answer.choices[0].message.content or "", x, y)
    print(f"computer use: the cursor is at {x}, {y} after {STEPS} steps")


if __name__ == "__main__":
    main()
