"""From any chat data set to token ids with a loss mask.

sources    recognise a data set: `files` (JSONL, JSON, Parquet) or `hub` (datasets)
records    what they share: records one by one, and back: the kept ones, untouched
formats    a record -> messages (ShareGPT, OpenAI)
rendering  messages -> input_ids and loss mask, by the target's chat template
pipeline   all in a row: every record comes out tokenized or skipped with a reason
"""
