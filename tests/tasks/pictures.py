"""Pictures and clips that tests make for themselves."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")


def encoded(image: Any, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def picture(color: Any = (200, 30, 30), size: tuple[int, int] = (4, 3), **options: Any) -> bytes:
    return encoded(Image.new("RGB", size, color), **options)


def clip(path: Path, frames: int = 10, size: tuple[int, int] = (32, 16), rotation: int = 0) -> Path:
    """A clip without loss whose frame n has the grey value 10 n, and a white first column."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=8)
        stream.width, stream.height, stream.pix_fmt = *size, "bgr0"
        if rotation:
            if not hasattr(stream, "set_display_rotation"):
                pytest.skip("this PyAV writes no rotation")
            stream.set_display_rotation(rotation)
        for number in range(frames):
            pixels = np.full((size[1], size[0], 3), 10 * number, np.uint8)
            pixels[:, 0] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        if frames:
            container.mux(stream.encode(None))
        else:
            container.start_encoding()
    return path
