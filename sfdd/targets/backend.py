"""Which engine scores: one small face, and the choice between those that have it."""

import importlib.util
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import TargetError, UsageError
from sfdd.targets.config import BackendConfig
from sfdd.targets.loading import TargetSource
from sfdd.targets.statistics import TokenStats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class Backend(Protocol):
    """A target that can be scored, whatever runs it.

    Attributes:
        vocab_size: V, the width of the logits.
        identity: what must be equal for two backends to give the same scores.
        engine: what it is, in words, such as "transformers, float32 on cpu".
        about: what else a reader of the scores may want to know.
        batch_tokens: padded tokens per forward pass; lower than asked for if memory ran out.
        computed_tokens: so far, padding included.
    """

    source: TargetSource
    tokenizer: "PreTrainedTokenizerBase"
    vocab_size: int
    engine: str
    identity: Mapping[str, Any]
    about: Mapping[str, Any]
    batch_tokens: int
    computed_tokens: int

    def usable_length(self, max_length: int) -> int:
        """`max_length`, or the target's context where that is shorter; says so."""

    def token_stats(
        self, samples: Sequence[TokenizedConversation]
    ) -> Iterator[tuple[Sequence[TokenizedConversation], Sequence[TokenStats]]]:
        """Some samples in whatever order they are finished, each once, with their statistics.

        Raises:
            TargetError: the engine can do no more; what was given so far is right.
        """

    def close(self) -> None:
        """End the processes of the engine, if it has any."""


def open_backend(target: str, config: BackendConfig, max_length: int) -> Backend:
    """Load a target for scoring, and say with what.

    Args:
        max_length: of the longest sample that will be scored, unless the target's context is shorter.

    Raises:
        UsageError: settings contradict each other, or vLLM is wanted and not installed.
        TargetError: the target cannot be loaded.
    """
    source = TargetSource(target, config.trust_remote_code)
    backend: Backend
    if _wants_vllm(source, config):
        from sfdd.targets.vllm.backend import VllmBackend

        backend = VllmBackend.start(source, config, max_length)
    else:
        from sfdd.targets.transformers_backend import TransformersBackend

        backend = TransformersBackend.load(source, config)
    log.info("Scoring with %s.", backend.engine)
    return backend


def _vllm_is_installed() -> bool:
    spec = importlib.util.find_spec("vllm")
    return spec is not None and spec.origin is not None  # not a folder of that name


def _wants_vllm(source: TargetSource, config: BackendConfig) -> bool:
    """Whether vLLM is asked for, or fits where nothing is asked for."""
    installed = _vllm_is_installed()
    if config.backend == "vllm" or (config.backend == "auto" and config.only_of_vllm):
        if not installed:
            asked = "--backend vllm" if config.backend == "vllm" else config.only_of_vllm[0]
            raise UsageError(
                f"{asked} needs vLLM, which is not installed here. Install it with "
                "\"pip install 'sfdd[vllm]'\", or score with --backend transformers."
            )
        return True
    if config.backend == "transformers" or not installed or config.attn_implementation:
        return False
    import torch

    if config.device == "cpu" or not torch.cuda.is_available():
        return False
    from sfdd.targets.vllm.engine import check_architecture, check_version

    try:
        check_version()
        check_architecture(source)
    except TargetError as error:
        log.warning("%s Scoring with transformers instead.", error)
        return False
    return True
