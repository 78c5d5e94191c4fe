"""Hidden states on disk: those computed in the loop, never of another target, never damaged."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import save_tiny_target
from helpers import random_conversation
from safetensors.torch import load_file
from training.helpers import assert_same_course, assert_same_weights, conversation, log_lines

from sfdd.conversations.conversation import TokenizedConversation
from sfdd.errors import ArtifactError, OutOfTimeError, TargetError
from sfdd.progress import Progress, silent
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training import caching
from sfdd.training.batches import pad
from sfdd.training.cache import StatesCache
from sfdd.training.config import TrainConfig
from sfdd.training.distributed import ALONE
from sfdd.training.run import train_draft
from sfdd.training.states import OnlineStates, states_dtype

MakeConfig = Callable[..., TrainConfig]
Conversations = list[TokenizedConversation]
AUX = (1, 2)


def _filled(
    directory: Path,
    target: TransformersTarget,
    conversations: Conversations,
    aux_layers: tuple[int, ...] = AUX,
    dtype: torch.dtype = torch.float16,
    on_progress: Callable[[Progress], None] = silent,
) -> StatesCache:
    cache = StatesCache(directory, target, aux_layers, dtype, 2048)
    caching.complete(cache, target, conversations, ALONE, on_progress, 64)
    return cache


def _shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("states-*.safetensors"))


def _computed(directory: Path, target: TransformersTarget, conversations: Conversations) -> int:
    """How many samples it takes to fill a cache."""
    moments: list[Progress] = []
    _filled(directory, target, conversations, on_progress=moments.append)
    return max((m.done for m in moments if m.stage == "caching"), default=0)


@pytest.mark.parametrize("aux_layers", [(), AUX])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_are_those_of_the_targets_own_forward(
    dtype: torch.dtype,
    aux_layers: tuple[int, ...],
    tiny_target: TransformersTarget,
    conversations: Conversations,
    tmp_path: Path,
) -> None:
    cache = _filled(tmp_path / "cache", tiny_target, conversations, aux_layers, dtype)
    some = conversations[3:6]
    input_ids = pad(some).input_ids
    hidden, aux = cache.read(some, input_ids)
    wanted, wanted_aux = OnlineStates(tiny_target, aux_layers, dtype).read(some, input_ids)
    assert hidden.dtype == wanted.dtype == dtype
    for row, one in enumerate(some):
        tokens = slice(len(one))
        torch.testing.assert_close(hidden[row, tokens], wanted[row, tokens])
        if aux_layers:
            torch.testing.assert_close(
                aux[row, tokens], wanted_aux[row, tokens], rtol=0.005, atol=5e-5
            )
    assert (aux is None) == (wanted_aux is None) == (not aux_layers)
    # And they are what transformers itself calls hidden states.
    with torch.no_grad():
        plain = tiny_target.model.model(input_ids, output_hidden_states=True).hidden_states
    if aux_layers:
        one = slice(len(some[0]))
        torch.testing.assert_close(aux[0, one, :32].float(), plain[1][0, one], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_equal_seeds_give_equal_losses_from_both_sources(
    method: str,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
) -> None:
    online = make_config("online", method=method, epochs=4)
    cached = replace(online, run=online.run.parent / "cached", cache=online.run.parent / "cache")
    for config in (online, cached):
        train_draft(config, tiny_target, conversations)
    assert len(log_lines(online.run)) > 10
    assert_same_course(cached.run, online.run, rel=1e-4)  # a rounding may fall the other way
    assert_same_weights(cached.run, online.run, atol=1e-3)


def test_a_cache_is_filled_once_and_shared_by_runs_methods_and_data_sets(
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config("first", method="eagle3", cache=make_config().run.parent / "cache")
    train_draft(config, tiny_target, conversations[:10])
    assert "The hidden states of 10 samples take" in caplog.text
    before = _shards(config.cache)
    names = [name for shard in before for name in load_file(shard)]
    assert len(names) == len(set(names)) == 10
    caplog.clear()
    train_draft(replace(config, run=config.run / "2", seed=1), tiny_target, conversations[:10])
    eagle = make_config("eagle", cache=config.cache)  # reads less than what is there
    train_draft(eagle, tiny_target, conversations[4:10])
    assert _shards(config.cache) == before
    assert caplog.text == ""
    train_draft(replace(eagle, run=config.run / "3"), tiny_target, conversations)
    assert "The hidden states of 6 samples take" in caplog.text
    assert set(_shards(config.cache)) > set(before)


def test_only_what_is_missing_is_computed(
    tiny_target: TransformersTarget, conversations: Conversations, tmp_path: Path
) -> None:
    copies = [*conversations[:8], *conversations[:8]]
    assert _computed(tmp_path / "cache", tiny_target, copies) == 8
    assert _computed(tmp_path / "cache", tiny_target, conversations[4:12]) == 4
    assert _computed(tmp_path / "cache", tiny_target, conversations[:12]) == 0


@pytest.mark.parametrize("damage", ["cut", "emptied", "a bit flipped"])
def test_a_damaged_shard_is_named_and_computed_again(
    damage: str,
    tiny_target: TransformersTarget,
    conversations: Conversations,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _filled(tmp_path / "cache", tiny_target, conversations[:3])
    _filled(tmp_path / "cache", tiny_target, conversations[:9])
    sizes = {shard: len(load_file(shard)) for shard in _shards(tmp_path / "cache")}
    shard = max(sizes, key=lambda shard: sizes[shard])
    content = bytearray(shard.read_bytes())
    content[-10] ^= 1
    shard.write_bytes({"cut": content[:-20], "emptied": b"", "a bit flipped": content}[damage])
    assert _computed(tmp_path / "cache", tiny_target, conversations[:9]) == sizes[shard] == 6
    assert f"{shard} is damaged; its hidden states are computed again." in caplog.text


def test_files_of_the_users_are_left_alone(
    tiny_target: TransformersTarget, conversations: Conversations, tmp_path: Path
) -> None:
    _filled(tmp_path / "cache", tiny_target, conversations[:2])
    for name in ("states-mine.safetensors", "notes.txt"):
        (tmp_path / "cache" / name).write_text("mine")
    assert _computed(tmp_path / "cache", tiny_target, conversations[:3]) == 1
    assert (tmp_path / "cache/states-mine.safetensors").read_text() == "mine"


def test_a_cache_of_other_provenance_is_refused_by_name(
    tiny_target: TransformersTarget, conversations: Conversations, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    _filled(cache, tiny_target, conversations[:2])
    other = TransformersTarget.load(str(save_tiny_target(tmp_path / "other", seed=1)))
    for arguments, difference in (
        ((other, AUX, torch.float16, 2048), "target (was "),
        ((tiny_target, AUX, torch.bfloat16, 2048), "states_dtype (was float16, now bfloat16)"),
        ((tiny_target, AUX, torch.float16, 512), "max_length (was 2048, now 512)"),
        ((tiny_target, (2,), torch.float16, 2048), "aux_layers (was [1, 2], now [2])"),
    ):
        with pytest.raises(ArtifactError) as error:
            StatesCache(cache, *arguments)
        message = str(error.value)
        assert message.startswith(
            f"The cache {cache} holds hidden states of another kind: {difference}"
        )
        assert message.endswith("Name another directory with --cache, or delete this one.")


def test_a_directory_of_something_else_is_not_filled(
    tiny_target: TransformersTarget, conversations: Conversations, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError) as error:
        _filled(tmp_path, tiny_target, conversations)
    assert str(error.value) == (
        f"{tmp_path} is not a cache of hidden states, and it is not empty. "
        "Name another directory with --cache."
    )
    (tmp_path / "cache.json").write_text("{}")
    with pytest.raises(
        ArtifactError, match=r"cache\.json cannot be read \(not a provenance record"
    ):
        _filled(tmp_path, tiny_target, conversations)


def test_a_disk_without_room_is_refused_before_anything_is_computed(
    tiny_target: TransformersTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three conversations of 20 tokens and 3 x 32 numbers of 2 bytes: 11,520 bytes, and 2 % more."""
    data = [random_conversation(20, 5, seed) for seed in range(3)]
    usage = type("Usage", (), {"free": 11_600})
    monkeypatch.setattr(caching.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ArtifactError) as error:
        _filled(tmp_path / "cache", tiny_target, data)
    assert str(error.value) == (
        f"The hidden states of 3 samples take 11.47 KiB, and {tmp_path}/cache has 11.33 KiB free. Name "
        "a directory with more room with --cache, or leave it out: the states are then computed in "
        "every epoch."
    )
    assert _shards(tmp_path / "cache") == []
    usage.free = 11_800
    _filled(tmp_path / "cache", tiny_target, data)


