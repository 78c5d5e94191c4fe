"""An evaluation from files to report, on the tiny target."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sfdd.artifacts import Provenance, RunDirectory
from sfdd.drafters.drafter import Drafter
from sfdd.drafters.loading import METHODS, new_drafter
from sfdd.errors import DataError, DrafterError, UsageError
from sfdd.evaluation.comparison import BASELINE, Comparison
from sfdd.evaluation.config import EvalConfig
from sfdd.evaluation.decoding import Decoding, Limits, autoregressive_decode
from sfdd.evaluation.prompts import Prompt
from sfdd.evaluation.report import DRAFTER, UNTRAINED
from sfdd.evaluation.run import evaluate
from sfdd.evaluation.verification import Sampling
from sfdd.progress import Progress
from sfdd.targets.transformers_target import TransformersTarget

PROMPTS = [
    {"id": "a/1", "set": "a", "turns": ["Hello", "And then?"]},
    {"id": "b/1", "set": "b", "turns": ["Count to three."]},
    {"id": "a/2", "set": "a", "turns": ["Why?"]},
]


@pytest.fixture
def config(tmp_path: Path, tiny_target: TransformersTarget) -> EvalConfig:
    """A run with a drafter that knows nothing, and prompts of two sets."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    provenance = Provenance(tiny_target.identity, {"target": tiny_target.source.name})
    new_drafter("eagle", tiny_target, seed=1).save(tmp_path / "run/drafter", provenance)
    return EvalConfig((prompts,), run=tmp_path / "run", max_new_tokens=12, seed=0)


def test_counts_add_up_and_the_report_is_kept(config: EvalConfig) -> None:
    moments: list[Progress] = []
    report = evaluate(replace(config, untrained=True, max_new_tokens=9), moments.append)

    overall = report.overall
    assert (overall.num_prompts, overall.num_responses) == (3, 4)
    assert overall == report.sets["a"] + report.sets["b"]
    assert list(report.sets) == ["a", "b"]
    assert report.sets["a"].num_responses == 3
    assert list(overall.drafters) == [DRAFTER, UNTRAINED]
    for name, result in overall.drafters.items():
        assert result.num_identical == 3
        assert result.speed.num_tokens == overall.baseline.num_tokens
        assert overall.speedup(name) == pytest.approx(
            overall.baseline.seconds / result.speed.seconds
        )
    assert [moment.done for moment in moments] == [0, 1, 2, 3]
    assert moments[-1].tokens == 3 * overall.baseline.num_tokens

    kept = json.loads(RunDirectory(config.run).evaluation.read_text())
    assert kept == json.loads(report.to_json())
    tau, mean_accepted = (kept["drafter"][k] for k in ("acceptance_length", "mean_accepted"))
    assert tau == pytest.approx(mean_accepted + 1)
    assert list(kept["sets"]) == ["a", "b"]
    about = kept["provenance"]["about"]
    assert about["settings"]["max_new_tokens"] == 9
    assert about["drafter_provenance"]["about"]["target"] == about["target"]
    assert "torch" in about["versions"]


