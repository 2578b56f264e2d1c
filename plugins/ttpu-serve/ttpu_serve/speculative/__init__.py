"""Speculative decoding: a proposer drafts the next tokens, and the model verifies several of them in one step.

It is exact for every proposer: at each position the model samples with the noise that it would use anyway (keyed by the
request's seed and the position), and draft tokens are accepted while they equal the sampled tokens. Drafts change the
number of steps, never the tokens.
"""
