"""Parsers for tool calls: a protocol, the formats of this distribution, and discovery by entry points."""