@pytest.mark.parametrize("method", METHODS)
def test_the_kind_is_the_one_that_the_drafter_says(
    config: EvalConfig,
    tiny_target: TransformersTarget,
    method: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The untrained one beside it too: same layers, same vocabulary."""
    chosen = torch.arange(0, 260, 2) if method == "eagle3" else None
    provenance = Provenance(tiny_target.identity, {"target": tiny_target.source.name})
    new_drafter(method, tiny_target, seed=1, draft_to_target=chosen).save(
        config.run / "drafter", provenance
    )
    measured: dict[str, Drafter] = {}
    original = Comparison.of
    monkeypatch.setattr(
        Comparison,
        "of",
        lambda t, drafters, c: (measured.update(drafters), original(t, drafters, c))[1],
    )
    report = evaluate(replace(config, untrained=True))
    for result in report.overall.drafters.values():
        assert result.num_identical == 3
        assert result.acceptance.num_proposed > 0
    assert [measured[name].method for name in (DRAFTER, UNTRAINED)] == [method, method]
    trained, untrained = measured[DRAFTER], measured[UNTRAINED]
    assert trained.aux_layers == untrained.aux_layers
    assert not torch.equal(trained.fc.weight, untrained.fc.weight)
    if chosen is not None:
        assert torch.equal(untrained.draft_to_target, chosen)


def test_sampling_reports_no_lossless_count_and_is_reproducible(config: EvalConfig) -> None:
    sampled = replace(config, temperature=1.0)
    one, two = (evaluate(sampled).overall.drafters[DRAFTER] for _ in range(2))
    assert one.num_identical is None
    assert one.acceptance == two.acceptance
    assert one.speed.num_tokens == two.speed.num_tokens
    other = evaluate(replace(sampled, seed=7)).overall.drafters[DRAFTER]
    assert other.acceptance != one.acceptance


def test_an_untrained_drafter_alone_needs_a_named_target(
    config: EvalConfig, tmp_path: Path, tiny_directory: Path
) -> None:
    alone = replace(config, run=tmp_path / "new", untrained=True, limit=1)
    with pytest.raises(UsageError, match="Name the target with --target"):
        evaluate(alone)
    report = evaluate(replace(alone, target=str(tiny_directory)))
    assert list(report.overall.drafters) == [UNTRAINED]
    assert report.overall.num_prompts == 1


def test_a_missing_drafter_names_the_command_that_makes_one(
    config: EvalConfig, tmp_path: Path, tiny_directory: Path
) -> None:
    missing = replace(config, run=tmp_path / "new", target=str(tiny_directory))
    with pytest.raises(DrafterError, match="sfdd train-draft"):
        evaluate(missing)
    with pytest.raises(DrafterError, match="sfdd train-draft"):
        evaluate(replace(missing, drafter=tmp_path / "none", untrained=True))


def test_another_target_is_named_in_a_warning(
    config: EvalConfig, tiny_target: TransformersTarget, caplog: pytest.LogCaptureFixture
) -> None:
    provenance = Provenance(
        {**tiny_target.identity, "target": "other weights", "dtype": "bfloat16"},
        {"target": tiny_target.source.name},
    )
    new_drafter("eagle", tiny_target).save(config.run / "drafter", provenance)
    with caplog.at_level(logging.WARNING):
        evaluate(replace(config, limit=1))
    [message] = [r.getMessage() for r in caplog.records if r.name.startswith("sfdd")]
    assert "trained for another target" in message
    assert "target (was other weights, now" in message
    assert "dtype" not in message


def test_another_vocabulary_is_refused(
    config: EvalConfig, target_of_8_tokens: TransformersTarget
) -> None:
    directory = config.run / "drafter"
    recorded = Provenance.from_json((directory / "provenance.json").read_text())
    new_drafter("eagle", target_of_8_tokens).save(directory, recorded)
    with pytest.raises(DrafterError, match=r"has a vocabulary of 8, but target .* one of 260"):
        evaluate(config)


def test_turns_beyond_the_context_are_skipped_and_named(
    config: EvalConfig, tiny_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = json.loads((tiny_directory / "config.json").read_text())
    for file in tiny_directory.iterdir():
        (tmp_path / "short").mkdir(exist_ok=True)
        (tmp_path / "short" / file.name).write_bytes(file.read_bytes())
    settings["max_position_embeddings"] = 64
    (tmp_path / "short/config.json").write_text(json.dumps(settings))
    short = replace(config, run=tmp_path / "new", untrained=True, target=str(tmp_path / "short"))
    with caplog.at_level(logging.WARNING):
        report = evaluate(short)
    assert "a/1, turn 2 exceeds the target's context" in caplog.text
    assert (report.overall.num_prompts, report.overall.num_responses) == (3, 3)
    with pytest.raises(DataError, match="No prompt fits"):
        evaluate(replace(short, max_new_tokens=60))


def test_everyone_reads_the_same_and_takes_turns_in_going_first(
    tiny_target: TransformersTarget,
) -> None:
    """A decoder that answers wrongly is counted as not identical, and does not steer the history."""
    limits, seen = Limits(4), []

    def decoder(name: str, shift: int) -> Callable[[Tensor, Limits, Sampling], Decoding]:
        def decode(prompt_ids: Tensor, limits: Limits, sampling: Sampling) -> Decoding:
            seen.append((name, prompt_ids.tolist()))
            decoding = autoregressive_decode(tiny_target, prompt_ids, limits, sampling)
            return Decoding(tuple((token + shift) % 256 for token in decoding.tokens))

        return decode

    decoders = {BASELINE: decoder(BASELINE, 0), "right": decoder("right", 0)}
    decoders["wrong"] = decoder("wrong", 1)
    comparison = Comparison(tiny_target, decoders, limits, temperature=0.0, seed=0)
    measured = comparison.measure(Prompt("p", "s", "", ("One", "Two", "Three")), number=1)

    assert measured is not None
    assert measured.drafters["right"].num_identical == 1
    assert measured.drafters["wrong"].num_identical == 0
    assert measured.baseline.num_tokens == 12
    assert [name for name, _ in seen[::3]] == ["right", "wrong", BASELINE]
    assert all(seen[i][1] == seen[i + 1][1] == seen[i + 2][1] for i in (0, 3, 6))

    first = torch.tensor(seen[0][1])
    answer = autoregressive_decode(tiny_target, first, limits, Sampling()).tokens
    text = tiny_target.tokenizer.decode(list(answer), skip_special_tokens=True)
    assert tiny_target.tokenizer.decode(seen[3][1]) == (
        f"<|im_start|>user\nOne<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>\n"
        "<|im_start|>user\nTwo<|im_end|>\n<|im_start|>assistant\n"
    )
