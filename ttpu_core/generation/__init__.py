"""What generation means on every backend: sampling parameters, stream events, and the detokenizer."""
