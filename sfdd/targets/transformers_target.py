"""A target model on the transformers backend: its body, its head, and the statistics of its tokens.

The body turns token ids into last hidden states; the head turns hidden states into logits. Keeping them
apart lets the head run only where a token is supervised, a few rows at a time: a [B, T, V] tensor of
logits never exists.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import TargetError
from sfdd.targets.body import ReturnStates, new_cache, recorded_layers, run_body
from sfdd.targets.config import LOGITS_MEMORY
from sfdd.targets.loading import (
    TargetSource,
    context_length,
    tokenizer_identity,
    usable_length,
)
from sfdd.targets.statistics import (
    STATISTICS,
    TokenStats,
    as_token_stats,
    logits_statistics,
    rows_per_chunk,
)
from sfdd.targets.transfer import fetching, to_device

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class TransformersTarget:
    """A frozen causal language model and its tokenizer."""

    def __init__(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", source: TargetSource
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.source = source
        prefix = model.base_model_prefix
        if not isinstance(getattr(model, prefix, None), nn.Module):
            raise TargetError(
                f"Target {source.name} ({type(model).__name__}) does not separate its body from its "
                "language-model head in a way sfdd knows. Use a decoder-only text model."
            )
        self._body = getattr(model, prefix)
        # The model's own forward minus its body: logit scaling and soft-capping included, for every
        # architecture, without knowing any.
        self._head = copy.copy(model)
        self._head._modules = {**model._modules, prefix: ReturnStates()}
        self.logits_memory = LOGITS_MEMORY

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> "TransformersTarget":
        """Load by directory, GGUF file, hub id or `smollm2`; see `TargetSource` for errors."""
        source = TargetSource(name, trust_remote_code)
        tokenizer = source.load_tokenizer()
        target = cls(source.load_model(dtype, device, attn_implementation), tokenizer, source)
        if len(tokenizer) > (rows := len(target.embedding.weight)):
            raise TargetError(
                f"The tokenizer of {name} has {len(tokenizer)} tokens, but the model embeds {rows}. "
                "Use the tokenizer that belongs to the model."
            )
        return target

    @property
    def config(self) -> "PreTrainedConfig":
        """The text model's configuration."""
        return self.model.config.get_text_config()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def hidden_size(self) -> int:
        return self.embedding.weight.shape[-1]

    @property
    def vocab_size(self) -> int:
        """V: the width of the logits, which may exceed the tokenizer's vocabulary."""
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def embedding(self) -> nn.Embedding:
        """The input embeddings, frozen."""
        return self.model.get_input_embeddings()

    @property
    def context_length(self) -> int | None:
        """Positions the model was made for; None where its configuration does not say."""
        return context_length(self.config)

    @property
    def _rope_type(self) -> str | None:
        return (getattr(self.config, "rope_parameters", None) or {}).get("rope_type")

    @property
    def rope_goes_by_length(self) -> bool:
        """Whether states depend on the longest conversation of a batch, so that each needs its own."""
        return self._rope_type == "longrope"

    def require_independent_states(self) -> None:
        """Raise TargetError where states would depend on what was computed before."""
        if self._rope_type == "dynamic":
            raise TargetError(
                f"Target {self.source.name} uses dynamic RoPE scaling, with which what it computes would "
                "depend on the conversations before. Use a target with another rope_type."
            )

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        """What must be equal for two targets to give the same scores."""
        return {
            "target": self.source.fingerprint(self.model.config),
            **tokenizer_identity(self.tokenizer),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "vocab_size": self.vocab_size,
        }

    def hidden_states(
        self,
        input_ids: Tensor,  # [B, T]
        attention_mask: Tensor | None = None,  # [B, T], 1 = token
        cache: "Cache | None" = None,
    ) -> Tensor:
        """Last hidden states [B, T, H], after the final norm: what the head reads; see `run_body`."""
        return run_body(self._body, input_ids=input_ids, attention_mask=attention_mask, cache=cache)

    def hidden_and_aux_states(
        self,
        input_ids: Tensor,  # [B, T]
        attention_mask: Tensor | None = None,  # [B, T], 1 = token
        cache: "Cache | None" = None,
        aux_layers: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """`hidden_states`, and the residual streams after `aux_layers` side by side [B, T, A * H]."""
        if not aux_layers:
            return self.hidden_states(input_ids, attention_mask, cache), None
        with recorded_layers(self._body, aux_layers) as after:
            hidden = self.hidden_states(input_ids, attention_mask, cache)
        return hidden, torch.cat([after[i] for i in aux_layers], dim=-1)

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [N, H] -> float32 logits [N, V], post-processed as the model itself does."""
        states = hidden_states.to(self.model.dtype)[None]
        return self._head(inputs_embeds=states, use_cache=False).logits[0].float()

    @property
    def rows_per_chunk(self) -> int:
        """How many rows of logits are computed at once, within `logits_memory` MiB."""
        return rows_per_chunk(self.device.type, self.vocab_size, self.logits_memory)

    def usable_length(self, max_length: int) -> int:
        """`max_length`, or the target's context where that is shorter; says so."""
        return usable_length(max_length, self.context_length)

    def token_stats(
        self,
        batch: Sequence[TokenizedConversation],
        padding_side: str = "right",
        prefill_tokens: int | None = None,
    ) -> list[TokenStats]:
        """One forward pass over some conversations; statistics of every supervised token.

        The distribution scored for supervised token t is the one at position t - 1, which predicts it.

        Args:
            prefill_tokens: forward a conversation that is longer in pieces of so many tokens.
        """
        return self.start_token_stats(batch, padding_side, prefill_tokens)()

    @torch.inference_mode()
    def start_token_stats(
        self,
        batch: Sequence[TokenizedConversation],
        padding_side: str = "right",
        prefill_tokens: int | None = None,
    ) -> Callable[[], list[TokenStats]]:
        """`token_stats` in two steps: this one gives a GPU the work, the call returned waits for it.

        With the next batch started in between, a GPU never waits for its results to be fetched.
        """
        self.require_independent_states()
        counts = [conversation.num_supervised_tokens for conversation in batch]
        if self.rope_goes_by_length:  # or of a piece
            values = torch.cat([self._statistics([c], padding_side, None) for c in batch], dim=1)
        else:
            values = self._statistics(batch, padding_side, prefill_tokens)
        fetch = fetching(values)
        return lambda: [as_token_stats(part) for part in torch.split(fetch(), counts, dim=1)]

    def _statistics(
        self,
        batch: Sequence[TokenizedConversation],
        padding_side: str,
        prefill_tokens: int | None,
    ) -> Tensor:
        """The statistics of every supervised token, conversation by conversation: [6, N]."""
        input_ids, attention_mask, starts = self._pad(batch, padding_side)
        rows, columns = (to_device(x, self.device) for x in _supervised_positions(batch, starts))
        next_ids = input_ids[rows, columns]  # [N]
        if prefill_tokens and len(batch) == 1 and input_ids.shape[1] > prefill_tokens:
            return self._statistics_in_pieces(input_ids, batch[0], next_ids, prefill_tokens)
        hidden = self.hidden_states(input_ids, attention_mask)  # [B, T, H]
        predicting = hidden[rows, columns - 1]  # [N, H]
        del hidden
        return self._head_statistics(predicting, next_ids)

    def _statistics_in_pieces(
        self,
        input_ids: Tensor,  # [1, T]
        conversation: TokenizedConversation,
        next_ids: Tensor,  # [N]
        prefill_tokens: int,
    ) -> Tensor:
        """`_statistics` of one long conversation: a piece of it at a time, and its KV cache."""
        cache = new_cache()
        predicting = conversation.loss_mask.nonzero()[0] - 1  # [N]
        values, first = [], 0
        for start in range(0, input_ids.shape[1], prefill_tokens):
            piece = input_ids[:, start : start + prefill_tokens]
            hidden = self.hidden_states(piece, cache=cache)[0]  # [prefill_tokens, H]
            last = int(np.searchsorted(predicting, start + piece.shape[1]))
            wanted = to_device(torch.from_numpy(predicting[first:last] - start), self.device)
            values.append(self._head_statistics(hidden[wanted], next_ids[first:last]))
            first = last
        return torch.cat(values, dim=1)

    def _head_statistics(self, predicting: Tensor, next_ids: Tensor) -> Tensor:
        """Hidden states [N, H] and the tokens that follow [N] -> statistics [6, N], chunk by chunk."""
        values = torch.empty(len(STATISTICS), len(next_ids), device=self.device)
        for first in range(0, len(next_ids), self.rows_per_chunk):
            chunk = slice(first, first + self.rows_per_chunk)
            values[:, chunk] = logits_statistics(self.logits(predicting[chunk]), next_ids[chunk])
        return values

    def _pad(
        self, batch: Sequence[TokenizedConversation], side: str
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """input_ids [B, T], attention mask [B, T] where one is needed, first column of each row."""
        width = max(map(len, batch))
        # Any id pads: it is never read.
        input_ids = torch.zeros(len(batch), width, dtype=torch.int64)
        starts = [width - len(c) if side == "left" else 0 for c in batch]
        for row, (conversation, start) in enumerate(zip(batch, starts, strict=True)):
            ids = torch.from_numpy(conversation.input_ids)
            input_ids[row, start : start + len(ids)] = ids
        attention_mask = None
        if side == "left":
            attention_mask = torch.arange(width) >= torch.tensor(starts)[:, None]
            attention_mask = to_device(attention_mask.long(), self.device)
        return to_device(input_ids, self.device), attention_mask, starts


def _supervised_positions(
    batch: Sequence[TokenizedConversation], starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Row and column of every supervised token in the padded batch, conversation by conversation."""
    columns = [
        torch.from_numpy(conversation.loss_mask.nonzero()[0] + start)
        for conversation, start in zip(batch, starts, strict=True)
    ]
    rows = [torch.full_like(column, row) for row, column in enumerate(columns)]
    return torch.cat(rows), torch.cat(columns)