def test_a_cache_that_cannot_be_written_names_its_option(
    tiny_target: TransformersTarget, conversations: Conversations, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactError, match=r"file is not a directory\. Name another with --cache"):
        _filled(tmp_path / "file", tiny_target, conversations)
    with pytest.raises(ArtifactError, match=r"Cannot write to /proc/cache: .* with --cache\.$"):
        _filled(Path("/proc/cache"), tiny_target, conversations)


def test_states_too_large_for_float16_are_refused_with_the_remedy(
    tmp_path: Path, conversations: Conversations, make_config: MakeConfig
) -> None:
    """The residual stream of this target is a hundred thousand wide; its last hidden states are not."""
    directory = save_tiny_target(tmp_path / "target")
    target = TransformersTarget.load(str(directory))
    target.model.model.embed_tokens.weight.mul_(3e5)
    message = r"reach \d\.\d+e\+\d+, more than float16 can hold\. Give --states-dtype bfloat16\.$"
    with pytest.raises(TargetError, match=message):
        _filled(tmp_path / "cache", target, conversations)
    for held_out in (0.0, 0.5):  # in the loop, too, and where nothing was trained yet
        with pytest.raises(TargetError, match=message.replace(r"\.$", r"\. Start again")):
            train_draft(make_config(method="eagle3", held_out=held_out), target, conversations)
    _filled(tmp_path / "bfloat16", target, conversations, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("dtype", "setting", "expected"),
    [
        ("float32", "auto", torch.float16),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.float16),
        ("float16", "float32", torch.float32),
    ],
)
def test_dtype_of_states(
    dtype: str, setting: str, expected: torch.dtype, tiny_directory: Path
) -> None:
    target = TransformersTarget.load(str(tiny_directory), dtype=dtype)
    assert states_dtype(setting, target) == expected


