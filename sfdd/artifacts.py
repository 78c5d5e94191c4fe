"""The run directory, provenance and safe writing: how results survive and prove what they are.

Every artifact records where it came from (target, tokenizer, template, data, settings, versions) and
is checked against that when it is read, so scores of one target never filter data for another. Files
appear whole or not at all: they are written beside their destination and renamed into place.
"""

import fcntl
import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sfdd.errors import ArtifactError

log = logging.getLogger(__name__)

DEFAULT_RUN = Path("runs/default")
_RECORDED_PACKAGES = ("sfdd", "torch", "transformers", "tokenizers", "pyarrow")


@dataclass(frozen=True)
class RunDirectory:
    """The paths that the commands share, so that the common path repeats no argument."""

    root: Path = DEFAULT_RUN

    @property
    def scores(self) -> Path:
        return self.root / "scores.parquet"

    @property
    def shards(self) -> Path:
        """Finished pieces of a score table that is still being made."""
        return self.root / "scores.partial"

    @property
    def selection(self) -> Path:
        return self.root / "selection.parquet"

    @property
    def distilled(self) -> Path:
        """One file per source, under the source's own file name."""
        return self.root / "distilled"

    @property
    def drafter(self) -> Path:
        return self.root / "drafter"

    @property
    def evaluation(self) -> Path:
        return self.root / "eval.json"


@dataclass(frozen=True)
class Provenance:
    """Where an artifact came from.

    `identity` holds what must be equal for the artifact to be reused (target fingerprint, template,
    dtype, maximum length …); `about` is for the reader (data files, resolved settings, versions).
    """

    identity: Mapping[str, Any]
    about: Mapping[str, Any] = field(default_factory=dict)

    def differences(self, other: "Provenance") -> list[str]:
        """Names and values of the identity fields in which `other` differs from this one."""
        names = [*self.identity, *(name for name in other.identity if name not in self.identity)]
        differing = (n for n in names if self.identity.get(n) != other.identity.get(n))
        return [
            f"{n} (was {self._value(other, n)}, now {other._value(self, n)})" for n in differing
        ]

    def _value(self, other: "Provenance", name: str) -> Any:
        """What a person calls the value, where that tells it from the other's; else the digest."""
        called = self.about.get(name)
        return self.identity.get(name) if called in (None, other.about.get(name)) else called

    def to_json(self) -> str:
        record = {"identity": dict(self.identity), "about": dict(self.about)}
        return json.dumps(record, indent=2, ensure_ascii=False, default=str)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Provenance":
        """Inverse of `to_json`; raises ValueError for anything else."""
        try:
            value = json.loads(text)
            return cls(dict(value["identity"]), dict(value["about"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"not a provenance record ({error})") from error


def environment() -> dict[str, Any]:
    """Versions and platform, for the `about` part of a provenance."""
    versions = {}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions,
    }


@contextmanager
def atomic_path(destination: Path) -> Iterator[Path]:
    """Give a temporary path beside `destination`; rename it there on success, delete it on failure.

    The data are flushed to disk before the rename, so after a crash `destination` is either the old
    file or the whole new one.

    Raises:
        ArtifactError: the folder cannot be made or written, or the disk is full.
    """
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        temporary.replace(destination)
    except OSError as error:
        raise ArtifactError(
            f"Cannot write {destination}: {error.strerror or error}. "
            "Free the disk or choose another place with --run; what was finished is kept."
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_text(destination: Path, text: str) -> None:
    """Write a small text file atomically."""
    with atomic_path(destination) as temporary:
        temporary.write_text(text, encoding="utf-8")


def ensure_writable(directory: Path) -> None:
    """Fail before hours of work, not after them, when `directory` cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        raise ArtifactError(
            f"Cannot write to {directory}: {error.strerror}. Choose another place with --run."
        ) from error


@contextmanager
def exclusive(
    run: RunDirectory, stage: str, *, shared: bool = False, wait: bool = False
) -> Iterator[None]:
    """Keep other processes from doing the same stage in a run; the lock dies with the process.

    Args:
        shared: let others in that share it too, and keep out only who wants the stage alone.
        wait: for another process to be done, which is said.

    Raises:
        ArtifactError: another process is at it, and `wait` is False.
    """
    ensure_writable(run.root)
    with (run.root / f".{stage}.lock").open("a+", encoding="utf-8") as lock:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            who = lock.read() or "another process"
            if not wait:
                raise ArtifactError(
                    f"{run.root} is in use: {who} is doing the same. "
                    "Wait for it, or choose another --run."
                ) from error
            log.info("Waiting for %s, which is at work in %s.", who, run.root)
            fcntl.flock(lock, kind)
        except OSError as error:  # some network file systems have no locks
            log.warning("Cannot lock %s (%s): see that no other process uses it.", run.root, error)
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}")
        lock.flush()
        yield


def digest_bytes(data: bytes) -> str:
    """A short, stable identity of `data` (128 bits, hexadecimal)."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def digest_json(value: Any) -> str:
    """`digest_bytes` of a JSON value, whatever the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return digest_bytes(text.encode("utf-8", errors="surrogatepass"))


def digest_files(paths: list[Path]) -> str:
    """Identity of the contents of some files, wherever they lie; reads every byte."""
    whole = hashlib.blake2b(digest_size=16)
    for path in sorted(paths):
        with path.open("rb") as handle:
            whole.update(hashlib.file_digest(handle, "sha256").digest())
    return whole.hexdigest()


PARQUET_METADATA_KEY = b"sfdd.provenance"


def _maker(path: Path) -> str:
    return "'sfdd filter'" if path.name == RunDirectory().selection.name else "'sfdd score'"


def read_parquet_provenance(path: Path) -> Provenance:
    """The provenance in a Parquet file's schema metadata.

    Raises:
        ArtifactError: the file is missing, damaged, or not made by sfdd.
    """
    import pyarrow.parquet as pq

    if not path.is_file():
        raise ArtifactError(f"{path} does not exist. Run {_maker(path)} first.")
    try:
        metadata = pq.read_schema(path).metadata or {}
        return Provenance.from_json(metadata[PARQUET_METADATA_KEY])
    except (OSError, ValueError, KeyError) as error:
        raise ArtifactError(
            f"{path} is damaged or was not written by sfdd ({error}). Delete it and run {_maker(path)}."
        ) from error


def distilled_files(run: RunDirectory) -> tuple[str, ...]:
    """The files that the run's selection names, checked to be what was written; repeats its warnings.

    Raises:
        ArtifactError: one of them is not, or the selection is missing or damaged.
    """
    about = read_parquet_provenance(run.selection).about
    for warning in about.get("warnings", ()):
        log.warning("%s", warning)
    digests = about["distilled"]
    for name, digest in digests.items():
        path = run.distilled / name
        if not path.is_file() or digest_files([path]) != digest:
            raise ArtifactError(f"{path} is not what 'sfdd filter' wrote. Run 'sfdd filter' again.")
    return tuple(str(run.distilled / name) for name in digests)
