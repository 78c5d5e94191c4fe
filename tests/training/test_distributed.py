"""Two real processes on the CPU, as torchrun starts them, come to what one comes to."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from helpers import openai, write_jsonl
from training.helpers import assert_same_course, assert_same_weights, equal, log_lines, weights

from sfdd.errors import UsageError
from sfdd.training.config import TrainConfig
from sfdd.training.distributed import together
from sfdd.training.run import train

_TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
_LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"]
_LAUNCH += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
_STARTS = "import sys\n{first}\nfrom sfdd_cli.main import app\napp()\n"

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def config(tmp_path: Path, tiny_directory: Path) -> TrainConfig:
    """A training of a few steps, some of them with an odd number of conversations."""
    records = [
        openai(f"Count from {n}", " ".join(map(str, range(n, n + n % 7 + 2)))) for n in range(18)
    ]
    data = write_jsonl(tmp_path / "chats.jsonl", records)
    return TrainConfig(
        target=str(tiny_directory),
        data=(str(data),),
        run=tmp_path / "one",
        batch_tokens=200,
        epochs=2,
        learning_rate=3e-3,
        checkpoint_every=4,
        held_out=0.2,
    )


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start(
        config: TrainConfig, launcher: Sequence[str] = _TWO, first: str = "", **variables: str
    ) -> "subprocess.Popen[str]":
        """The command that trains so, in two processes, each of which does `first` before all else."""
        script = tmp_path / "sfdd_script.py"
        script.write_text(_STARTS.format(first=first))
        return subprocess.Popen(
            [*launcher, str(script), "train-draft", *_arguments(config)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "SFDD_RUN": str(config.run)} | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def _arguments(config: TrainConfig) -> list[str]:
    """What to say to the command for what is not as by default. The run is in the environment."""
    options = []
    for name, value in vars(config).items():
        if name in ("data", "run") or value == TrainConfig.__dataclass_fields__[name].default:
            continue
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [*config.data, *options]


def _finish(process: "subprocess.Popen[str]") -> str:
    """Its output, which must be that of one process."""
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    assert stderr.count("Next: sfdd eval") == 1
    return stdout


@pytest.mark.parametrize(
    ("method", "fsdp"),
    [
        pytest.param("eagle", False, id="eagle-ddp"),
        pytest.param("eagle3", True, id="eagle3-fsdp"),
        pytest.param("eagle3", False, id="eagle3-ddp", marks=pytest.mark.slow),
        pytest.param("eagle", True, id="eagle-fsdp", marks=pytest.mark.slow),
    ],
)
def test_two_processes_give_the_losses_and_weights_of_one(
    method: str, fsdp: bool, config: TrainConfig, start: Start
) -> None:
    config = replace(config, method=method, micro_batch_tokens=80)
    train(config)
    two = replace(config, run=config.run.parent / "two", fsdp=fsdp)
    assert _finish(start(two)).startswith(f"Trained {two.run}/drafter\n")
    assert len({line["step"] for line in log_lines(config.run)}) > 6
    assert_same_course(two.run, config.run)
    assert_same_weights(two.run, config.run)
    assert not (two.run / "drafter/checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_in_bfloat16_come_near_one(
    fsdp: bool, config: TrainConfig, start: Start
) -> None:
    config = replace(config, method="eagle3", precision="bf16")
    train(config)
    two = replace(config, run=config.run.parent / "two", fsdp=fsdp)
    _finish(start(two))
    assert_same_course(two.run, config.run, rel=0.05)


@pytest.mark.slow
def test_steps_too_small_for_all_processes_are_warned_of(config: TrainConfig, start: Start) -> None:
    _, stderr = start(replace(config, batch_tokens=60, max_steps=1)).communicate(timeout=120)
    warning = (
        r"A step of --batch-tokens 60 has \d\.\d conversations for 2 processes, so some are idle"
    )
    assert len(re.findall(warning, stderr)) == 1


@pytest.mark.slow
def test_accelerate_launch_shards_and_two_processes_fill_one_cache(
    config: TrainConfig, start: Start
) -> None:
    config = replace(config, method="eagle3", gradient_checkpointing=True)
    train(config)
    two = replace(config, run=config.run.parent / "two", cache=config.run.parent / "cache")
    _finish(start(two, [*_LAUNCH, "--use_fsdp", "--fsdp_version", "2"]))
    assert_same_course(two.run, config.run)
    assert_same_weights(two.run, config.run)
    assert len(list((two.cache or Path()).glob("states-*.safetensors"))) == 2


@pytest.mark.parametrize(
    "fsdp", [pytest.param(False, id="ddp", marks=pytest.mark.slow), pytest.param(True, id="fsdp")]
)
def test_sigterm_leaves_a_checkpoint_and_two_processes_go_on_exactly(
    fsdp: bool, config: TrainConfig, start: Start
) -> None:
    config = replace(config, fsdp=fsdp, epochs=10, checkpoint_every=10**6)
    whole = replace(config, run=config.run.parent / "whole")
    _finish(start(whole))
    process = start(config)
    log = config.run / "drafter/training_log.jsonl"
    while not (log.exists() and len(log.read_text().splitlines()) > 9):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert stdout == ""
    assert stderr.count("Interrupted. What was finished is kept") == 1
    assert not (config.run / "drafter/provenance.json").exists()
    newest = max(
        int(path.name.removeprefix("step-"))
        for path in (config.run / "drafter/checkpoints").glob("step-*")
    )
    assert newest == max(line["step"] for line in log_lines(config.run))  # nothing done was lost
    _finish(start(config))
    assert equal(weights(config.run), weights(whole.run))


@pytest.mark.slow
def test_killed_processes_go_on_exactly(config: TrainConfig, start: Start) -> None:
    config = replace(config, epochs=20, method="eagle3")
    whole = replace(config, run=config.run.parent / "whole")
    _finish(start(whole))
    pids = config.run.parent / "pids"
    process = start(config, first=f"import os\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')")
    while not (config.run / "drafter/checkpoints/step-12").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    for pid in pids.read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    _finish(start(config))
    assert equal(weights(config.run), weights(whole.run))


@pytest.mark.slow
def test_a_checkpoint_of_two_sharded_processes_is_continued_by_one(
    config: TrainConfig, start: Start
) -> None:
    config = replace(config, max_hours=1e-9)  # one step, and time is up
    process = start(replace(config, fsdp=True))
    stdout, stderr = process.communicate(timeout=120)
    assert stdout.startswith(f"Not finished: {config.run}/drafter\n")
    assert re.search(r"Stopped after --max-hours 1e-09, at step 1 of \d+: run the same", stderr)
    train(replace(config, max_hours=None))
    whole = replace(config, run=config.run.parent / "whole", max_hours=None)
    train(whole)
    assert_same_course(config.run, whole.run)
    assert_same_weights(config.run, whole.run)


def test_a_mistake_is_told_once_and_at_once(config: TrainConfig, start: Start) -> None:
    config = replace(config, method="eagle3", aux_layers=(1, 2, 3))
    process = start(replace(config, aux_layers=None), first="sys.argv += ['--aux-layers', '1,2,3']")
    _, stderr = process.communicate(timeout=120)
    message = (
        "Error: --aux-layers is 1,2,3; it must be 2 different layers of the target, from 1 to 2."
    )
    assert stderr.count(message) == 1
    assert process.returncode == 1


@pytest.mark.slow
def test_the_others_wait_for_the_first_as_long_as_it_takes(
    config: TrainConfig, start: Start
) -> None:
    """The patience of the process group is a week; PyTorch's own is half an hour, or ten minutes."""
    first = (
        "import os, time, torch.distributed as d\n"
        "begin = d.init_process_group\n"
        "def told(*a, **k):\n"
        "    print('patience', k['timeout'], file=sys.stderr)\n"
        "    begin(*a, **k)\n"
        "    time.sleep(8 if os.environ['RANK'] == '0' else 0)\n"
        "d.init_process_group = told\n"
    )
    process = start(replace(config, max_steps=2), first=first)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stderr.count("patience 7 days, 0:00:00") == 2


