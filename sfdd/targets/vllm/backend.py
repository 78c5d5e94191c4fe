"""The backend that runs a target inside vLLM's engine."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import TargetError
from sfdd.targets.config import BackendConfig
from sfdd.targets.loading import (
    TargetSource,
    context_length,
    tokenizer_identity,
    usable_length,
    warn_of_lower_precision,
)
from sfdd.targets.statistics import TokenStats, as_token_stats
from sfdd.targets.vllm import private
from sfdd.targets.vllm.engine import (
    check_architecture,
    check_version,
    engine_arguments,
    resolve_dtype,
    start_engine,
    vllm_version,
)

if TYPE_CHECKING:
    from vllm import LLMEngine

# Requests in the engine at once, as a multiple of what it computes at once: it never waits for the next.
_AHEAD = 2


class VllmBackend:
    """A `Backend`."""

    name = "vllm"

    def __init__(
        self, engine: "LLMEngine", source: TargetSource, settings: Mapping[str, Any]
    ) -> None:
        """Take an engine that was started with `settings`."""
        scheduler = engine.vllm_config.scheduler_config
        self._engine = engine
        self._window = _AHEAD * scheduler.max_num_seqs
        self._numbers = count()
        self.source = source
        self.tokenizer = source.load_tokenizer()
        self.vocab_size = engine.model_config.get_vocab_size()
        self.batch_tokens = scheduler.max_num_batched_tokens
        self.computed_tokens = 0
        self.identity: Mapping[str, Any] = self._identity()
        size = engine.vllm_config.parallel_config.tensor_parallel_size
        self.engine = f"vLLM {vllm_version()}, {self.identity['dtype']}, tensor parallel {size}"
        self.about: Mapping[str, Any] = {
            "backend": self.name,
            "backend_version": vllm_version(),
            "engine_args": dict(settings),
        }

    @classmethod
    def start(cls, source: TargetSource, config: BackendConfig, max_length: int) -> "VllmBackend":
        """Start an engine for a target; see `open_backend` for errors."""
        check_version()
        architecture = check_architecture(source)
        dtype = resolve_dtype(source, config.dtype)
        warn_of_lower_precision(source, dtype)
        length = min(max_length, context_length(source.config) or max_length)
        arguments = engine_arguments(source, config, architecture, dtype, length)
        return cls(start_engine(source, arguments), source, arguments)

    def _identity(self) -> dict[str, Any]:
        model, cache = self._engine.model_config, self._engine.vllm_config.cache_config
        return {
            "target": self.source.fingerprint(self.source.config),
            **tokenizer_identity(self.tokenizer),
            "dtype": str(model.dtype).removeprefix("torch."),
            "vocab_size": self.vocab_size,
            "backend": self.name,
            "head_dtype": str(model.head_dtype).removeprefix("torch."),
            "quantization": model.quantization,
            "kv_cache_dtype": cache.cache_dtype,
        }

    def usable_length(self, max_length: int) -> int:
        return usable_length(max_length, context_length(self.source.config))

    def token_stats(
        self, samples: Sequence[TokenizedConversation]
    ) -> Iterator[tuple[Sequence[TokenizedConversation], Sequence[TokenStats]]]:
        """Samples as the engine finishes them; no more than a window of them is in it.

        Raises:
            TargetError: the engine failed; the samples given so far are right.
        """
        waiting = deque(samples)
        running: dict[str, TokenizedConversation] = {}
        while waiting or running:
            try:
                while waiting and len(running) < self._window:
                    sample = waiting.popleft()
                    running[self._add(sample)] = sample
                outputs = self._engine.step()
            except Exception as error:
                raise self._failed(error) from error
            done = [
                (running.pop(output.request_id), output.outputs.data)
                for output in outputs
                if output.finished
            ]
            if done:
                self.computed_tokens += sum(len(sample) for sample, _ in done)
                yield [s for s, _ in done], [self._checked(s, values) for s, values in done]

    def close(self) -> None:
        private.shut_down(self._engine)

    def _add(self, sample: TokenizedConversation) -> str:
        from vllm import PoolingParams
        from vllm.inputs import tokens_input

        from sfdd.targets.vllm.pooler import TASK, request_settings

        number = str(next(self._numbers))
        self._engine.add_request(
            number,
            tokens_input(sample.input_ids.tolist()),
            PoolingParams(task=TASK, extra_kwargs=request_settings(sample.loss_mask)),
        )
        return number

    def _checked(self, sample: TokenizedConversation, values: Any) -> TokenStats:  # [N, 6]
        if len(values) != sample.num_supervised_tokens:
            raise TargetError(
                f"vLLM gave {len(values)} of {sample.num_supervised_tokens} tokens of {sample.id}: "
                "a fault of sfdd or of this version of vLLM. Score with --backend transformers."
            )
        return as_token_stats(values.T)

    def _failed(self, error: Exception) -> TargetError:
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        return TargetError(
            f"vLLM's engine stopped: {said.rstrip('.')}. What was scored is kept: run the same command "
            "again to continue; if it stops again, lower --batch-tokens, --max-length or "
            "--gpu-memory-utilization."
        )
