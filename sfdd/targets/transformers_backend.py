"""The backend that runs a transformers model: batches as large as memory allows."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import TargetError
from sfdd.targets.config import BATCH_TOKENS, BackendConfig
from sfdd.targets.loading import TargetSource, warn_of_lower_precision
from sfdd.targets.statistics import TokenStats
from sfdd.targets.transformers_target import TransformersTarget

log = logging.getLogger(__name__)

_SMALLEST_BATCH = 64  # tokens
_MOST_PADDING = 0.04  # of a batch's tokens
_WORTH_A_BATCH = 0.125  # of the budget


class TransformersBackend:
    """A `Backend`; keeps the batch budget between calls.

    Attributes:
        batch_tokens: padded tokens per batch; halved whenever memory runs out.
        computed_tokens: padding included.
    """

    name = "transformers"

    def __init__(
        self,
        target: TransformersTarget,
        batch_tokens: int = BATCH_TOKENS,
        logits_memory: int | None = None,
    ) -> None:
        self._target = target
        if logits_memory is not None:
            target.logits_memory = logits_memory
        self.batch_tokens = batch_tokens
        self.computed_tokens = 0
        self.source, self.tokenizer = target.source, target.tokenizer
        self.vocab_size, self.identity = target.vocab_size, target.identity
        dtype = self.identity["dtype"]
        self.engine = f"{self.name}, {dtype} on {target.device}"
        self.about: Mapping[str, Any] = {"backend": self.name, "device": str(target.device)}
        warn_of_lower_precision(self.source, dtype)

    @classmethod
    def load(cls, source: TargetSource, config: BackendConfig) -> "TransformersBackend":
        """Load a target; see `TransformersTarget.load` for errors."""
        target = TransformersTarget.load(
            source.name,
            dtype=config.dtype,
            device=config.device,
            attn_implementation=config.attn_implementation,
            trust_remote_code=source.trust_remote_code,
        )
        return cls(target, config.batch_tokens or BATCH_TOKENS, config.logits_memory)

    def usable_length(self, max_length: int) -> int:
        return self._target.usable_length(max_length)

    def token_stats(
        self, samples: Sequence[TokenizedConversation]
    ) -> Iterator[tuple[Sequence[TokenizedConversation], Sequence[TokenStats]]]:
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

    def close(self) -> None:
        """Nothing to end."""

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


def by_length(samples: Sequence[TokenizedConversation]) -> list[TokenizedConversation]:
    """Longest first: neighbours make batches with hardly any padding, and memory runs out at once or
    not at all."""
    return sorted(samples, key=len, reverse=True)


def next_batch(samples: Sequence[TokenizedConversation], batch_tokens: int) -> int:
    """How many of some samples, longest first, make a batch.

    Its width times its rows stays within `batch_tokens`; a sample longer than that is a batch of its own.
    A batch that is large enough to be worth a forward pass takes no more than a little padding.
    """
    width = len(samples[0])
    count = tokens = 0
    for sample in samples[: max(1, batch_tokens // width)]:
        computed = width * (count + 1)
        padding = computed - tokens - len(sample)
        if padding > _MOST_PADDING * computed and computed > _WORTH_A_BATCH * batch_tokens:
            break
        count, tokens = count + 1, tokens + len(sample)
    return count


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on a GPU or on a CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and (
        "not enough memory" in said or "can't allocate memory" in said or "std::bad_alloc" in said
    )
