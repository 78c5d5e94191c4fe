"""scores.parquet -> which conversations to keep -> the distilled data set. Needs no model and no torch.

config     what the user can set
selection  scores -> kept and dropped, and the threshold between them
distill    selection -> the kept records, in the form they came in
run        the command
"""
