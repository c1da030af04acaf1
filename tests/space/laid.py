"""Pieces put together from single ones, and what pieces always are."""

from __future__ import annotations

import numpy as np

from ds_dynatrain.space import Piece, Pieces


def pieces_of(pieces: list[Piece]) -> Pieces:
    """From single ones, in any order."""
    ordered = sorted(pieces)
    buffers = tuple(sorted({piece.buffer for piece in ordered}))
    number = {buffer: index for index, buffer in enumerate(buffers)}
    rows = [(piece.start, piece.stop, number[piece.buffer], piece.offset) for piece in ordered]
    start, stop, buffer, offset = np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy()
    return checked(Pieces(start, stop, buffer, offset, buffers))


def checked(pieces: Pieces) -> Pieces:
    """The same; AssertionError where a run is empty, out of order, overlaps, or names no buffer."""
    assert (pieces.start < pieces.stop).all() and (pieces.offset >= 0).all()
    assert ((pieces.buffer >= 0) & (pieces.buffer < len(pieces.buffers))).all()
    assert (pieces.start[1:] >= pieces.stop[:-1]).all()
    return pieces