_FILL = """
import sys, time
sys.path.insert(0, "tests")
from pathlib import Path
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training import caching
from training.test_cache import _filled
from training.helpers import conversation

caching._SHARD_SECONDS = 0.0
target = TransformersTarget.load(sys.argv[1])
data = [conversation(number) for number in range(40)]
_filled(Path(sys.argv[2]), target, data, on_progress=lambda moment: time.sleep(0.05))
"""


def test_killed_while_it_is_filled_and_filled_the_rest_of_the_way(
    tiny_directory: Path, tiny_target: TransformersTarget, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    process = subprocess.Popen(
        [sys.executable, "-c", _FILL, str(tiny_directory), str(cache)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(_shards(cache)) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = sum(len(load_file(shard)) for shard in _shards(cache))
    assert done < 40
    (cache / ".states-left.safetensors.1.tmp").write_bytes(b"half")
    data = [conversation(number) for number in range(40)]
    distinct = len({c.input_ids.tobytes() for c in data})
    assert _computed(cache, tiny_target, data) == distinct - done
    assert not list(cache.glob(".states-*.tmp"))
    fresh = _filled(tmp_path / "fresh", tiny_target, data)
    input_ids = pad(data).input_ids
    for ours, wanted in zip(
        _filled(cache, tiny_target, data).read(data, input_ids),
        fresh.read(data, input_ids),
        strict=True,
    ):
        torch.testing.assert_close(ours, wanted)


def test_what_was_found_sound_is_read_again_only_if_it_changed(
    tiny_target: TransformersTarget, conversations: Conversations, tmp_path: Path
) -> None:
    def checked() -> int:
        moments: list[Progress] = []
        _filled(tmp_path / "cache", tiny_target, conversations, on_progress=moments.append)
        return sum(moment.stage == "checking the cache" for moment in moments)

    assert checked() == 0
    shards = _shards(tmp_path / "cache")
    assert checked() == len(shards)
    assert checked() == 0
    shards[0].write_bytes(shards[0].read_bytes())
    assert checked() == 1


def test_filling_stops_when_time_is_up_and_goes_on(
    tiny_target: TransformersTarget, conversations: Conversations, tmp_path: Path
) -> None:
    def fill(deadline: float) -> None:
        cache = StatesCache(tmp_path, tiny_target, AUX, torch.float16, 2048)
        caching.complete(cache, tiny_target, conversations, ALONE, silent, 24, deadline)

    with pytest.raises(OutOfTimeError) as error:
        fill(time.monotonic())
    done = sum(len(load_file(shard)) for shard in _shards(tmp_path))
    missing = len({c.input_ids.tobytes() for c in conversations}) - done
    assert done
    assert str(error.value) == (
        f"Stopped after --max-hours: {missing} samples are still missing in the cache {tmp_path}. "
        "Run the same command again to continue."
    )
    while missing > 0:
        with contextlib.suppress(OutOfTimeError):
            fill(time.monotonic())
        missing -= 1
    fill(time.monotonic())


def test_each_conversation_has_its_own_positions_where_they_depend_on_the_longest(
    tmp_path: Path, conversations: Conversations
) -> None:
    factors = [1.0 + i for i in range(4)]
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    scaling |= {"short_factor": factors, "long_factor": [3 * f for f in factors]}
    scaling |= {"original_max_position_embeddings": 16}
    directory = save_tiny_target(tmp_path / "target", rope_parameters=scaling)
    target = TransformersTarget.load(str(directory))
    batch = [random_conversation(length, 3, seed=length) for length in (40, 9)]
    cache = _filled(tmp_path / "cache", target, batch)
    for states in (OnlineStates(target, AUX, torch.float16), cache):
        hidden, aux = states.read(batch, pad(batch).input_ids)
        assert aux is not None
        for row, one in enumerate(batch):
            alone = target.hidden_and_aux_states(pad([one]).input_ids, aux_layers=AUX)
            for ours, wanted in zip((hidden, aux), alone, strict=True):
                assert wanted is not None
                assert torch.equal(ours[row, : len(one)], wanted[0].half())


def test_what_is_expected_is_what_is_read(
    tiny_target: TransformersTarget, conversations: Conversations, tmp_path: Path
) -> None:
    """Read ahead or not, in the order announced or another, expected or not."""
    cache = _filled(tmp_path / "cache", tiny_target, conversations)
    input_ids = pad(conversations).input_ids
    plain, _ = cache.read(conversations, input_ids)
    cache.expect([conversations[8:], conversations[:4]])
    for part in (slice(0, 6), slice(6, 16)):
        hidden, _ = cache.read(conversations[part], input_ids[part])
        assert torch.equal(hidden, plain[part])


def test_record_says_whose_states_they_are(
    tiny_target: TransformersTarget, conversations: Conversations, tmp_path: Path
) -> None:
    _filled(tmp_path / "cache", tiny_target, conversations)
    record = json.loads((tmp_path / "cache/cache.json").read_text())
    assert record["identity"] == {
        **tiny_target.identity,
        "max_length": 2048,
        "states_dtype": "float16",
        "aux_layers": [1, 2],
    }
