"""`--token-weight flatness`: the stored flatness of a token is what its loss counts for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import save_tiny_target, tiny_config
from conversations.templates import family_tokenizer
from helpers import openai, write_jsonl
from training.helpers import log_lines
from transformers import LlamaForCausalLM

from sfdd.artifacts import RunDirectory
from sfdd.conversations.config import MaskConfig
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.conversations.pipeline import tokenize_data
from sfdd.drafters.loading import new_drafter
from sfdd.errors import ArtifactError
from sfdd.filtering.config import FilterConfig
from sfdd.filtering.run import filter_data
from sfdd.scoring.config import ScoreConfig
from sfdd.scoring.run import score
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import loss_weight, make_batch
from sfdd.training.config import TrainConfig
from sfdd.training.flatness import flatness_weights
from sfdd.training.objectives import LossConfig, loss_sums
from sfdd.training.run import train
from sfdd.training.states import OnlineStates


@pytest.fixture
def data(tmp_path: Path) -> Path:
    records = [openai(f"Say {n}", "na " * (n % 4) + chr(97 + n), id=str(n)) for n in range(12)]
    return write_jsonl(tmp_path / "chats.jsonl", records)


@pytest.fixture
def scored(data: Path, tiny_directory: Path, tmp_path: Path) -> RunDirectory:
    run = tmp_path / "run"
    score(ScoreConfig((str(data),), str(tiny_directory), run, token_scores=True))
    return RunDirectory(run)


def _samples(
    data: Path, target: TransformersTarget, max_length: int = 4096
) -> list[TokenizedConversation]:
    return list(tokenize_data([str(data)], target.tokenizer, max_length))


def _identity(target: TransformersTarget, **mask: object) -> dict[str, object]:
    return {**target.identity, **MaskConfig(**mask).identity()}


def _true_flatness(target: TransformersTarget, sample: TokenizedConversation) -> np.ndarray:
    """1 / (sqrt(V) ||p||), straight from the model's own logits."""
    with torch.no_grad():
        logits = target.model(torch.from_numpy(sample.input_ids).long()[None]).logits[0, :-1]
    flat = 1 / (logits.shape[-1] ** 0.5 * logits.softmax(-1).norm(dim=-1))
    return flat[sample.loss_mask[1:]].numpy()


def test_weights_are_the_flatness_of_each_supervised_token(
    data: Path, scored: RunDirectory, tiny_target: TransformersTarget
) -> None:
    samples = _samples(data, tiny_target)
    weights = flatness_weights(scored, samples, _identity(tiny_target))
    for sample in samples:
        of_one = weights(sample)
        assert of_one.shape == sample.input_ids.shape
        np.testing.assert_allclose(
            of_one[sample.loss_mask], _true_flatness(tiny_target, sample), rtol=1e-4
        )
        assert not of_one[~sample.loss_mask].any()


def test_a_record_is_found_by_its_content_wherever_it_stands(
    data: Path, scored: RunDirectory, tiny_target: TransformersTarget, tmp_path: Path
) -> None:
    """In the distilled file rows are others; so they are in a shuffled one of another format."""
    filter_data(FilterConfig(run=scored.root, keep=0.5))
    (distilled,) = scored.distilled.iterdir()
    expected = flatness_weights(
        scored, whole := _samples(data, tiny_target), _identity(tiny_target)
    )
    by_text = {sample.input_ids.tobytes(): expected(sample) for sample in whole}
    samples = _samples(distilled, tiny_target)
    assert len(samples) == 6
    weights = flatness_weights(scored, samples, _identity(tiny_target))
    for sample in samples:
        np.testing.assert_array_equal(weights(sample), by_text[sample.input_ids.tobytes()])


def test_what_is_cut_shorter_than_it_was_scored_keeps_the_weights_of_what_is_left(
    data: Path, scored: RunDirectory, tiny_target: TransformersTarget
) -> None:
    whole, cut = _samples(data, tiny_target), _samples(data, tiny_target, max_length=30)
    assert any(sample.truncated for sample in cut)
    long, short = (flatness_weights(scored, s, _identity(tiny_target)) for s in (whole, cut))
    by_row = {sample.origin.row: long(sample) for sample in whole}
    for sample in cut:
        np.testing.assert_array_equal(short(sample), by_row[sample.origin.row][: len(sample)])
    assert long.digest != short.digest


