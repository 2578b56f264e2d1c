"""Commands that this backend adds to `ttpu`, by entry points of the group `ttpu.commands`."""
