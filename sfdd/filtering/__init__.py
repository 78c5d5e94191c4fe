"""scores.parquet -> which conversations to keep -> the distilled data set. Needs no model and no torch.

config     what the user can set
budgets    which rows a budget keeps: arithmetic on arrays
groups     kinds of conversations: by source, length, turns, or a column
joining    the user's own columns
scores     the columns of a score table that a selection looks at
selection  scores -> kept and dropped, and the threshold between them
report     what kind of data was kept, and what all but went
distill    selection -> the kept records, in the form they came in
table      selection.parquet
run        the command
"""
