"""Data sets of the `datasets` library: saved in a folder, or on the hub."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfdd.artifacts import atomic_path, digest_files
from sfdd.conversations.records import Record
from sfdd.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class DatasetSource:
    """A `datasets` data set, from a saved folder or the hub."""

    name: str
    dataset: "Dataset" = field(repr=False)

    @classmethod
    def from_disk(cls, name: str, path: Path) -> "DatasetSource":
        from datasets import load_from_disk

        try:
            loaded = load_from_disk(str(path))
        except Exception as error:
            raise DataError(
                f"Folder {name} is not a data set made by save_to_disk ({error}). "
                "Name the files in it instead."
            ) from error
        return cls(str(path), _only_split(name, loaded))

    @classmethod
    def from_hub(cls, name: str) -> "DatasetSource":
        from datasets import load_dataset

        repository, *rest = name.removeprefix("hf:").split(":")
        configuration = rest[0] if len(rest) > 1 else None
        split = rest[-1] if rest else None
        try:
            loaded = load_dataset(repository, configuration, split=split)
        except Exception as error:
            first_line = next(iter(str(error).splitlines()), type(error).__name__)
            raise DataError(
                f"Data set {name} is neither a file here nor a hub data set that can be loaded: "
                f"{first_line}"
            ) from error
        return cls(name, _only_split(name, loaded))

    def records(self) -> Iterator[Record]:
        for row, value in enumerate(self.dataset):
            yield Record(row, value)

    def count(self) -> int:
        return len(self.dataset)

    @property
    def file_name(self) -> str:
        return f"{Path(self.name.removeprefix('hf:').replace(':', '-')).name}.parquet"

    def fingerprint(self) -> str:
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        return digest_files(files) if files else str(self.dataset._fingerprint)

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        rows = [row for row in range(len(self.dataset)) if keep(row)]
        with atomic_path(destination) as temporary:
            self.dataset.select(rows).to_parquet(str(temporary))


def _only_split(name: str, loaded: Any) -> "Dataset":
    """The data set itself, `train` of several splits, or the only one."""
    if not isinstance(loaded, dict):
        return loaded
    if "train" in loaded:
        return loaded["train"]
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    raise DataError(
        f"Data set {name} has the splits {', '.join(loaded)}; name one: hf:{name}:SPLIT on the hub, "
        "the split's own folder on disk."
    )
