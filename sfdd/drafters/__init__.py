"""The draft models: architecture, config, load, save.

layer       a target's configuration -> the configuration of one Llama layer, as engines load it
attention   attention of a draft step: over the conversation, and over the drafter's own earlier steps
drafter     what the kinds share: reading, drafting, saving
eagle       EAGLE: predicts the target's next hidden state
eagle3      EAGLE-3: reads three layers of the target, has a head of its own
vocabulary  which tokens a head of its own can draft
loading     a new drafter, or one from a directory
serving     which targets vLLM serves with a drafter
"""
