"""The vocabulary of generation on every backend: sampling parameters, stream events, and the detokenizer."""
