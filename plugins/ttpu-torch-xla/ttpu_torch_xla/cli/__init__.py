"""Commands that this backend adds to `ttpu`."""
