"""The commands `ttpu train` and `ttpu export`."""
