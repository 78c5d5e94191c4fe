"""From any chat data set to token ids with a loss mask.

sources    recognise a data set, and read it record by record (with `recognition`, `streams`, `files`,
           `json_values`, `tables`, `hub`); write the kept records back, untouched
formats    a record -> what it says, by the format it has; `messages` reads its turns
template   the target's chat template: messages -> text, and what it can write
answers    where in that text the target's answers stand
rendering  text -> input_ids and loss mask, in as few samples as hold every answer
pipeline   all in a row: every record comes out tokenized or skipped with a reason
config     the choices: format, reasoning, rewritten history
"""
