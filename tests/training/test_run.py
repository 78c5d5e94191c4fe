"""A whole training on the tiny target: what comes out, and that it can be repeated."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import byte_tokenizer, save_tiny_target, tiny_config
from drafters.targets import make_target
from helpers import openai, write_jsonl
from safetensors.torch import load_file, save_file
from training.helpers import conversation, equal, log_lines, trainer, weights
from transformers import AutoConfig, AutoModelForCausalLM

from sfdd.artifacts import Provenance, RunDirectory, digest_files
from sfdd.conversations.conversation import TokenizedConversation
from sfdd.drafters.drafter import Drafter, read_provenance, target_mismatch
from sfdd.drafters.eagle import EagleDrafter
from sfdd.drafters.loading import load_drafter
from sfdd.errors import ArtifactError, DataError, DrafterError
from sfdd.targets.transformers_target import TransformersTarget
from sfdd.training.batches import equal_weights, make_batch
from sfdd.training.config import TrainConfig
from sfdd.training.data import split
from sfdd.training.objectives import LossConfig, loss_sums
from sfdd.training.run import train, train_draft
from sfdd.training.states import OnlineStates

MakeConfig = Callable[..., TrainConfig]
Conversations = list[TokenizedConversation]


def test_loss_falls_and_agreement_rises_when_learning_by_heart(
    make_config: MakeConfig, tiny_target: TransformersTarget
) -> None:
    few = [conversation(number) for number in range(4)]
    config = make_config(epochs=150, noise=0.0, held_out=0.0, checkpoint_every=1000)
    report = train_draft(config, tiny_target, few)
    assert report.last_loss < 0.5 * report.first_loss  # the rest is the target's own entropy
    steps = log_lines(config.run)
    assert steps[-1]["hidden_loss"] < 0.001 * steps[0]["hidden_loss"]
    assert steps[-1]["top1_agreement"] > 0.8 > 0.1 > steps[0]["top1_agreement"]


def test_report_and_log_tell_the_same(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config()
    report = train_draft(config, tiny_target, conversations)
    lines = log_lines(config.run)
    steps = [line for line in lines if line["kind"] == "step"]
    measured = [line for line in lines if line["kind"] == "held_out"]

    assert [line["step"] for line in steps] == list(range(1, report.steps + 1))
    per_epoch = report.steps // 2
    assert [line["step"] for line in measured] == [0, per_epoch, report.steps]
    assert report.held_out_before.loss == measured[0]["loss"]
    assert report.held_out_after.top1_agreement == measured[-1]["top1_agreement"]
    assert report.held_out_after.loss < report.held_out_before.loss
    for line in lines:
        assert line["loss"] == pytest.approx(line["hidden_loss"] + 0.1 * line["token_loss"])
    assert (report.conversations, report.held_out_conversations, report.epochs) == (15, 1, 2)
    data = split(conversations, 0.05, 0).training
    assert report.tokens == 2 * sum(map(len, data)) == sum(line["tokens"] for line in steps)
    assert report.supervised_tokens == 2 * sum(c.num_supervised_tokens for c in data)
    assert report.first_loss == steps[0]["loss"]
    assert report.last_loss == steps[-1]["loss"]
    assert report.tokens_per_second == report.tokens / report.seconds


def test_what_it_writes(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(data=("chats.jsonl",))
    report = train_draft(config, tiny_target, conversations)
    assert sorted(path.name for path in report.drafter.iterdir()) == [
        "config.json",
        "model.safetensors",
        "provenance.json",
        "training_log.jsonl",
    ]
    provenance = read_provenance(report.drafter)
    assert target_mismatch(provenance, tiny_target.identity) == []
    assert provenance.about["target"] == config.target
    assert provenance.about["settings"]["data"] == ["chats.jsonl"]
    load_drafter(report.drafter, tiny_target)


def test_same_seed_same_weights_other_seed_others(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    for run, seed in (("one", 0), ("again", 0), ("other", 1)):
        train_draft(make_config(run, seed=seed), tiny_target, conversations)
    run = make_config().run.parent
    assert equal(weights(run / "one"), weights(run / "again"))
    assert not equal(weights(run / "one"), weights(run / "other"))


def test_targets_weights_stay_as_they_are(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    before = {name: w.clone() for name, w in tiny_target.model.state_dict().items()}
    train_draft(make_config(), tiny_target, conversations)
    assert equal(before, dict(tiny_target.model.state_dict()))


def _losses(
    target: TransformersTarget, drafter: Drafter, data: Sequence[TokenizedConversation]
) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss of a drafter over some conversations and its gradients, without noise."""
    states = OnlineStates(target, (), torch.float32)
    batch = make_batch(data, equal_weights, states, target.device)
    sums = loss_sums(drafter, batch, target, LossConfig(ttt_steps=1))
    drafter.zero_grad()
    loss = sums.total / sum(c.loss_mask[2:].sum() for c in data)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in drafter.named_parameters()}


