"""From any chat data set to token ids with a loss mask.

sources    a file, saved data set or hub id -> records, and back: the kept records, untouched
formats    a record -> messages (ShareGPT, OpenAI)
rendering  messages -> input_ids and loss mask, by the target's chat template
pipeline   the three in a row: every record comes out tokenized or skipped with a reason
"""
