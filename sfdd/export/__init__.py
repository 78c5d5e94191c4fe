"""To what others load: checkpoints for vLLM and SGLang, data for other trainers.

config      what the two commands can be told
checkpoint  a drafter's directory: read, and written whole or not at all
layouts     what each engine reads of a drafter, and how to get from one form to the other
findings    what an engine would reject of a drafter, or take for something else, a sentence each
layer       the same for what the one layer does, and what of it is the target's
eagle3      the same for the parts that EAGLE-3 alone has: draft vocabulary and aux layers
drafting    one draft step with the loaded drafter
drafters    all of that in a row: `sfdd export` and `sfdd export --check`
trainers    what each trainer reads of a conversation
records     a conversation -> what such a trainer reads, or why it cannot be said
writing     rows of JSONL and Parquet
recorded    what the run says: data, target, mask
data        all of that in a row: `sfdd export-data`
"""
