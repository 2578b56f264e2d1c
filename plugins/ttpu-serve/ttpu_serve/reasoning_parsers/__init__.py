"""Parsers for reasoning text: a protocol, the formats of this distribution, and discovery by entry points."""
