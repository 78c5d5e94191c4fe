"""How much memory reading takes: large files of every kind of JSON, each read by a process of its own.

    python benchmarks/reading_memory.py [--gigabytes 2]

Prints records, MB/s of JSON and the peak resident set, which must not grow with the file.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import monotonic

from sfdd.conversations.streams import GZIP, write_compressed

WORDS = [
    "flat",
    "tokens",
    "are",
    "more",
    "valuable",
    "für",
    "draft",
    "模型",
    "training",
    "😀",
    "\n",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2, help="size of each file, as JSON")
    parser.add_argument("--read", type=Path, help="read this file and print the figures as JSON")
    arguments = parser.parse_args()
    if arguments.read:
        print(json.dumps(read(arguments.read)))
        return
    size = int(arguments.gigabytes * 1e9)
    with tempfile.TemporaryDirectory(prefix="sfdd-reading-") as folder:
        for name in ("data.jsonl", "data.json", "data.jsonl.gz"):
            path = Path(folder, name)
            write(path, size)
            command = [sys.executable, __file__, "--read", str(path)]
            process = subprocess.run(command, check=True, capture_output=True, text=True)
            figures = json.loads(process.stdout)
            print(
                f"{name:14} {size / 1e9:.1f} GB  {figures['records']:,} records  "
                f"read {size / 1e6 / figures['reading']:.0f} MB/s  "
                f"counted {size / 1e6 / figures['counting']:.0f} MB/s  "
                f"opened in {figures['opening']:.2f} s  peak {figures['peak']:.0f} MB "
                f"(of which {figures['start']:.0f} MB before reading)",
                flush=True,
            )
            path.unlink()


def write(path: Path, size: int) -> None:
    """Conversations until there are `size` bytes of JSON: lines, or an array in a single line."""
    is_array = path.suffix == ".json"
    written = 0
    with write_compressed(path, GZIP if path.suffix == ".gz" else b"") as file:
        file.write(b"[" if is_array else b"")
        for i, record in enumerate(records()):
            text = json.dumps({"id": f"{i:09}", **record}, ensure_ascii=False).encode()
            file.write((b", " if i and is_array else b"") + text + (b"" if is_array else b"\n"))
            written += len(text) + 1
            if written >= size:
                break
        file.write(b"]" if is_array else b"")


def records() -> Iterator[dict[str, object]]:
    """Endless conversations of two to eight turns."""
    random = Random(0)
    texts = [" ".join(random.choices(WORDS, k=random.randint(1, 400))) for _ in range(1000)]
    while True:
        turns = [
            {"from": "human", "value": random.choice(texts)} for _ in range(random.randint(2, 8))
        ]
        for turn in turns[1::2]:
            turn["from"] = "gpt"
        yield {"conversations": turns}


def read(path: Path) -> dict[str, float]:
    """Seconds, records, and the peak resident set in MB."""
    from sfdd.conversations.pipeline import open_sources, read_conversations

    start = peak()
    began = monotonic()
    sources = open_sources([str(path)])
    opened = monotonic()
    number = sum(1 for _ in read_conversations(sources))
    done = monotonic()
    assert sources[0].count() == number
    return {
        "records": number,
        "opening": opened - began,
        "reading": done - opened,
        "counting": monotonic() - done,
        "start": start,
        "peak": peak(),
    }


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000  # Linux has it in kB


if __name__ == "__main__":
    main()