def test_a_record_of_several_samples(tmp_path: Path) -> None:
    """The template drops earlier thoughts, so each of two answers is a sample with its own history."""
    tokenizer = family_tokenizer("qwen3")
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config(vocab_size=len(tokenizer))).save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    target = TransformersTarget.load(str(tmp_path / "target"))
    record = openai("Hi", "Yo", "Bye", "Ciao")
    record["messages"][1]["reasoning_content"] = "hm"
    record["messages"][3]["reasoning_content"] = "well then"
    data = write_jsonl(tmp_path / "chats.jsonl", [record, openai("A", "B")])
    run = RunDirectory(tmp_path / "run")
    score(ScoreConfig((str(data),), target.source.name, run.root, token_scores=True))
    samples = _samples(data, target)
    assert [sample.parts for sample in samples] == [2, 2, 1]
    weights = flatness_weights(run, samples, _identity(target))
    for sample in samples:
        np.testing.assert_allclose(
            weights(sample)[sample.loss_mask], _true_flatness(target, sample), rtol=1e-4
        )
    cut = _samples(data, target, max_length=len(samples[1]) - 4)
    with pytest.raises(ArtifactError) as error:
        flatness_weights(run, cut, _identity(target))
    assert str(error.value).endswith("Train with the --max-length it was scored with.")


def test_the_first_loss_is_the_weighted_mean(
    data: Path, scored: RunDirectory, tiny_target: TransformersTarget
) -> None:
    config = TrainConfig(
        target=tiny_target.source.name,
        data=(str(data),),
        run=scored.root,
        token_weight="flatness",
        states_dtype="float32",
        noise=0.0,
        held_out=0.0,
        batch_tokens=10**6,
        max_steps=1,
    )
    train(config)
    samples = _samples(data, tiny_target)
    weights = flatness_weights(scored, samples, _identity(tiny_target))
    drafter = new_drafter("eagle", tiny_target)
    states = OnlineStates(tiny_target, (), torch.float32)
    # One token at a time, each with its own weight of 1: then averaged by hand.
    total = norm = 0.0
    for sample in samples:
        for place in np.flatnonzero(sample.loss_mask)[:]:
            one = replace(sample, loss_mask=np.arange(len(sample)) == place)
            batch = make_batch(
                [one], lambda c: np.ones(len(c), np.float32), states, torch.device("cpu")
            )
            loss = loss_sums(drafter, batch, tiny_target, LossConfig(ttt_steps=1)).total.item()
            weight = float(weights(sample)[place])
            total, norm = total + weight * loss, norm + weight
    assert norm == pytest.approx(sum(loss_weight(sample, weights) for sample in samples))
    assert log_lines(scored.root)[0]["loss"] == pytest.approx(total / norm, rel=1e-5)


def test_scores_that_cannot_be_used_are_named(
    data: Path, tiny_directory: Path, tiny_target: TransformersTarget, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path / "run")
    samples, identity = _samples(data, tiny_target), _identity(tiny_target)

    def message(*arguments: object) -> str:
        with pytest.raises(ArtifactError) as error:
            flatness_weights(run, *arguments)
        return str(error.value)

    assert message(samples, identity) == (
        f"--token-weight flatness reads {run.scores}, which does not exist. "
        "Run 'sfdd score' with --token-scores."
    )
    score(ScoreConfig((str(data),), str(tiny_directory), run.root))
    assert message(samples, identity) == (
        f"--token-weight flatness reads {run.scores}, which holds no flatness of tokens. "
        "Run 'sfdd score' with --token-scores."
    )
    score(
        ScoreConfig((str(data),), str(tiny_directory), run.root, token_scores=True, overwrite=True)
    )
    other = write_jsonl(tmp_path / "other.jsonl", [openai("Who?", "Me.", id="mine")])
    assert message(_samples(other, tiny_target), identity) == (
        f"--token-weight flatness found no scores of conversation mine in {run.scores}. "
        "Train on data that were scored in this run."
    )
    assert message(samples, _identity(tiny_target, last_turn_only=True)) == (
        f"--token-weight flatness reads {run.scores}, but the scores there are of other tokens: "
        "last_turn_only (was False, now True). Train as was scored, or score again."
    )
    another = TransformersTarget.load(str(save_tiny_target(tmp_path / "target", seed=1)))
    assert "of other tokens: target (was " in message(samples, _identity(another))


def test_a_training_with_other_weights_is_another_training(
    data: Path, scored: RunDirectory, tiny_directory: Path
) -> None:
    config = TrainConfig(
        target=str(tiny_directory), data=(str(data),), run=scored.root, max_steps=1
    )
    train(replace(config, token_weight="flatness"))
    with pytest.raises(ArtifactError, match=r"token_weight \(was flatness, now none\)"):
        train(config)
    score(
        ScoreConfig(
            (str(data),), str(tiny_directory), scored.root, token_scores=True, overwrite=True
        )
    )
    assert train(replace(config, token_weight="flatness")).already_finished
    assert "token_flatness" in pq.read_schema(scored.scores).names
