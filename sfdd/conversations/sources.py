"""Chat data sets as the user has them: read record by record, and written back in part, untouched.

Nothing is decided here about what a record means. A record that cannot be read is handed on with the
reason, so that it is counted; only a data set that cannot be opened at all is an error.
"""

import glob
import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from sfdd.conversations.hub import DatasetSource
from sfdd.conversations.messages import is_unicode
from sfdd.conversations.recognition import open_file
from sfdd.conversations.records import Source
from sfdd.conversations.rows import first_line
from sfdd.errors import DataError

_DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".arrow")
_PACKED_SUFFIXES = (".gz", ".zst")
_FILE_SUFFIXES = (*_DATA_SUFFIXES, *_PACKED_SUFFIXES, ".txt", ".csv", ".tsv")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_FILES_LOOKED_AT = 10_000


def expand_names(names: Sequence[str]) -> list[str]:
    """The names with every pattern such as `data/**/*.jsonl` replaced by the files that match it, sorted.

    Raises:
        DataError: none matches.
    """
    return [expanded for name in names for expanded in _expand(name)]


def _expand(name: str) -> list[str]:
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    except (OSError, ValueError, RuntimeError):
        return [name]  # `open_source` says what is wrong with it
    if not glob.has_magic(name) or name.startswith("hf:") or exists:
        return [name]
    matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - that finds hidden files
    found = [match for match in matches if Path(match).is_file()] or matches
    if not found:
        raise DataError(
            f"No file matches {name}. Quote the pattern, and see that its folder exists."
        )
    return found


def open_source(name: str) -> Source:
    """Recognise a data set by what it holds.

    Args:
        name: a JSONL, JSON, Parquet or Arrow file, plain or compressed with gzip or zstd; a folder made
            by `Dataset.save_to_disk`; or a hub id (`org/name`, `hf:name`, `hf:name:split`,
            `hf:name:config` or `hf:name:config:split`).

    Raises:
        DataError: it does not exist, is empty, or is none of these.
    """
    if not is_unicode(name):
        raise DataError(f"The name of data set {name!r} is not valid UTF-8; rename it.")
    try:
        return _open(name)
    except (OSError, ValueError, RuntimeError) as error:  # loops of links, unknown users, NUL …
        raise DataError(f"Data set {name[:200]!r} cannot be opened: {error}.") from error


def _open(name: str) -> Source:
    if name.startswith("hf:"):
        return DatasetSource.from_hub(name)
    path = Path(name).expanduser().resolve()
    if path.is_dir():
        return _open_folder(name, path)
    if path.is_file():
        return open_file(name, path)
    if path.exists() or path.suffix in _FILE_SUFFIXES or not _HUB_ID.fullmatch(name):
        raise DataError(
            f"Data set {name} does not exist. Give a JSONL, JSON, Parquet or Arrow file, a folder made "
            "by save_to_disk, or a hub id such as org/name."
        )
    return DatasetSource.from_hub(name)


def _open_folder(name: str, path: Path) -> DatasetSource:
    try:
        return DatasetSource.from_disk(name, path)
    except DataError:
        raise
    except Exception as error:
        if any((path / file).exists() for file in ("state.json", "dataset_dict.json")):
            raise DataError(
                f"Data set {name} was made by save_to_disk and is damaged: {first_line(error)}"
            ) from error
        pattern = _pattern(path)
        advice = (
            f"give the files in it: '{name.rstrip('/')}/{pattern}'"
            if pattern
            else "it holds no data"
        )
        raise DataError(
            f"Folder {name} is not a data set made by save_to_disk; {advice}."
        ) from error


def _pattern(folder: Path) -> str:
    """A pattern for the data files in a folder, of the most frequent kind; "" if there are none."""
    for depth, files in (("", folder.glob("*")), ("**/", folder.rglob("*"))):
        kinds = Counter(_kind(file) for file in islice(files, _FILES_LOOKED_AT))
        del kinds[""]
        if kinds:
            return f"{depth}*{kinds.most_common(1)[0][0]}"
    return ""


def _kind(file: Path) -> str:
    """The suffix of a data file, compression included; "" for any other file."""
    packed = file.suffix if file.suffix in _PACKED_SUFFIXES else ""
    suffix = Path(file.stem).suffix if packed else file.suffix
    return suffix + packed if suffix in _DATA_SUFFIXES and not file.name.startswith(".") else ""
