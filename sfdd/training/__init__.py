"""Training a drafter: conversations -> the target's hidden states -> losses -> checkpoints.

config, run           what can be asked for; from the target and the data to a finished drafter
data, flatness        what is trained on and what is held out; the weights of tokens
states, cache         the target's hidden states, computed in the loop or read from disk;
  caching             filling that cache
schedule, steps       which conversations make up which step, process and micro-batch
batches, supply       what a forward pass is given, and where it comes from
objectives, losses    what is minimised, and measured
module, learner       the drafter with its objective; its optimizer and one step of it
distributed           the processes that train together
precision             half precision
loop, stopping        the training loop, and what ends it early
measuring, report     held-out conversations; what is told at the end
checkpoints, log      what is on disk meanwhile
trackers, failure     curves for people; losses that are not finite
"""
