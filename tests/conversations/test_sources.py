import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversations.reading import values
from datasets import Dataset, DatasetDict
from helpers import sharegpt, write_jsonl

from sfdd.conversations.hub import DatasetSource
from sfdd.conversations.sources import expand_names, open_source
from sfdd.errors import DataError

RECORDS = [sharegpt("Hi", f"Hello {i}", id=str(i)) for i in range(5)]


class TestDatasets:
    def test_saved_data_set(self, tmp_path: Path) -> None:
        Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"))
        source = open_source(str(tmp_path / "saved"))
        assert isinstance(source, DatasetSource)
        assert source.count() == 5
        assert values(tmp_path / "saved") == RECORDS
        assert source.file_name == "saved.parquet"
        source.write_kept({2, 4}.__contains__, tmp_path / source.file_name)
        assert pq.read_table(tmp_path / source.file_name).to_pylist() == [RECORDS[2], RECORDS[4]]

    def test_fingerprint_is_of_the_content(self, tmp_path: Path) -> None:
        for name, records in (("a", RECORDS), ("b", RECORDS), ("c", RECORDS[::-1])):
            Dataset.from_list(records).save_to_disk(str(tmp_path / name))
        a, b, c = (open_source(str(tmp_path / name)).fingerprint() for name in "abc")
        assert a == b != c

    def test_saved_splits(self, tmp_path: Path) -> None:
        split = Dataset.from_list(RECORDS)
        DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "both"))
        assert open_source(str(tmp_path / "both")).count() == 5
        DatasetDict(a=split, b=split).save_to_disk(str(tmp_path / "unclear"))
        with pytest.raises(DataError, match="has the splits a, b; name one"):
            open_source(str(tmp_path / "unclear"))

    def test_a_folder_that_is_none(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="is not a data set made by save_to_disk"):
            open_source(str(tmp_path))

    def test_a_hub_id_that_cannot_be_had(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        with pytest.raises(
            DataError, match="nobody/nothing is neither a file here nor a hub data set"
        ):
            open_source("nobody/nothing")


class TestPatterns:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.chdir(tmp_path)
        for name in (
            "b.jsonl",
            "a.jsonl",
            ".hidden.jsonl",
            "c.json",
            "deep/er/d.jsonl",
            "e[1].jsonl",
        ):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(path, RECORDS)
        return tmp_path

    def test_sorted_and_without_hidden_files(self, folder: Path) -> None:
        assert expand_names(["*.jsonl"]) == ["a.jsonl", "b.jsonl", "e[1].jsonl"]
        assert expand_names(["c.json", "[ab].jsonl"]) == ["c.json", "a.jsonl", "b.jsonl"]
        assert expand_names([f"{folder}/?.json"]) == [f"{folder}/c.json"]

    def test_recursive(self, folder: Path) -> None:
        found = ["a.jsonl", "b.jsonl", "deep/er/d.jsonl", "e[1].jsonl"]
        assert expand_names(["**/*.jsonl"]) == found

    def test_folders_are_for_patterns_that_match_no_file(self, folder: Path) -> None:
        assert expand_names(["d*"]) == ["deep"]
        assert expand_names(["*"]) == ["a.jsonl", "b.jsonl", "c.json", "e[1].jsonl"]

    def test_a_file_that_exists_is_no_pattern(self, folder: Path) -> None:
        assert expand_names(["e[1].jsonl"]) == ["e[1].jsonl"]

    def test_names_that_are_none(self) -> None:
        assert expand_names(["no.jsonl", "org/name", "hf:org/name:a*"]) == (
            ["no.jsonl", "org/name", "hf:org/name:a*"]
        )

    def test_no_match(self, folder: Path) -> None:
        with pytest.raises(DataError, match=re.escape("No file matches none/*.jsonl.")):
            expand_names(["a.jsonl", "none/*.jsonl"])


class TestFolders:
    @pytest.mark.parametrize(
        ("files", "advice"),
        [
            (["a.parquet", "b.parquet", "c.json"], "give the files in it: '{}/*.parquet'."),
            (["a.jsonl.gz"], "give the files in it: '{}/*.jsonl.gz'."),
            (["data/a.parquet", "README.md"], "give the files in it: '{}/**/*.parquet'."),
            (["README.md", ".a.jsonl"], "it holds no data."),
            ([], "it holds no data."),
        ],
    )
    def test_the_files_in_it_are_suggested(
        self, tmp_path: Path, files: list[str], advice: str
    ) -> None:
        for name in files:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        sentence = f"Folder {tmp_path} is not a data set made by save_to_disk; {advice}"
        with pytest.raises(DataError, match=re.escape(sentence.format(tmp_path))):
            open_source(str(tmp_path))

    def test_one_that_is_damaged(self, tmp_path: Path) -> None:
        Dataset.from_list(RECORDS).save_to_disk(str(tmp_path))
        next(tmp_path.glob("*.arrow")).write_bytes(b"nothing")
        with pytest.raises(DataError, match="was made by save_to_disk and is damaged: "):
            open_source(str(tmp_path))


class TestHub:
    """A local folder stands for the repository: `datasets` loads both in the same way."""

    @pytest.fixture(autouse=True)
    def _cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)

    @pytest.fixture
    def plain(self, tmp_path: Path) -> str:
        """A repository of two splits."""
        folder = tmp_path / "plain"
        folder.mkdir()
        write_jsonl(folder / "train.jsonl", RECORDS)
        write_jsonl(folder / "test.jsonl", RECORDS[:2])
        return f"hf:{folder}"

    @pytest.fixture
    def configured(self, tmp_path: Path) -> str:
        """A repository of two configurations."""
        folder = tmp_path / "configured"
        folder.mkdir()
        for name, number in (("a-train", 1), ("a-test", 2), ("b-train", 3)):
            write_jsonl(folder / f"{name}.jsonl", RECORDS[:number])
        (folder / "README.md").write_text(
            "---\nconfigs:\n"
            "- config_name: a\n  data_files:\n"
            "  - {split: train, path: a-train.jsonl}\n  - {split: test, path: a-test.jsonl}\n"
            "- config_name: b\n  data_files: b-train.jsonl\n---\n"
        )
        return f"hf:{folder}"

    def test_splits(self, plain: str) -> None:
        assert open_source(plain).count() == 5
        assert open_source(f"{plain}:train").count() == 5
        assert open_source(f"{plain}:test").count() == 2
        assert [r.value for r in open_source(f"{plain}:test").records()] == RECORDS[:2]
        assert open_source(f"{plain}:test").file_name == "plain-test.parquet"

    def test_configurations(self, configured: str) -> None:
        assert open_source(f"{configured}:a").count() == 1
        assert open_source(f"{configured}:b").count() == 3
        assert open_source(f"{configured}:a:test").count() == 2

    def test_a_split_goes_before_a_configuration(self, plain: str) -> None:
        folder = Path(plain.removeprefix("hf:"))
        (folder / "README.md").write_text(
            "---\nconfigs:\n"
            "- config_name: default\n  data_files:\n"
            "  - {split: train, path: train.jsonl}\n  - {split: test, path: test.jsonl}\n"
            "- config_name: test\n  data_files: train.jsonl\n---\n"
        )
        assert open_source(f"{plain}:test").count() == 2
        assert open_source(f"{plain}:test:train").count() == 5

    def test_errors(self, plain: str, configured: str) -> None:
        for name, reason in (
            (f"{plain}:nope", 'Unknown split "nope". Should be one of'),
            (f"{plain}:nope:train", "BuilderConfig 'nope' not found. Available: "),
            (configured, "Config name is missing. Please pick one among the available configs: "),
        ):
            with pytest.raises(DataError, match=re.escape(reason)) as error:
                open_source(name)
            assert str(error.value).startswith(f"Data set {name} is neither a file here nor a hub")
            assert "\n" not in str(error.value)
        for name in (f"{plain}:a:b:c", "hf:", f"{plain}:"):
            with pytest.raises(DataError, match=f"{name} is no hub id: write hf:NAME, "):
                open_source(name)

    def test_types_that_vary_by_row_and_keys_that_are_absent(self, tmp_path: Path) -> None:
        folder = tmp_path / "vary"
        folder.mkdir()
        records = [
            {"messages": [{"role": "user", "content": "text"}]},
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": None}]}],
                "id": "1",
            },
        ]
        write_jsonl(folder / "train.jsonl", records)
        source = open_source(f"hf:{folder}")
        assert [record.value for record in source.records()] == records
        source.write_kept({1}.__contains__, tmp_path / "out.parquet")
        again = open_source(str(tmp_path / "out.parquet"))
        assert [record.value for record in again.records()] == records[1:]

    def test_only_the_columns_of_a_conversation_are_read(self, tmp_path: Path) -> None:
        rows = [{**record, "other": i} for i, record in enumerate(RECORDS)]
        Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
        assert [r.value for r in open_source(str(tmp_path / "saved")).records()] == RECORDS

    def test_a_cell_that_python_cannot_hold_spoils_its_own_row(self, tmp_path: Path) -> None:
        when = pa.array([0, 2**62, 1], pa.timestamp("ms"))
        Dataset(pa.table({"when": when})).save_to_disk(str(tmp_path / "saved"))
        records = list(open_source(str(tmp_path / "saved")).records())
        assert [bool(record.error) for record in records] == [False, True, False]


def test_missing_file() -> None:
    with pytest.raises(
        DataError,
        match=re.escape(
            "Data set no/such.jsonl does not exist. Give a JSONL, JSON, Parquet or Arrow file, a "
            "folder made by save_to_disk, or a hub id such as org/name."
        ),
    ):
        open_source("no/such.jsonl")


@pytest.mark.parametrize("name", ["teknium/OpenHermes-2.5", "HuggingFaceH4/ultrachat_200k"])
def test_hub_ids_with_dots_are_hub_ids(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="is neither a file here nor a hub data set"):
        open_source(name)


def test_fingerprint_follows_the_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", RECORDS)
    before = open_source(str(path)).fingerprint()
    assert open_source(str(path)).fingerprint() == before
    path.write_text(path.read_text().replace("Hello 3", "Hello 4"))
    assert open_source(str(path)).fingerprint() != before


def test_names_that_the_system_refuses(tmp_path: Path) -> None:
    loop = tmp_path / "loop.jsonl"
    loop.symlink_to(loop)
    for name in (str(loop), "~nosuchuser/x.jsonl", "x" * 300 + ".jsonl", "a\0b.jsonl"):
        with pytest.raises(DataError):
            open_source(expand_names([name])[0])