def test_settings_that_contradict_the_launcher() -> None:
    with pytest.raises(UsageError) as error, together(TrainConfig(fsdp=True)):
        pass
    assert str(error.value) == (
        "--fsdp shards the drafter over several processes, and this is one. Start sfdd with "
        "'torchrun --nproc-per-node N', or leave --fsdp out."
    )
    said = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    with pytest.raises(UsageError) as error, together(TrainConfig(), said):
        pass
    assert str(error.value) == (
        "'accelerate launch' was told to use bf16, and --precision is fp32. Say the same to both."
    )
    with together(TrainConfig(precision="bf16"), said) as ranks:
        assert (ranks.index, ranks.count) == (0, 1)
    deepspeed = {"ACCELERATE_USE_DEEPSPEED": "true"}
    with pytest.raises(UsageError) as error, together(TrainConfig(), deepspeed):
        pass
    assert str(error.value) == (
        "'accelerate launch' was told to use DeepSpeed, and sfdd trains with DDP or FSDP. Choose one of "
        "these, or start sfdd with 'torchrun'."
    )


@pytest.mark.slow
def test_tracker_files_and_log_come_from_one_process(config: TrainConfig, start: Start) -> None:
    _finish(start(config))
    assert len(list((config.run / "tensorboard").iterdir())) == 1
    steps = [line["step"] for line in log_lines(config.run) if line["kind"] == "step"]
    assert steps == sorted(set(steps))
    provenance = json.loads((config.run / "drafter/provenance.json").read_text())
    assert provenance["about"]["result"]["steps"] == len(steps)
