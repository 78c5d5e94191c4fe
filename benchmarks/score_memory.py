"""Whether the memory of `sfdd score` grows with the number of conversations.

Scores short records, a million by default, with a tiny random Llama in a process of its own, and prints
how far the resident set rose above what it was with the model loaded.

    python benchmarks/score_memory.py [--records 1000000]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCORE = """
import sys
from pathlib import Path
from sfdd.scoring.config import ScoreConfig
from sfdd.conversations.pipeline import open_sources
from sfdd.scoring.run import score_with
from sfdd.targets.transformers_backend import TransformersBackend
from sfdd.targets.transformers_target import TransformersTarget

def resident(field):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(field)[2].split()[0]) / 1024

data, target, run = sys.argv[1:]
config = ScoreConfig((data,), target, run=Path(run))
loaded = TransformersBackend(TransformersTarget.load(target), 8192)
sources = open_sources(config.data)
before = resident("VmRSS:")
report = score_with(loaded, sources, config)
print(report.read, report.scored, resident("VmHWM:") - before)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000)
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from conftest import save_tiny_target  # type: ignore[import-not-found]  # the tests' own

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = save_tiny_target(folder / "target")
        with (folder / "data.jsonl").open("w", encoding="utf-8") as data:
            for i in range(options.records):
                turns = [("user", f"{i}?"), ("assistant", f"It is {i}.")]
                messages = [{"role": role, "content": text} for role, text in turns]
                data.write(json.dumps({"id": f"r{i}", "messages": messages}) + "\n")
        command = [sys.executable, "-c", SCORE, str(data.name), str(target), str(folder / "run")]
        started = time.monotonic()
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        read, scored, grown = done.stdout.split()
        size = (folder / "run" / "scores.parquet").stat().st_size
    print(
        f"{read} records read, {scored} scored in {time.monotonic() - started:,.0f} s; "
        f"{float(grown):,.0f} MiB above the loaded model; scores.parquet has {size / 2**20:,.0f} MiB"
    )


if __name__ == "__main__":
    main()
