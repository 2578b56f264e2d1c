"""The commands `ttpu serve`, `ttpu bench` and `ttpu compile`."""
