"""Training a drafter: conversations -> the target's hidden states -> losses -> checkpoints."""
