"""What a drafter is worth: draft-verify decoding, acceptance length and speedup."""
