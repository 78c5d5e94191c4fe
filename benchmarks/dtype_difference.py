"""What weights of lower precision do to the scores: the same conversations in float32 and in another.

python benchmarks/dtype_difference.py [--target smollm2] [--dtype bfloat16] [--conversations 60]
"""

import argparse
from pathlib import Path

import numpy as np
from score_throughput import DATA, tokenized

from sfdd.targets.transformers_target import TransformersTarget


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--conversations", type=int, default=60)
    parser.add_argument("--data", default=str(DATA / "chat_openai.jsonl"))
    options = parser.parse_args()
    means, tokens = [], []
    for dtype in ("float32", options.dtype):
        target = TransformersTarget.load(options.target, dtype=dtype)
        conversations = tokenized(target, Path(options.data))[: options.conversations]
        stats = [target.token_stats([conversation])[0] for conversation in conversations]
        means.append(np.array([s.means()["flatness"] for s in stats]))
        tokens.append(np.concatenate([s.flatness for s in stats]))
    token, mean = (np.abs(b / a - 1) for a, b in (tokens, means))
    kept = [m >= np.quantile(m, 0.5, method="higher") for m in means]
    print(f"{len(mean)} conversations, {len(token):,} supervised tokens, {options.dtype}")
    print(
        f"token flatness: median {np.median(token):.2%}, 99 % below {np.quantile(token, 0.99):.2%} off"
    )
    print(f"flatness of a conversation: median {np.median(mean):.2%}, at most {mean.max():.2%} off")
    print(f"same choice at keep 0.5: {np.mean(kept[0] == kept[1]):.1%} of the conversations")


if __name__ == "__main__":
    main()
