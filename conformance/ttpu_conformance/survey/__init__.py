"""The survey: every causal language model of transformers, run by TTPU in a tiny size and compared with torch."""
