"""The engine's loop: requests in, scheduled steps to a model runner, tokens and text out."""
