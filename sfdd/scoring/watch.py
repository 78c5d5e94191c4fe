"""Signs, seen early in a long run, that its scores will be worth nothing."""

import logging
from math import log as ln

import numpy as np

from sfdd.errors import TargetError
from sfdd.targets.statistics import TokenStats

log = logging.getLogger(__name__)

_FIRST_LOOK = 100  # conversations; fewer say nothing about a share
_MOST_NON_FINITE = 0.01
_TOKENS_FOR_A_JUDGEMENT = 2_000


class Watch:
    """Looks at every conversation's statistics as they come."""

    def __init__(self, target: str, vocab_size: int) -> None:
        self._target = target
        self._log_vocabulary = ln(vocab_size)
        self._conversations = self._non_finite = self._tokens = 0
        self._nll = 0.0
        self._judged = False

    def see(self, stats: TokenStats) -> None:
        """One conversation more.

        Raises:
            TargetError: too many had logits that are not finite.
        """
        self._conversations += 1
        finite = stats.all_finite()
        self._non_finite += not finite
        self._refuse_an_overflowing_target()
        if finite and not self._judged:
            self._tokens += len(stats)
            self._nll += float(stats.nll.sum(dtype=np.float64))
            if self._tokens >= _TOKENS_FOR_A_JUDGEMENT:
                self.judge()

    def judge(self) -> None:
        """Warn, once, of a target that knows no more of the answers than chance does."""
        if self._judged or not self._tokens:
            return
        self._judged = True
        mean = self._nll / self._tokens
        if mean >= self._log_vocabulary:
            log.warning(
                "Target %s looks untrained: its mean negative log-likelihood on %d answer tokens is %.2f "
                "nats, and guessing blindly has %.2f. Is it the right checkpoint, and the right "
                "tokenizer?",
                self._target,
                self._tokens,
                mean,
                self._log_vocabulary,
            )

    def _refuse_an_overflowing_target(self) -> None:
        if (
            self._conversations >= _FIRST_LOOK
            and self._non_finite > _MOST_NON_FINITE * self._conversations
        ):
            raise TargetError(
                f"Target {self._target} gave infinite or undefined logits for {self._non_finite} of the "
                f"first {self._conversations} conversations, more than 1 %. Score with --dtype bfloat16 "
                "or float32, or look at its weights. What was scored is kept."
            )
