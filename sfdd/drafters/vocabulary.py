"""Which of the target's tokens a head of its own can draft: the most frequent ones (EAGLE-3)."""

from torch import Tensor

from sfdd.errors import DataError, UsageError


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:  # int64 [V] -> int64 [D]
    """`draft_to_target`: the ids of the `size` most frequent tokens, in ascending order.

    Of equally frequent tokens the one of lower id comes first. A token that never occurs is never
    chosen, so D may be less than `size`.

    Raises:
        UsageError: `size` is less than 1.
        DataError: no token occurs.
    """
    if size < 1:
        raise UsageError(f"--draft-vocab-size is {size}; it must be at least 1.")
    occurring = int((counts > 0).sum())
    if not occurring:
        raise DataError("No draft vocabulary can be made: the data have no supervised token.")
    by_frequency = counts.sort(descending=True, stable=True).indices  # [V]
    return by_frequency[: min(size, occurring)].sort().values
