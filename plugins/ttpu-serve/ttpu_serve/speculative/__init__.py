"""Speculative decoding: a proposer guesses the next tokens, and the model checks several of them in one step.

Exact for every proposer: at each position the model samples with the noise that it would use there anyway (keyed by
the request's seed and the position), and drafts count as long as they equal what was sampled. A guess changes how many
steps an answer takes, never its tokens."""
