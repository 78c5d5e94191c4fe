"""Hidden states on disk, made once and read in every epoch and by every run with the same target.

    DIR/cache.json                     whose states they are
    DIR/states-<digest>.safetensors    a few samples: [T, (1 + A) * H] under the digest of their tokens

A sample's states depend on its tokens alone, so it is known by those, whatever data set or run it is
from. The name of a shard ends in the digest of its bytes, and there is no list of shards: a file that
does not match its name is removed, and what was in it computed again. Files are read for that when they
are new, or have changed since (by size and time): a cache may be terabytes.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sfdd.artifacts import (
    Provenance,
    atomic_path,
    digest_bytes,
    ensure_writable,
    environment,
    write_text,
)
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import ArtifactError
from sfdd.progress import Progress, ProgressCallback
from sfdd.targets.transfer import to_device
from sfdd.targets.transformers_target import TransformersTarget

log = logging.getLogger(__name__)

_RECORD, _FOUND_SOUND = "cache.json", ".found-sound.json"
_SHARD_NAME = re.compile(r"states-([0-9a-f]{32})\.safetensors")
_OPEN_SHARDS = 512


class StatesCache:
    """The samples in one directory, as a source of states; `caching.complete` brings in what is missing.

    Attributes:
        aux_layers: whose states are in it besides the last ones. A drafter that reads the last ones alone
            is content with a cache made for one that reads others, too.
        row_bytes: what a token takes.
    """

    def __init__(
        self,
        directory: Path,
        target: TransformersTarget,
        aux_layers: Sequence[int],
        dtype: torch.dtype,
        max_length: int | None,
    ) -> None:
        """Open a directory, which need not exist yet.

        Raises:
            ArtifactError: it holds states of other provenance, or something else.
        """
        recorded = _recorded(directory)
        self.directory, self.dtype = directory, dtype
        self.aux_layers = tuple(aux_layers)
        if recorded and not aux_layers:
            self.aux_layers = tuple(recorded.identity.get("aux_layers", ()))
        self._provenance = Provenance(
            {
                **target.identity,
                "max_length": max_length,
                "states_dtype": str(dtype).removeprefix("torch."),
                "aux_layers": list(self.aux_layers),
            },
            {"target": target.source.reference, **environment()},
        )
        if recorded and (differences := recorded.differences(self._provenance)):
            raise ArtifactError(
                f"The cache {directory} holds hidden states of another kind: {'; '.join(differences)}. "
                "Name another directory with --cache, or delete this one."
            )
        self._device, self._width, self._wants_aux = (
            target.device,
            target.hidden_size,
            bool(aux_layers),
        )
        self._columns = self._width * (1 + len(self.aux_layers))
        self.row_bytes = self._columns * dtype.itemsize
        self._shard_of: dict[str, Path] = {}
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(_open_shard)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="states")
        self._coming: dict[str, Future[Tensor]] = {}

    def start(self) -> None:
        """Say whose states the directory holds; raises ArtifactError where it cannot be written."""
        with _names_the_option():
            ensure_writable(self.directory)
            write_text(self.directory / _RECORD, self._provenance.to_json())

    def remove_damaged(self, on_progress: ProgressCallback) -> None:
        """Remove the shards that are not what their names say, and unfinished ones."""
        for unfinished in self.directory.glob(".states-*.tmp"):  # of a process that was killed
            unfinished.unlink(missing_ok=True)
        sound = self._found_sound()
        shards = [shard for shard in self._shards() if sound.get(shard.name) != _stamp(shard)]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            verdicts = zip(shards, pool.map(_is_sound, shards), strict=True)
            for done, (shard, is_sound) in enumerate(verdicts, start=1):
                if not is_sound:
                    log.warning("%s is damaged; its hidden states are computed again.", shard)
                    shard.unlink()
                on_progress(Progress("checking the cache", "files", done, len(shards)))
        stamps = {shard.name: _stamp(shard) for shard in self._shards()}
        with _names_the_option():
            write_text(self.directory / _FOUND_SOUND, json.dumps(stamps))

    def _found_sound(self) -> Mapping[str, list[int]]:
        """Stamps of the shards that were sound when they were last read."""
        try:
            stamps = json.loads((self.directory / _FOUND_SOUND).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return stamps if isinstance(stamps, dict) else {}

    def missing(
        self, conversations: Sequence[TokenizedConversation]
    ) -> dict[str, TokenizedConversation]:
        """The distinct samples that are not in the directory, by key, longest first.

        So they make batches with little padding, and memory runs out at once or not at all.
        """
        self._shard_of = {
            key: shard for shard in self._shards() for key in list(self._open(shard).keys())
        }
        missing = {key: c for c in conversations if (key := _key(c)) not in self._shard_of}
        return dict(sorted(missing.items(), key=lambda item: -len(item[1])))

    def write(self, samples: Mapping[str, Tensor]) -> None:  # [T, (1 + A) * H] each
        """Add some samples as one shard, whole or not at all."""
        data = save(dict(samples))
        name = f"states-{digest_bytes(data)}.safetensors"
        with _names_the_option(), atomic_path(self.directory / name) as temporary:
            temporary.write_bytes(data)

    def read(
        self, conversations: Sequence[TokenizedConversation], input_ids: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """See `States`."""
        rows = torch.zeros(*input_ids.shape, self._columns, dtype=self.dtype)  # [B, T, (1 + A) * H]
        for row, conversation in enumerate(conversations):
            key = _key(conversation)
            fetched = self._coming.pop(key, None)
            rows[row, : len(conversation)] = fetched.result() if fetched else self._fetch(key)
        rows = to_device(rows, self._device)
        return rows[..., : self._width], self._aux(rows)

    def expect(self, coming: Sequence[Sequence[TokenizedConversation]]) -> None:
        """See `States`: read in the background while the step before is computed."""
        keys = [_key(conversation) for conversations in coming for conversation in conversations]
        self._coming = {key: self._reader.submit(self._fetch, key) for key in keys}

    def _aux(self, rows: Tensor) -> Tensor | None:
        return rows[..., self._width :] if self._wants_aux else None

    def _fetch(self, key: str) -> Tensor:  # [T, (1 + A) * H]
        try:
            states: Tensor = self._open(self._shard_of[key]).get_tensor(key)
        except (OSError, SafetensorError) as error:
            raise ArtifactError(
                f"Cannot read {self._shard_of[key]}: {error}. Run the same command again: it computes "
                "what is missing."
            ) from error
        return states.clone()  # or the disk would be read when it is used

    def _shards(self) -> list[Path]:
        return sorted(p for p in self.directory.glob("states-*") if _SHARD_NAME.fullmatch(p.name))


def _key(conversation: TokenizedConversation) -> str:
    return digest_bytes(conversation.input_ids.tobytes())


def _recorded(directory: Path) -> Provenance | None:
    """Whose states a directory holds; None where there are none yet."""
    try:
        return Provenance.from_json((directory / _RECORD).read_text(encoding="utf-8"))
    except NotADirectoryError:
        raise ArtifactError(f"{directory} is not a directory. Name another with --cache.") from None
    except FileNotFoundError:
        if directory.is_dir() and any(
            not path.name.startswith(".") for path in directory.iterdir()
        ):
            raise ArtifactError(
                f"{directory} is not a cache of hidden states, and it is not empty. Name another "
                "directory with --cache."
            ) from None
        return None
    except (OSError, ValueError) as error:
        raise ArtifactError(
            f"{directory / _RECORD} cannot be read ({error}). Name another directory with --cache, or "
            "delete this one."
        ) from error


def _stamp(shard: Path) -> list[int]:
    status = shard.stat()
    return [status.st_size, status.st_mtime_ns]


def _is_sound(shard: Path) -> bool:
    name = _SHARD_NAME.fullmatch(shard.name)
    return name is not None and name[1] == digest_bytes(shard.read_bytes())


def _open_shard(shard: Path) -> Any:
    return safe_open(shard, framework="pt")


@contextmanager
def _names_the_option() -> Iterator[None]:
    """Says --cache where the error of a failed write says --run."""
    try:
        yield
    except ArtifactError as error:
        raise ArtifactError(str(error).replace("--run", "--cache")) from error
