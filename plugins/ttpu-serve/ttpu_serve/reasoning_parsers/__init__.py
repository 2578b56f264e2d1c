"""How models write reasoning: a protocol, the format of this distribution, and discovery by entry points."""
