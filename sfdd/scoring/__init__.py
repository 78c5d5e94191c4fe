"""One forward pass of the target over a data set -> scores.parquet.

config     what the user can set
schema     the columns of a score table
batching   conversations of like length together
store      finished rows on disk, so that an interrupted run continues
run        the loop
"""
