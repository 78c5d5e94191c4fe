"""The target model behind one small face: statistics for scoring, hidden states for training.

loading              a name -> files, tokenizer, weights, fingerprint
smollm2              the embedded target
body                 calling a transformers body, with or without a KV cache
statistics           logits -> flatness and the other metrics of each token
transformers_target  all of it together
"""