def test_what_follows_the_last_supervised_token_changes_nothing(
    tiny_target: TransformersTarget,
) -> None:
    """Masked positions enter neither loss nor gradient; nothing later can see back into earlier ones."""
    ids = np.arange(20, dtype=np.int32) + 3
    mask = np.zeros(20, np.bool_)
    mask[8:12] = True
    one = replace(conversation(0), input_ids=ids, loss_mask=mask)
    other = replace(one, input_ids=np.where(np.arange(20) < 12, ids, 200).astype(np.int32))
    drafter = EagleDrafter.for_target(tiny_target)
    loss, gradients = _losses(tiny_target, drafter, [one])
    other_loss, other_gradients = _losses(tiny_target, drafter, [other])
    assert other_loss == loss
    assert equal(gradients, other_gradients)


def test_loss_mask_decides_which_positions_count(tiny_target: TransformersTarget) -> None:
    """The loss over tokens 8 and 9 is the mean of the losses over 8 alone and over 9 alone."""
    ids = np.arange(20, dtype=np.int32) + 3
    losses = []
    drafter = EagleDrafter.for_target(tiny_target)
    for supervised in ([8], [9], [8, 9]):
        mask = np.isin(np.arange(20), supervised)
        one = replace(conversation(0), input_ids=ids, loss_mask=mask)
        losses.append(_losses(tiny_target, drafter, [one])[0])
    assert losses[0] != losses[1]
    assert losses[2] == pytest.approx((losses[0] + losses[1]) / 2, rel=1e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_in_a_single_file(
    tied: bool, tmp_path: Path, make_config: MakeConfig, conversations: Conversations
) -> None:
    """A tied target's file holds no lm_head at all."""
    directory = save_tiny_target(tmp_path / "target", tie_word_embeddings=tied)
    assert [path.name for path in directory.glob("*.safetensors*")] == ["model.safetensors"]
    target = TransformersTarget.load(str(directory))
    report = train_draft(make_config(epochs=8), target, conversations)
    assert report.held_out_after.loss < report.held_out_before.loss
    saved = weights(report.drafter.parent)
    assert not [name for name in saved if "embed" in name or "head" in name]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral", "gemma2", "phi3", "granite"])
def test_llama_like_families(
    family: str, tmp_path: Path, make_config: MakeConfig, conversations: Conversations
) -> None:
    """The drafter's layer is Llama's; soft-capping and logit scaling are the head's."""
    shape = tiny_config().to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "pad_token_id")
    names += ("num_attention_heads", "num_key_value_heads", "head_dim", "initializer_range")
    config = AutoConfig.for_model(family, **{name: shape[name] for name in names})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
    byte_tokenizer().save_pretrained(tmp_path / family)
    target = TransformersTarget.load(str(tmp_path / family))
    report = train_draft(make_config(epochs=8), target, conversations)
    assert report.held_out_after.loss < report.held_out_before.loss


def test_sharded_target(
    tmp_path: Path,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
) -> None:
    directory = tmp_path / "target"
    tiny_target.model.save_pretrained(directory, max_shard_size="20KB")
    tiny_target.tokenizer.save_pretrained(directory)
    assert len(list(directory.glob("*.safetensors"))) > 1
    target = TransformersTarget.load(str(directory))
    train_draft(make_config("sharded"), target, conversations)
    train_draft(make_config("single"), tiny_target, conversations)
    assert equal(weights(tmp_path / "sharded"), weights(tmp_path / "single"))


