"""Guided decoding: grammars and masks of the tokens that they allow."""
