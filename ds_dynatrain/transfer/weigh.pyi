from numpy import float32, uint8, uint64
from numpy.typing import NDArray

def runs(
    data: NDArray[uint8],
    first: int,
    stride: int,
    count: int,
    length: int,
    begin: int,
    step: int,
    low: NDArray[uint64],
    high: NDArray[uint64],
    seed: int,
    /,
) -> int: ...
def squares(values: NDArray[float32], scale: float, bin_size: float, /) -> tuple[int, int]: ...
def largest(values: NDArray[float32], /) -> float: ...
