"""Windows of samples through the target, in batches as large as memory allows."""

import logging
from collections.abc import Callable, Iterator

import torch

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import TargetError
from sfdd.scoring.batching import by_length, next_batch
from sfdd.targets.statistics import TokenStats
from sfdd.targets.transformers_target import TransformersTarget

log = logging.getLogger(__name__)

_SMALLEST_BATCH = 64  # tokens


class Forward:
    """Keeps the batch budget between windows, and counts what was computed.

    Attributes:
        batch_tokens: padded tokens per batch; halved whenever memory runs out.
        computed_tokens: padding included.
    """

    def __init__(
        self, target: TransformersTarget, batch_tokens: int, logits_memory: int | None = None
    ) -> None:
        self._target = target
        if logits_memory is not None:
            target.logits_memory = logits_memory
        self.batch_tokens = batch_tokens
        self.computed_tokens = 0

    def __call__(
        self, samples: list[TokenizedConversation]
    ) -> Iterator[tuple[list[TokenizedConversation], list[TokenStats]]]:
        """Every sample with its statistics, batch by batch.

        A batch's results are fetched after the next one was started: a GPU is never idle between them.

        Raises:
            TargetError: not even the smallest batch fits into memory.
        """
        samples = by_length(samples)
        waiting: tuple[list[TokenizedConversation], Callable[[], list[TokenStats]]] | None = None
        while samples:
            batch = samples[: next_batch(samples, self.batch_tokens)]
            fetch = self._start(batch)
            if fetch is None:
                continue
            samples = samples[len(batch) :]
            self.computed_tokens += len(batch) * len(batch[0])
            if waiting:
                yield waiting[0], waiting[1]()
            waiting = batch, fetch
        if waiting:
            yield waiting[0], waiting[1]()

    def _start(self, batch: list[TokenizedConversation]) -> Callable[[], list[TokenStats]] | None:
        """Begin a batch; None if memory ran out, and the budget is smaller now."""
        try:
            return self._target.start_token_stats(batch, prefill_tokens=self.batch_tokens)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        if self.batch_tokens // 2 < _SMALLEST_BATCH:
            raise TargetError(
                f"Memory ran out with {self.batch_tokens} tokens at a time ({reason}). Lower "
                "--logits-memory, use --dtype bfloat16, or a device with more memory."
            )
        # Halved from what was tried: a budget that no batch came near is no reason for it.
        tried = min(self.batch_tokens, len(batch) * len(batch[0]))
        self.batch_tokens = max(tried // 2, _SMALLEST_BATCH)
        log.warning("Memory ran out; going on with --batch-tokens %d.", self.batch_tokens)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on a GPU or on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and (
        "not enough memory" in said or "can't allocate memory" in said or "std::bad_alloc" in said
    )