def test_a_conversation_with_nothing_to_learn_is_left_out(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    silent = replace(conversations[0], loss_mask=np.zeros_like(conversations[0].loss_mask))
    report = train_draft(make_config(), tiny_target, [silent, *conversations[1:]])
    assert report.conversations + report.held_out_conversations == 15


@pytest.mark.parametrize("nothing", [[], ["silent"]])
def test_no_training_data(
    nothing: list[str], make_config: MakeConfig, tiny_target: TransformersTarget
) -> None:
    one = conversation(0)
    silent = replace(one, loss_mask=np.zeros_like(one.loss_mask))
    with pytest.raises(DataError) as error:
        train_draft(make_config(), tiny_target, [silent for _ in nothing])
    assert str(error.value) == (
        "No training data: no conversation has a supervised token to learn."
    )


def test_unwritable_output(
    tmp_path: Path,
    make_config: MakeConfig,
    tiny_target: TransformersTarget,
    conversations: Conversations,
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactError) as error:
        train_draft(make_config("file"), tiny_target, conversations)
    assert str(error.value) == (
        f"Cannot write to {tmp_path}/file/drafter: Not a directory. "
        "Choose another place with --run."
    )


def test_diverging_stops_with_step_and_records(
    make_config: MakeConfig, tiny_target: TransformersTarget
) -> None:
    config = make_config(epochs=400, learning_rate=1e30, held_out=0.0, checkpoint_every=1000)
    with pytest.raises(DrafterError) as error:
        train_draft(config, tiny_target, [conversation(0), conversation(1)])
    message = str(error.value)
    assert message.startswith(
        "Training stopped: the loss of step 2 is nan, in the conversations made:"
    )
    assert "made:0" in message
    assert "made:1" in message
    assert "Lower --learning-rate" in message
    assert not (config.run / "drafter/provenance.json").exists()


def _selected_by(run: Path, identity: dict[str, object]) -> None:
    """A selection file as `sfdd filter` leaves it, as far as training reads it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (run / "distilled").mkdir(parents=True)
    data = write_jsonl(run / "distilled" / "a.jsonl", [openai("Hi", f"Hello {i}") for i in "abc"])
    distilled = {"a.jsonl": digest_files([data])}
    provenance = Provenance(identity, {"target": "another/model", "distilled": distilled})
    schema = pa.schema([("id", pa.string())], {b"sfdd.provenance": provenance.to_json()})
    pq.write_table(schema.empty_table(), RunDirectory(run).selection)


def test_selection_of_another_target_is_refused(
    make_config: MakeConfig, tiny_target: TransformersTarget
) -> None:
    config = make_config()
    _selected_by(config.run, dict(tiny_target.identity) | {"target": "abc"})
    with pytest.raises(ArtifactError) as error:
        train(config)
    assert str(error.value) == (
        f"The data in {config.run} were selected by another/model, but the target is "
        f"{config.target}: target (was abc, now {tiny_target.identity['target']}). "
        "Train with the target that selected them, or in another directory with --run."
    )


def test_selection_of_this_target_in_another_dtype_is_fine(
    make_config: MakeConfig, tiny_target: TransformersTarget
) -> None:
    config = make_config(max_steps=1)
    _selected_by(config.run, dict(tiny_target.identity) | {"dtype": "bfloat16"})
    assert train(config).steps == 1


def test_distilled_data_that_are_not_what_was_selected_are_refused(
    make_config: MakeConfig, tiny_target: TransformersTarget
) -> None:
    config = make_config(max_steps=1)
    _selected_by(config.run, dict(tiny_target.identity))
    write_jsonl(config.run / "distilled" / "a.jsonl", [openai("Other", "data")])
    with pytest.raises(ArtifactError, match=r"a\.jsonl is not what 'sfdd filter' wrote"):
        train(config)


def test_half_the_data_is_half_the_steps(
    make_config: MakeConfig, tiny_target: TransformersTarget
) -> None:
    equal_length = [conversation(number, length=24) for number in range(40)]
    whole, half = (
        train_draft(make_config(f"run{count}", held_out=0.0), tiny_target, equal_length[:count])
        for count in (40, 20)
    )
    assert (whole.steps, half.steps) == (20, 10)  # 2 epochs, 96 tokens a step
    rates = [line["learning_rate"] for line in log_lines(half.drafter.parent)]
    assert [round(rate / 3e-3, 6) for rate in rates] == [round(n / 10, 6) for n in range(10, 0, -1)]


def test_gradients_are_clipped_and_the_betas_are_eagles(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    """After one step AdamW's first moment is (1 - 0.9) times the gradient, whose norm is 0.5."""
    config = make_config(hidden_loss_weight=1e3, held_out=0.0, max_steps=1)
    training = trainer(config, tiny_target, split(conversations, 0.0, 0))
    training.run(lambda _: None)
    optimizer = training.learner.optimizer
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    norm = torch.cat([moment.flatten() for moment in moments]).norm().item()
    assert log_lines(config.run)[0]["gradient_norm"] > 0.5
    assert norm == pytest.approx(0.1 * 0.5, rel=1e-4)
    assert optimizer.defaults["betas"] == (0.9, 0.95)


def test_a_target_that_vllm_does_not_serve_with_the_method_is_warned_of(
    make_config: MakeConfig, conversations: Conversations, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(method="eagle3", ttt_steps=1, max_steps=1, held_out=0.0)
    train_draft(config, make_target("mixtral"), conversations)
    assert "vLLM 0.32 cannot serve eagle3 drafters for mixtral targets" in caplog.text


def test_everything_cannot_be_held_out(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    report = train_draft(make_config(held_out=0.99, max_steps=1), tiny_target, conversations)
    assert report.conversations >= 1


def test_the_last_step_can_diverge_too(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(learning_rate=1e20, max_steps=1)
    with pytest.raises(DrafterError, match="the held-out loss after step 1 is nan"):
        train_draft(config, tiny_target, conversations)
    assert not (config.run / "drafter/provenance.json").exists()


def test_weights_that_are_not_finite_are_neither_saved_nor_loaded(
    tiny_target: TransformersTarget, tmp_path: Path
) -> None:
    drafter = EagleDrafter.for_target(tiny_target)
    drafter.save(tmp_path, Provenance({}))
    stored = load_file(tmp_path / "model.safetensors")
    stored["fc.weight"][0, 0] = drafter.fc.weight.data[0, 0] = float("inf")
    with pytest.raises(DrafterError, match="weights are not finite, so it was not saved"):
        drafter.save(tmp_path, Provenance({}))
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(DrafterError, match="some of its weights are not finite"):
        load_drafter(tmp_path, tiny_target)


def test_a_damaged_drafter_is_not_finished(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(max_steps=1)
    train_draft(config, tiny_target, conversations)
    checkpoint = config.run / "drafter/checkpoints/step-1"
    checkpoint.mkdir(parents=True)
    (config.run / "drafter/model.safetensors").write_bytes(b"")
    with pytest.raises(DrafterError, match=r"is damaged: .* 'sfdd train-draft --overwrite'"):
        train_draft(config, tiny_target, conversations)
    assert checkpoint.exists()
    assert train_draft(replace(config, overwrite=True), tiny_target, conversations).steps == 1


def test_finished_training_is_reported_and_not_repeated(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config()
    report = train_draft(config, tiny_target, conversations)
    modified = (report.drafter / "model.safetensors").stat().st_mtime_ns
    again = train_draft(config, tiny_target, conversations)
    assert again == replace(report, already_finished=True)
    assert (report.drafter / "model.safetensors").stat().st_mtime_ns == modified


def test_noise_is_on_training_and_not_on_measuring(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    first = {}
    for noise in (0.0, 1.0):
        config = make_config(f"noise-{noise}", noise=noise, max_steps=1)
        train_draft(config, tiny_target, conversations)
        first[noise] = log_lines(config.run)
    measured, step = 0, 1
    assert first[0.0][measured]["loss"] == first[1.0][measured]["loss"]
    assert first[0.0][step]["loss"] != first[1.0][step]["loss"]


def test_learning_rate_of_the_schedule_reaches_the_optimizer(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(max_steps=4, warmup=0.5, learning_rate=0.008)
    training = trainer(config, tiny_target, split(conversations, 0.0, 0))
    groups = training.learner.optimizer.param_groups
    used = []
    training.run(lambda _: used.append(groups[0]["lr"]))
    assert used == [0.004, 0.008, 0.008, 0.004]
    assert [line["learning_rate"] for line in log_lines(config.run)] == used


def test_report_survives_json(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    config = make_config(max_steps=2, held_out=0.0)
    report = train_draft(config, tiny_target, conversations)
    value = json.loads(json.dumps(report.to_json()))
    restored = type(report).from_json(value, report.drafter)
    assert restored == replace(report, already_finished=True)
    assert restored.held_out_before is None


def test_every_position_is_trained_on_the_targets_own_states(
    make_config: MakeConfig, tiny_target: TransformersTarget, conversations: Conversations
) -> None:
    """The logged first loss is that of an untrained drafter, computed here the plain way."""
    config = make_config(noise=0.0, held_out=0.0, batch_tokens=10**6, max_steps=1)
    train_draft(config, tiny_target, conversations)
    fresh = trainer(
        replace(config, run=config.run / "fresh"), tiny_target, split(conversations, 0.0, 0)
    )
    loss, _ = _losses(tiny_target, fresh.learner.drafter, conversations)
    assert log_lines(config.run)[0]["loss"] == pytest.approx(loss, rel=1e-5)
