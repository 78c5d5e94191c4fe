"""`--token-weight flatness`: the loss weight of each token is its flatness, as `sfdd score` stored it.

A record of the training data is found among the scored ones by the hash of its content, which does not
depend on the file it is in; its row holds the flatness of the supervised tokens of all of its samples,
one after the other.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow.parquet as pq

from sfdd.artifacts import (
    Provenance,
    RunDirectory,
    digest_bytes,
    digest_json,
    read_parquet_provenance,
)
from sfdd.conversations.conversation import Origin, TokenizedConversation
from sfdd.errors import ArtifactError
from sfdd.training.batches import Floats

_HASH, _FLATNESS = "content_hash", "token_flatness"
# What decides which tokens there are and how flat; dtype, batching and so on change it hardly at all.
_SAME = ("target", "tokenizer", "chat_template", "reasoning", "rewritten", "last_turn_only")

Samples: TypeAlias = Sequence[TokenizedConversation]


class FlatnessWeights:
    """The weights of the samples it was made for."""

    def __init__(self, weights: Mapping[tuple[Origin, int], Floats]) -> None:
        self._weights = weights

    def __call__(self, conversation: TokenizedConversation) -> Floats:  # [T], 0 where unsupervised
        return self._weights[conversation.origin, conversation.part]

    @property
    def digest(self) -> str:
        """Identity of all of them."""
        return digest_json([digest_bytes(weights.tobytes()) for weights in self._weights.values()])


def flatness_weights(
    run: RunDirectory, samples: Samples, identity: Mapping[str, Any]
) -> FlatnessWeights:
    """Find the flatness of the supervised tokens of some samples among the scores of a run.

    Args:
        identity: of the target and the mask by which the samples were made.

    Raises:
        ArtifactError: the run has no token scores, they are of another target or mask, or a sample's are
            not among them.
    """
    path = run.scores
    if not path.is_file() or _FLATNESS not in pq.read_schema(path).names:
        what = "holds no flatness of tokens" if path.is_file() else "does not exist"
        raise ArtifactError(
            f"--token-weight flatness reads {path}, which {what}. Run 'sfdd score' with --token-scores."
        )
    _require_same(path, identity)
    stored = _read(path, {sample.content_hash for sample in samples})
    weights: dict[tuple[Origin, int], Floats] = {}
    for parts in _by_record(samples):
        flatness = stored.get(parts[0].content_hash)
        if flatness is None:
            raise ArtifactError(
                f"--token-weight flatness found no scores of conversation {parts[0].id} in {path}. Train "
                "on data that were scored in this run."
            )
        for part, of_part in zip(parts, _divide(flatness, parts, path), strict=True):
            weights[part.origin, part.part] = _spread(of_part, part)
    return FlatnessWeights(weights)


def _require_same(path: Path, identity: Mapping[str, Any]) -> None:
    scored = read_parquet_provenance(path).identity
    names = [name for name in _SAME if name in identity]
    before, now = ({name: side.get(name) for name in names} for side in (scored, identity))
    if differences := Provenance(before).differences(Provenance(now)):
        raise ArtifactError(
            f"--token-weight flatness reads {path}, but the scores there are of other tokens: "
            f"{'; '.join(differences)}. Train as was scored, or score again."
        )


def _read(path: Path, wanted: set[str]) -> dict[str, Floats]:
    """The flatness of each scored record that is wanted, by content hash."""
    found: dict[str, Floats] = {}
    for rows in pq.ParquetFile(path).iter_batches(columns=[_HASH, _FLATNESS], batch_size=4096):
        values = (
            rows[_FLATNESS].flatten().to_numpy(zero_copy_only=False)
        )  # of all rows; nulls have none
        offsets = np.cumsum([0, *rows[_FLATNESS].value_lengths().fill_null(0).to_pylist()])
        for i, content_hash in enumerate(rows[_HASH].to_pylist()):
            if content_hash in wanted and offsets[i + 1] > offsets[i]:
                found[content_hash] = values[offsets[i] : offsets[i + 1]].astype(np.float32)
    return found


def _by_record(samples: Samples) -> list[list[TokenizedConversation]]:
    """The samples of each record, in order."""
    records: dict[Origin, list[TokenizedConversation]] = {}
    for sample in samples:
        records.setdefault(sample.origin, []).append(sample)
    return [sorted(parts, key=lambda sample: sample.part) for parts in records.values()]


def _divide(flatness: Floats, parts: Sequence[TokenizedConversation], path: Path) -> list[Floats]:
    """A record's flatness, sample by sample.

    A record of one sample may have been scored at a greater length than it is trained at: what it is cut
    to begins alike. Of several samples each may have been cut, so all must be there.
    """
    counts = [part.num_supervised_tokens for part in parts]
    if parts[0].parts == 1 and len(flatness) >= counts[0]:
        return [flatness[: counts[0]]]
    if len(flatness) == sum(counts):
        return np.split(flatness, np.cumsum(counts)[:-1])
    raise ArtifactError(
        f"--token-weight flatness needs {sum(counts)} values for conversation {parts[0].id}, and {path} "
        f"has {len(flatness)}. Train with the --max-length it was scored with."
    )


def _spread(flatness: Floats, sample: TokenizedConversation) -> Floats:  # [N] -> [T]
    weights = np.zeros(len(sample), np.float32)
    weights[sample.loss_mask] = flatness
    return weights
