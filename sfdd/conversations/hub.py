"""Data sets of the `datasets` library: saved in a folder, or on the hub."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sfdd.artifacts import atomic_path, digest_files
from sfdd.conversations.records import Record
from sfdd.conversations.rows import conversation_columns, rows_at_once, to_python
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
        """Open what `save_to_disk` wrote.

        Raises:
            Exception: of any kind that `datasets` has for a folder that is something else.
        """
        from datasets import load_from_disk

        return cls(str(path), _only_split(name, load_from_disk(str(path))))

    @classmethod
    def from_hub(cls, name: str) -> "DatasetSource":
        """Load a data set by its hub id, with or without a configuration and a split.

        Raises:
            DataError: it cannot be had.
        """
        from datasets import load_dataset

        repository, *parts = name.removeprefix("hf:").split(":")
        if len(parts) > 2 or not all([repository, *parts]):
            raise DataError(
                f"{name} is no hub id: write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIGURATION:SPLIT."
            )
        try:
            configuration, split = _configuration_and_split(repository, parts)
            loaded = load_dataset(repository, configuration, split=split)
        except Exception as error:
            # The second line names the configurations where one has to be chosen.
            reason = " ".join(str(error).splitlines()[:2]) or type(error).__name__
            raise DataError(
                f"Data set {name} is neither a file here nor a hub data set that can be loaded: {reason}"
            ) from error
        return cls(name, _only_split(name, loaded))

    def records(self) -> Iterator[Record]:
        """The rows, with only the columns of a conversation."""
        columns = conversation_columns(self.dataset.column_names)
        # As Arrow: `datasets` itself cannot tell a null from a key that is absent.
        rows = self.dataset.select_columns(columns).with_format("arrow")
        step = rows_at_once(rows.data.nbytes, rows.data.num_rows)
        for start in range(0, len(rows), step):
            pairs = [
                pair
                for batch in rows[start : start + step].to_batches()
                for pair in to_python(batch)
            ]
            for row, (value, error) in enumerate(pairs, start=start):
                yield Record(row, value, error)

    def count(self) -> int:
        """Known to the data set."""
        return len(self.dataset)

    @property
    def file_name(self) -> str:
        """The last part of its name; written as Parquet."""
        return f"{Path(self.name.removeprefix('hf:').replace(':', '-')).name}.parquet"

    def fingerprint(self) -> str:
        """Of its files, which the library keeps; else what the library says."""
        files = [Path(file["filename"]) for file in self.dataset.cache_files]
        return digest_files(files) if files else str(self.dataset._fingerprint)

    def write_kept(self, keep: Callable[[int], bool], destination: Path) -> None:
        """The rows with all of their columns."""
        rows = [row for row in range(len(self.dataset)) if keep(row)]
        with atomic_path(destination) as temporary:
            self.dataset.select(rows).to_parquet(str(temporary))


def _configuration_and_split(repository: str, parts: list[str]) -> tuple[str | None, str | None]:
    """A part alone is a split if there is one of that name, else a configuration."""
    if len(parts) == 2:
        return parts[0], parts[1]
    if not parts:
        return None, None
    from datasets import get_dataset_config_names, get_dataset_split_names

    only = parts[0]
    configurations = get_dataset_config_names(repository)
    if only not in configurations:
        return None, only
    try:
        splits = get_dataset_split_names(repository)
    except ValueError:  # several configurations, of which none is the default
        splits = []
    return (None, only) if only in splits else (only, None)


def _only_split(name: str, loaded: Any) -> "Dataset":
    """The data set itself, `train` of several splits, or the only one."""
    if not isinstance(loaded, dict):
        return loaded
    if "train" in loaded:
        return loaded["train"]
    if len(loaded) == 1:
        return next(iter(loaded.values()))
    raise DataError(
        f"Data set {name} has the splits {', '.join(loaded)}; name one: "
        f"hf:{name.removeprefix('hf:')}:SPLIT on the hub, the split's own folder on disk."
    )
