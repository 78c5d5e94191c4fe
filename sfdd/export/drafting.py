"""One draft step with a loaded drafter and its target: the proof that the parts fit together."""

import torch

from sfdd.drafters.layer import token_embeddings
from sfdd.drafters.loading import drafter_from
from sfdd.errors import DrafterError
from sfdd.export.checkpoint import Checkpoint
from sfdd.export.layouts import as_trained
from sfdd.targets.transformers_target import TransformersTarget

_TOKENS = 8  # of the prompt; any will do
_EMBEDDINGS = "embed_tokens.weight"


def has_other_embeddings(checkpoint: Checkpoint, target: TransformersTarget) -> bool:
    """Whether a drafter holds embeddings that are not the target's; vLLM would read those."""
    own = checkpoint.tensors.get(_EMBEDDINGS)
    rows = target.embedding.weight
    return own is not None and not torch.equal(own.to(rows), rows)


@torch.inference_mode()
def draft_token(checkpoint: Checkpoint, target: TransformersTarget) -> int:
    """The target's id of the token that the drafter drafts after the first ids of the vocabulary.

    Raises:
        DrafterError: it cannot be loaded for the target, or drafts no token of the target's.
    """
    trained = as_trained(checkpoint)
    weights = {name: tensor for name, tensor in trained.tensors.items() if name != _EMBEDDINGS}
    drafter = drafter_from(checkpoint.directory, trained.config, weights, target)
    drafter = drafter.as_served(target.model.dtype)

    count = min(_TOKENS, target.vocab_size)
    ids = torch.arange(count, device=target.device)[None]  # [1, T]
    last, aux = target.hidden_and_aux_states(ids, aux_layers=drafter.aux_layers)
    states = drafter.fuse(last if aux is None else aux)[:, :-1]  # [1, T - 1, H]
    embeddings = token_embeddings(target.embedding, ids[:, 1:])  # [1, T - 1, H]
    states = drafter(embeddings, states)[0, -1:]  # [1, H]
    logits = drafter.head(target)(drafter.normed(states))[0]  # [D]
    if not bool(logits.isfinite().all()):
        raise DrafterError(
            f"A draft step with {target.source.name} gives logits that are not finite. "
            "Train the drafter again, or export it with --dtype bfloat16."
        )
    drafted = int(logits.argmax())
    chosen = drafter.draft_to_target
    return drafted if chosen is None else int(chosen[drafted])
