"""Looking at one record as the target sees it: what is supervised, and how flat it is there."""
