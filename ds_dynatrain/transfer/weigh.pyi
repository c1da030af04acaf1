from numpy import uint8, uint64
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
