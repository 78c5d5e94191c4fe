"""Running the baseline and the drafters on the same prompt, side by side and by the clock."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from sfdd.evaluation.acceptance import AcceptanceStats
from sfdd.evaluation.decoding import (
    Decoding,
    Limits,
    autoregressive_decode,
    speculative_decode,
    stop_token_ids,
)
from sfdd.evaluation.prompts import Prompt
from sfdd.evaluation.proposing import EagleProposer
from sfdd.evaluation.report import DrafterResult, Measurement, Speed
from sfdd.evaluation.verification import Sampling

if TYPE_CHECKING:
    from sfdd.drafters.drafter import Drafter
    from sfdd.evaluation.config import EvalConfig
    from sfdd.targets.transformers_target import TransformersTarget

log = logging.getLogger(__name__)

BASELINE = "baseline"
_WARM_UP_TOKENS = 16

Decoder: TypeAlias = Callable[[Tensor, Limits, Sampling], Decoding]
Message: TypeAlias = dict[str, str]


@dataclass(frozen=True)
class Timed:
    """A response and the wall time it took, in seconds."""

    decoding: Decoding
    seconds: float


Turn: TypeAlias = Mapping[str, Timed]  # by decoder


@dataclass(frozen=True)
class Comparison:
    """Decoders of one target, the autoregressive `BASELINE` among them, and how they decode."""

    target: "TransformersTarget"
    decoders: Mapping[str, Decoder]
    limits: Limits
    temperature: float
    seed: int

    @classmethod
    def of(
        cls,
        target: "TransformersTarget",
        drafters: Mapping[str, "Drafter"],
        config: "EvalConfig",
    ) -> "Comparison":
        """The baseline against some drafters, each under its name."""

        def baseline(prompt_ids: Tensor, limits: Limits, sampling: Sampling) -> Decoding:
            return autoregressive_decode(target, prompt_ids, limits, sampling)

        def speculative(drafter: "Drafter") -> Decoder:
            proposer, count = EagleProposer(drafter, target), config.num_speculative_tokens

            def decode(prompt_ids: Tensor, limits: Limits, sampling: Sampling) -> Decoding:
                return speculative_decode(target, proposer, prompt_ids, limits, sampling, count)

            return decode

        return cls(
            target,
            {BASELINE: baseline} | {name: speculative(d) for name, d in drafters.items()},
            Limits(config.max_new_tokens, stop_token_ids(target)),
            config.temperature,
            config.seed,
        )

    def warm_up(self, prompt: Prompt) -> None:
        """Let every decoder load its kernels and allocate its memory before any clock runs."""
        few = min(self.limits.max_new_tokens, _WARM_UP_TOKENS)
        prompt_ids = self._render([{"role": "user", "content": prompt.turns[0]}])
        for decode in self.decoders.values():
            decode(prompt_ids, replace(self.limits, max_new_tokens=few), self._sampling(0))

    def measure(self, prompt: Prompt, number: int) -> Measurement | None:
        """All decoders on all turns of the prompt; None where not even the first turn fits.

        Args:
            number: of the prompt; decides who goes first, and the seed of its sampling.
        """
        turns = list(self._converse(prompt, number))
        if not turns:
            return None
        return Measurement(
            num_prompts=1,
            num_responses=len(turns),
            baseline=_speed([turn[BASELINE] for turn in turns]),
            drafters={
                name: self._result(turns, name) for name in self.decoders if name != BASELINE
            },
        )

    def _converse(self, prompt: Prompt, number: int) -> Iterator[Turn]:
        """The turns; one that is too long for the target's context ends them with a warning."""
        samplings = {name: self._sampling(number) for name in self.decoders}
        messages: list[Message] = []
        for index, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            prompt_ids = self._render(messages)
            if not self._fits(prompt_ids):
                log.warning(
                    "%s, turn %d exceeds the target's context with its response; skipped.",
                    prompt.id,
                    index + 1,
                )
                return
            turn = {
                name: _timed(self.decoders[name], prompt_ids, self.limits, samplings[name])
                for name in _rotated(list(self.decoders), number + index)
            }
            yield turn
            messages.append(self._answer(turn[BASELINE].decoding))

    def _sampling(self, number: int) -> Sampling:
        return Sampling.seeded(self.temperature, self.seed + number, self.target.device)

    def _render(self, messages: list[Message]) -> Tensor:  # [P]
        rendered = self.target.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        return torch.tensor(rendered["input_ids"], device=self.target.device)

    def _answer(self, decoding: Decoding) -> Message:
        tokens = list(decoding.tokens)
        text = self.target.tokenizer.decode(tokens, skip_special_tokens=True)
        return {"role": "assistant", "content": text}

    def _fits(self, prompt_ids: Tensor) -> bool:
        context = self.target.context_length
        return context is None or len(prompt_ids) + self.limits.max_new_tokens <= context

    def _result(self, turns: Sequence[Turn], name: str) -> DrafterResult:
        identical = all(
            turn[name].decoding.tokens == turn[BASELINE].decoding.tokens for turn in turns
        )
        return DrafterResult(
            _speed([turn[name] for turn in turns]),
            sum((turn[name].decoding.acceptance for turn in turns), AcceptanceStats()),
            num_identical=int(identical) if self.temperature == 0 else None,
        )


def _speed(timed: Sequence[Timed]) -> Speed:
    return Speed(sum(len(t.decoding.tokens) for t in timed), sum(t.seconds for t in timed))


def _rotated(names: list[str], steps: int) -> list[str]:
    start = steps % len(names)
    return names[start:] + names[:start]


def _timed(decode: Decoder, prompt_ids: Tensor, limits: Limits, sampling: Sampling) -> Timed:
    _wait(prompt_ids.device)
    started = time.perf_counter()
    decoding = decode(prompt_ids, limits, sampling)
    _wait(prompt_ids.device)
    return Timed(decoding, time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    """A GPU works on after a call has returned; a clock is read only when it is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
